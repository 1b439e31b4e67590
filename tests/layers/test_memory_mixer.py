"""What is the memory mixer's own; the contract is run over all mixers.

Token gates, gates at their ends, ways to compute it, metrics and refusals.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers import Arrangement, MemoryMixer
from tests.layers.helpers import (
  MEMORIES,
  SOME,
  assert_close,
  finite,
  jit,
  made,
  randomised,
  tolerance,
)

DIM, HEADS, BATCH, LENGTH = 16, 2, 2, 19
every_memory = pytest.mark.parametrize("name", SOME)


@functools.cache
def mixer_of(name, **changes):
  return randomised(
    made(
      lambda rngs: MemoryMixer(DIM, HEADS, MEMORIES[name], rngs=rngs, **changes)
    )
  )


def inputs(length=LENGTH, batch=BATCH):
  random = np.random.default_rng(2)
  return jnp.asarray(random.standard_normal((batch, length, DIM)), jnp.float32)


# One function for all calls, so that equal shapes compile once.
@jit
def call(mixer, x, state=None, mask=None):
  return mixer(x, state=state, mask=mask)


@jit
def step(mixer, x, state):
  return mixer.step(x, state)


@jit
def slopes(mixer, x):
  """Gradients by parameter and input, and the outputs."""

  def total(mixer, x):
    out = mixer(x)
    return jnp.sum(jnp.sin(out.y)), out

  return jax.grad(total, argnums=(0, 1), has_aux=True)(mixer, x)


def canonical(state):
  """A state without what `prepare` derives from the rest."""
  return state._replace(memory=am.without_cache(state.memory))


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    *(pytest.param(name, {}, marks=pytest.mark.full) for name in MEMORIES),
    ("omeganet", {"token_gate": True}),
  ],
)
def test_any_split_and_any_number_of_steps_is_one_call(name, changes):
  mixer, x = mixer_of(name, **changes), inputs()
  whole = call(mixer, x)
  parts, state = [], mixer.init_state(BATCH)
  for start in (0, 7):
    out = call(mixer, x[:, start : start + 7], state)
    parts.append(out.y)
    state = out.state
  state = jit(lambda mixer, state: mixer.prepare(state))(mixer, state)
  for t in range(14, LENGTH):
    y, state = step(mixer, x[:, t], state)
    parts.append(y[:, None])
  limit = tolerance(MEMORIES[name])
  assert_close(jnp.concatenate(parts, axis=1), whole.y, limit)
  assert_close(canonical(state), canonical(whole.state), limit)


def test_a_token_gate_leaves_the_window_or_shuts_it():
  x = inputs()
  kernel = jnp.zeros((DIM, HEADS, 1))

  def y(z):
    graph, params = nnx.split(mixer_of("omeganet", token_gate=True))
    mixer = nnx.merge(graph, params)
    mixer.gates.token.kernel = nnx.Param(kernel)
    mixer.gates.token.bias = nnx.Param(jnp.full((HEADS, 1), z))
    return mixer, call(mixer, x).y

  mixer, opened = y(1e4)
  plain = nnx.clone(mixer_of("omeganet"))
  nnx.update(plain, nnx.state(mixer, lambda path, _: "token" not in path))
  np.testing.assert_array_equal(opened, call(plain, x).y)

  mixer, shut = y(-1e4)
  rate = mixer.gates.rate
  rate.kernel = nnx.Param(kernel)
  rate.bias = nnx.Param(jnp.full((HEADS, 1), -1e4))
  assert_close(shut, call(mixer, x).y, 1e-6)
  assert not jnp.allclose(opened, shut)


def test_a_token_gate_without_a_window_is_refused():
  with pytest.raises(UserError, match="window of 2 or more"):
    mixer_of("titans", token_gate=True)


@every_memory
@pytest.mark.parametrize("logit", [-20.0, 20.0])
def test_hostile_inputs_stay_finite(name, logit):
  graph, params = nnx.split(mixer_of(name))
  mixer = nnx.merge(graph, params)
  for affine in ("decay", "momentum", "rate", "window"):
    gate = getattr(mixer.gates, affine, None)
    if gate is not None:
      gate.bias = nnx.Param(jnp.full_like(gate.bias[...], logit))
      gate.kernel = nnx.Param(jnp.zeros_like(gate.kernel[...]))
  huge = inputs() * 1e4
  for x in (
    huge,
    jnp.zeros_like(huge),
    jnp.broadcast_to(huge[:, :1], huge.shape),
  ):
    grads, out = slopes(mixer, x)
    assert finite(out)
    assert finite(grads)


@pytest.mark.parametrize(
  "other", [{"form": "associative"}, {"implementation": "reference"}]
)
def test_all_ways_to_compute_it_agree(other):
  x = inputs(length=9, batch=1)
  expected = call(mixer_of("titans"), x).y
  y = call(mixer_of("titans", **other), x).y
  assert_close(y, expected, 1e-5)
  assert not jnp.array_equal(y, expected)


def test_metrics_are_means_over_valid_tokens():
  mixer = mixer_of("titans")
  # The padding test has compiled calls of these shapes.
  mask = jnp.arange(LENGTH)[None] < jnp.array([[9], [9]])
  x = jnp.where(mask[..., None], inputs(), jnp.nan)
  both = call(mixer, x, mask=mask).metrics
  rows = [call(mixer, x[row : row + 1, :9]).metrics for row in range(BATCH)]
  assert set(both) == {
    *("inner_loss", "memory_norm"),
    *("gate_decay", "gate_momentum", "gate_rate", "gate_window"),
  }
  for name, value in both.items():
    assert value.dtype == jnp.float32
    expected = np.mean([row[name] for row in rows])
    np.testing.assert_allclose(value, expected, rtol=1e-4, err_msg=name)


def test_what_would_give_other_numbers_is_refused():
  mixer = mixer_of("titans")
  with pytest.raises(UserError, match="x is int32: give floating"):
    mixer(inputs().astype(jnp.int32))
  with pytest.raises(UserError, match=r"x is .* must be \[B, T, 16\]"):
    mixer(inputs()[0])
  with pytest.raises(UserError, match=r"x is .* must be \[B, T, 16\]"):
    mixer(inputs()[..., :8])
  for other in (
    mixer_of("titans", conv_width=2).init_state(BATCH),
    mixer.init_state(BATCH + 1),
  ):
    with pytest.raises(UserError, match="does not belong to this layer"):
      mixer(inputs(), state=other)
    with pytest.raises(UserError, match="does not belong to this layer"):
      mixer.step(inputs()[:, 0], other)


def test_an_arrangement_is_given_alone():
  mixer, x = mixer_of("titans"), inputs()
  with pytest.raises(UserError, match="give it alone"):
    mixer(x, mask=x[..., 0] > 0, arrangement=Arrangement())


def test_a_memory_that_does_not_fit_is_refused():
  with pytest.raises(UserError, match="3 heads do not divide the width 16"):
    MemoryMixer(16, 3, rngs=nnx.Rngs(0))
  groups = dataclasses.replace(
    MEMORIES["titans"], retention=am.ChannelRetention(3)
  )
  with pytest.raises(UserError, match="decay groups"):
    MemoryMixer(16, 2, groups, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
  ("by_position", "length"), [(False, 1), (True, 8**0.5)]
)
def test_keys_are_as_long_as_their_rates_expect(
  monkeypatch, by_position, length
):
  memory = am.Memory(
    am.Identity(),
    am.MLP(expansion=1.0),
    optimizer=am.GradientDescent(),
    window=1,
    chunk=4,
    rate_by_position=by_position,
  )
  mixer = made(lambda rngs: MemoryMixer(DIM, HEADS, memory, rngs=rngs))
  seen = []
  apply = am.apply

  def watched(memory, params, query, key, *rest, **options):
    seen.extend((query, key))
    return apply(memory, params, query, key, *rest, **options)

  monkeypatch.setattr(am, "apply", watched)
  mixer(inputs(3))
  for vectors in seen:
    norms = np.linalg.norm(vectors, axis=-1)
    np.testing.assert_allclose(norms, length, rtol=1e-4)
  assert len(seen) == 2
