"""The contract, over every mixer of the registry (the full grid: --full).

The fast form is the token-by-token definition, in values and gradients; any
split and any number of steps is one call; padding and packed documents are
invisible; nothing looks ahead; everything stays finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.errors import UserError
from atlas_jax.models.registry import REGISTRY
from tests.layers.helpers import assert_close, finite, jit
from tests.models.mixers import (
  DIM,
  call,
  inputs,
  mixer_of,
  packed,
  prepare,
  sized,
  slopes,
  step,
)

LENGTH, BATCH = 77, 2

# One more than the chunk of small memories.
PIECE = 9
every_mixer = pytest.mark.parametrize("name", REGISTRY)

# Newton-Schulz iterations carry rounding further.
_LOOSE = {"atlas": 1e-4, "atlas_pp": 1e-4, "lact": 1e-4}

# A convolution by Fourier transform sees later tokens, at rounding.
_ROUNDED = {"hyena"}


# What is cut into buckets falls into others when rounded.
_SMOOTH = {"reformer": {"attention.buckets": 1}}


def limit(name: str) -> float:
  return _LOOSE.get(name, 1e-5)


def pieces(mixer, x):
  """Outputs of the whole pieces of a sequence, read one by one, and a state.

  A state that grows has room for all from the start, so that all calls are of
  one shape.
  """
  parts, state = [], mixer.init_state(BATCH)
  for first in range(0, x.shape[1] - PIECE + 1, PIECE):
    state = sized(mixer, state, LENGTH)
    out = call(mixer, x[:, first : first + PIECE], state)
    parts.append(out.y)
    state = sized(mixer, out.state, LENGTH)
  return parts, state


def some_state(mixer):
  """After a few tokens, with room for as many more."""
  return sized(mixer, pieces(mixer, inputs(PIECE)[:, ::-1])[1], 16)


def parameters(mixer):
  return nnx.to_pure_dict(nnx.state(mixer))


@every_mixer
def test_the_fast_form_is_the_definition(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  slow = mixer_of(name, implementation="reference")
  before = some_state(mixer)
  (by_parameter, by_input, by_state), out = slopes(mixer, x, before)
  expected, definition = slopes(slow, x, before)
  assert_close(out.y, definition.y, limit(name))
  room = LENGTH + 16
  assert_close(
    sized(mixer, out.state, room),
    sized(slow, definition.state, room),
    limit(name),
  )
  # Gradients sum over all tokens, and so do their rounding errors.
  assert_close(by_input, expected[1], 10 * limit(name))
  assert_close(by_state, expected[2], 10 * limit(name))
  assert_close(
    parameters(by_parameter), parameters(expected[0]), 10 * limit(name)
  )
  assert not jnp.array_equal(out.y, definition.y), "one computes both"


@every_mixer
def test_any_split_and_any_number_of_steps_is_one_call(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  whole = call(mixer, x)
  # Borders at all places of a chunk, which has one token less than a piece.
  parts, state = pieces(mixer, x)
  state = prepare(mixer, sized(mixer, state, LENGTH))
  every = jnp.ones((BATCH,), bool)
  for t in range(LENGTH - LENGTH % PIECE, LENGTH):
    y, state = step(mixer, x[:, t], state, every)
    parts.append(y[:, None])
  assert_close(jnp.concatenate(parts, axis=1), whole.y, limit(name))
  assert_close(
    sized(mixer, state, LENGTH),
    sized(mixer, whole.state, LENGTH),
    limit(name),
  )


@pytest.mark.full
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 64, 333])
@every_mixer
def test_any_length_is_the_definition(name, length):
  mixer, x = mixer_of(name), inputs(length)
  slow = mixer_of(name, implementation="reference")
  (by_parameter, by_input, _), out = slopes(mixer, x)
  expected, definition = slopes(slow, x)
  # Rounding grows with the length.
  wide = limit(name) * max(1.0, length / LENGTH)
  assert_close(out.y, definition.y, wide)
  assert_close(by_input, expected[1], 10 * wide)
  assert_close(parameters(by_parameter), parameters(expected[0]), 10 * wide)
  if length >= 64:
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(by_parameter))


@every_mixer
def test_rows_without_a_token_stay_as_they_are(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  state = prepare(mixer, sized(mixer, call(mixer, x).state, LENGTH + 1))
  y, after = step(mixer, x[:, 0], state, jnp.array([False, True]))
  assert jnp.all(y[0] == 0)
  for old, new in zip(
    jax.tree.leaves(state), jax.tree.leaves(after), strict=True
  ):
    assert jnp.array_equal(old[0], new[0])
  both = step(mixer, x[:, 0], state, jnp.array([True, True]))
  assert_close(y[1], both[0][1], 1e-6)


@every_mixer
def test_padding_and_documents_are_invisible(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  chunk = mixer.chunk
  lengths = (chunk + 1, 23, 9)
  mask = np.zeros((3, LENGTH), bool)
  for row, length in enumerate(lengths):
    # At the front, at the end, and scattered.
    places = (np.arange(length), LENGTH - length + np.arange(length))
    scattered = np.sort(np.random.default_rng(3).permutation(LENGTH)[:length])
    mask[row, (*places, scattered)[row]] = True
  texts = [x[row % 2, :length] for row, length in enumerate(lengths)]
  padded = np.full((3, LENGTH, DIM), np.nan, np.float32)
  for row, text in enumerate(texts):
    padded[row, mask[row]] = text
  out = call(mixer, jnp.asarray(padded), mask=jnp.asarray(mask))
  assert jnp.all(out.y[~mask] == 0)
  whole = call(mixer, x)
  for row, length in enumerate(lengths):
    expected = whole.y[row % 2, :length]
    assert_close(out.y[row][mask[row]], expected, limit(name))

  # The same texts as documents of one row: anywhere, and where chunks start.
  anywhere = np.repeat([1, 2, 3, 0], [*lengths, LENGTH - sum(lengths)])
  holes = [-length % chunk for length in lengths]
  borders = np.repeat(
    [1, 0, 2, 0, 3, 0], np.ravel(np.stack([lengths, holes], axis=1))
  )
  for ids, aligned in ((anywhere, False), (borders, True)):
    row = np.full((1, len(ids), DIM), np.nan, np.float32)
    for i, text in enumerate(texts):
      row[0, ids == i + 1] = text
    found = packed(
      mixer,
      jnp.asarray(row),
      jnp.asarray(ids)[None],
      max_segments=3,
      aligned=aligned,
    )
    assert jnp.all(found.y[0, ids == 0] == 0)
    for i, length in enumerate(lengths):
      expected = whole.y[i % 2, :length]
      assert_close(found.y[0, ids == i + 1], expected, limit(name))
    if aligned:
      assert found.state is None
    else:
      # The state is that of the last document.
      last = jax.tree.map(lambda leaf: leaf[2], sized(mixer, out.state, LENGTH))
      here = sized(mixer, found.state, LENGTH)
      assert_close(jax.tree.map(lambda leaf: leaf[0], here), last, limit(name))


@every_mixer
def test_nothing_looks_ahead_and_rows_are_independent(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  y = call(mixer, x).y
  assert jnp.array_equal(call(mixer, x).y, y)
  for t in (1, 40):
    other = call(mixer, x.at[1, t].add(1.0)).y
    assert jnp.array_equal(other[0], y[0])
    if name in _ROUNDED:
      assert_close(other[1, :t], y[1, :t], 1e-5)
    else:
      assert jnp.array_equal(other[1, :t], y[1, :t])
    assert jnp.any(other[1, t] != y[1, t])


@every_mixer
def test_every_parameter_and_input_gets_a_finite_gradient(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  before = some_state(mixer)
  (by_parameter, by_input, _), out = slopes(mixer, x, before)
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    parameters(by_parameter)
  ):
    assert jnp.all(jnp.isfinite(leaf)), path
    # A memory's start enters fresh states only: see the test of any length.
    if not any(getattr(key, "key", None) == "start" for key in path):
      assert jnp.any(leaf != 0), path
  assert jnp.all(jnp.any(by_input != 0, axis=-1))
  assert all(metric.dtype == jnp.float32 for metric in out.metrics.values())
  huge = 1e4 * x
  for hostile in (
    huge,
    jnp.zeros_like(x),
    jnp.broadcast_to(huge[:, :1], x.shape),
  ):
    grads, out = slopes(mixer, hostile, before)
    assert finite(out)
    assert finite(grads)


@every_mixer
def test_bfloat16_stays_near_float32(name):
  # Stated tolerance: 5 % of the root mean square, on average over outputs.
  changes = _SMOOTH.get(name, {})
  mixer, x = mixer_of(name, **changes), inputs(LENGTH)
  exact = call(mixer, x).y
  other = mixer_of(name, dtype="bfloat16", **changes)
  out = call(other, x.astype(jnp.bfloat16))
  assert out.y.dtype == jnp.bfloat16
  error = jnp.sqrt(jnp.mean((out.y.astype(jnp.float32) - exact) ** 2))
  assert 0 < error < 0.05 * jnp.sqrt(jnp.mean(exact**2))
  kinds = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
  fresh = sized(other, other.init_state(BATCH), LENGTH)
  assert kinds(sized(other, out.state, LENGTH)) == kinds(fresh)


@every_mixer
def test_reset_makes_rows_fresh_and_leaves_the_others(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  fresh = sized(mixer, mixer.init_state(BATCH), LENGTH)
  state = sized(mixer, call(mixer, x).state, LENGTH)
  reset = jit(lambda mixer, state, rows: mixer.reset(state, rows))
  again = reset(mixer, state, jnp.array([True, False]))
  for new, old, begun in zip(
    jax.tree.leaves(again),
    jax.tree.leaves(state),
    jax.tree.leaves(fresh),
    strict=True,
  ):
    assert jnp.array_equal(new[0], begun[0])
    assert jnp.array_equal(new[1], old[1])


@every_mixer
def test_what_would_give_other_numbers_is_refused(name):
  mixer = mixer_of(name)
  with pytest.raises(UserError, match="x is int32: give floating"):
    mixer(inputs(4).astype(jnp.int32))
  with pytest.raises(UserError, match=r"x is .* must be \[B, T, 16\]"):
    mixer(inputs(4)[..., :8])
  with pytest.raises(UserError, match="does not belong to this layer"):
    mixer(inputs(4), state=mixer.init_state(BATCH + 1))
  x, state = inputs(4)[:, 0], sized(mixer, mixer.init_state(BATCH), 4)
  with pytest.raises(UserError, match="x is int32: give floating"):
    mixer.step(x.astype(jnp.int32), state)
  with pytest.raises(UserError, match="does not belong to this layer"):
    mixer.step(x[:1], state)
  with pytest.raises(UserError, match=r"valid is bool\[1\] but must be bool"):
    mixer.step(x, state, valid=jnp.ones((1,), bool))
  foreign = mixer_of("gru" if name == "lstm" else "lstm").init_state(BATCH)
  with pytest.raises(UserError, match="does not belong to this layer"):
    mixer(inputs(4), state=foreign)
  for x in (inputs(4)[:, :0], inputs(4)[:0]):
    with pytest.raises(UserError, match="give one row and one token or more"):
      mixer(x, state=mixer.init_state(x.shape[0]))
