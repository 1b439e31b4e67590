"""Dot, SWDT and DeepTransformers as layers, beyond what holds of all mixers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import memory as am
from atlas_jax.attention import exponential as ex
from atlas_jax.errors import UserError
from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.layers.deep_transformer_mixer import deep_transformer
from atlas_jax.layers.exponential_memory_mixer import (
  DOT,
  SWDT,
  ExponentialMemoryMixer,
)
from tests.layers.helpers import assert_close, finite, jit, made, randomised

DIM, HEADS, BATCH, LENGTH = 16, 4, 2, 13
SMALL = {"expansion": 2.0, "chunk": 4, "window": 3}

MIXERS = {
  "bare deep_transformer": functools.partial(
    deep_transformer, DIM, HEADS, normalised=False, temperature=8.0
  ),
  "mixed deep_transformer": functools.partial(
    deep_transformer,
    DIM,
    HEADS,
    lam=0.5,
    learn_lam=True,
    kv_heads=2,
    qk_norm=True,
    chunk=4,
  ),
  "gated attention": functools.partial(
    deep_transformer, DIM, HEADS, lam=0.0, gated=True
  ),
  "bare dot": functools.partial(
    ExponentialMemoryMixer,
    DIM,
    HEADS,
    dataclasses.replace(DOT, normalised=False, **SMALL),
  ),
  "linear swdt": functools.partial(
    ExponentialMemoryMixer,
    DIM,
    HEADS,
    dataclasses.replace(SWDT, linear=True, **SMALL),
  ),
}


@functools.cache
def inputs():
  random = np.random.default_rng(2)
  return jnp.asarray(random.standard_normal((BATCH, LENGTH, DIM)), jnp.float32)


@jit
def call(mixer, x, state=None):
  return mixer(x, state=state)


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


def parameters(mixer):
  return nnx.to_pure_dict(nnx.state(mixer))


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name,
      marks=() if name == "mixed deep_transformer" else pytest.mark.full,
    )
    for name in MIXERS
  ],
)
def test_options_keep_the_contract(name):
  build, x = MIXERS[name], inputs()
  mixer = randomised(made(lambda rngs: build(rngs=rngs)))
  (by_parameter, by_input), whole = slopes(mixer, x)
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    parameters(by_parameter)
  ):
    assert jnp.any(leaf != 0), path
  assert jnp.all(jnp.any(by_input != 0, axis=-1))
  for hostile in (1e4 * x, jnp.zeros_like(x)):
    assert finite(slopes(mixer, hostile))
  slow = randomised(
    made(lambda rngs: build(implementation="reference", rngs=rngs))
  )
  assert_close(call(slow, x).y, whole.y, 1e-5)
  out = call(mixer, x[:, :10])
  state, parts = mixer.prepare(mixer.resize(out.state, LENGTH)), [out.y]
  for t in range(10, LENGTH):
    y, state = step(mixer, x[:, t], state)
    parts.append(y[:, None])
  assert_close(jnp.concatenate(parts, axis=1), whole.y, 1e-5)


def test_without_a_deep_part_it_is_the_transformer_itself():
  x = inputs()
  options = {"kv_heads": 2, "qk_norm": True}
  same = made(
    lambda rngs: deep_transformer(DIM, HEADS, lam=0.0, rngs=rngs, **options)
  )
  transformer = made(
    lambda rngs: AttentionMixer(DIM, HEADS, rngs=rngs, **options)
  )
  assert type(same) is AttentionMixer
  assert_close(parameters(same), parameters(transformer), 0.0)
  assert jnp.array_equal(call(same, x).y, call(transformer, x).y)


def test_a_learned_lam_starts_from_the_transformer():
  x = inputs()
  transformer = randomised(
    made(lambda rngs: AttentionMixer(DIM, HEADS, kv_heads=2, rngs=rngs))
  )
  mixer = made(
    lambda rngs: deep_transformer(
      DIM,
      HEADS,
      lam=0.0,
      learn_lam=True,
      gated=False,
      kv_heads=2,
      expansion=2.0,
      rngs=rngs,
    )
  )
  # Its parameters are the transformer's, and those of the deep part.
  nnx.update(mixer, nnx.state(transformer))
  (by_parameter, _), out = slopes(mixer, x)
  assert_close(out.y, call(transformer, x).y, 1e-6)
  assert by_parameter.lam[...] != 0
  more = set(parameters(mixer)) - set(parameters(transformer))
  assert more == {"lam", "start"}


def test_what_does_not_fit_is_refused():
  rngs = nnx.Rngs(0)
  for options, message in (
    ({"normalised": False}, "a temperature of at most 8, not 0"),
    ({"normalised": False, "temperature": 9.0}, "at most 8, not 9"),
    ({"lam": 1.5}, "lam 1.5: use a number from 0 to 1"),
    ({"temperature": 4.0, "qk_norm": True}, "leave qk_norm and softmax_scale"),
    ({"temperature": -1.0}, "temperature -1.0: use a positive number"),
    ({"softmax_scale": -1.0}, "softmax_scale -1.0: use a positive number"),
    ({"kv_heads": 3}, "3 heads of keys do not divide 4"),
    ({"rope_base": -1.0}, "needs a base above 0"),
  ):
    with pytest.raises(UserError, match=message):
      deep_transformer(DIM, HEADS, rngs=rngs, **options)
  bare = dataclasses.replace(DOT, normalised=False)
  for arguments, message in (
    ((16, 3, DOT), "3 heads do not divide the width 16"),
    ((16, 4, ex.ExponentialMemory(attends=True)), "of deep_transformer only"),
  ):
    with pytest.raises(UserError, match=message):
      ExponentialMemoryMixer(*arguments, rngs=rngs)
  with pytest.raises(UserError, match="at most 8, not 16"):
    ExponentialMemoryMixer(16, 4, bare, temperature=16.0, rngs=rngs)
  with pytest.raises(UserError, match="conv_width 0: use 1 or more taps"):
    ExponentialMemoryMixer(16, 4, conv_width=0, rngs=rngs)


def test_presets_are_those_of_the_table():
  assert isinstance(DOT.objective, am.L2)
  assert isinstance(SWDT.objective, am.DotProduct)
  for memory in (DOT, SWDT):
    assert memory.normalised
    assert memory.window > 1
    assert memory.chunk
    assert not memory.linear
