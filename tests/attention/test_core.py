"""What the kept kernel does, and its queries in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import attention as aa
from atlas_jax.attention.core import in_pieces
from tests.layers.helpers import assert_close, finite, jit

BATCH, QUERIES, KEYS, HEADS, SHARED, WIDTH = 2, 5, 6, 4, 2, 3


def arrays(dtype=np.float64):
  random = np.random.default_rng(0)
  query = random.standard_normal((BATCH, QUERIES, HEADS, WIDTH))
  key, value = random.standard_normal((2, BATCH, KEYS, SHARED, WIDTH))
  return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def masks():
  random = np.random.default_rng(1)
  mask = random.random((BATCH, HEADS, QUERIES, KEYS)) < 0.5
  mask[..., 0] = True
  return {"of each head": mask, "of all heads": mask[:, :1], "none": None}


def by_numpy(query, key, value, mask, scale):
  key, value = (np.repeat(x, HEADS // SHARED, axis=2) for x in (key, value))
  weight = np.exp(scale * np.einsum("bthk,bshk->bhts", query, key))
  if mask is not None:
    weight = weight * mask
  weight /= weight.sum(axis=-1, keepdims=True)
  return np.einsum("bhts,bshk->bthk", weight, value)


@pytest.mark.parametrize("which", masks())
def test_it_is_softmax_attention_in_both_types(which):
  mask = masks()[which]
  expected = by_numpy(*arrays(), mask, WIDTH**-0.5)
  given = None if mask is None else jnp.asarray(mask)
  y = aa.attend(*map(jnp.asarray, arrays(np.float32)), given)
  assert y.dtype == jnp.float32
  assert_close(y, expected, 1e-6)
  with jax.enable_x64(True):
    y = aa.attend(*map(jnp.asarray, arrays()), given, scale=0.7)
    assert y.dtype == jnp.float64
    assert_close(y, by_numpy(*arrays(), mask, 0.7), 1e-14)


def test_narrow_types_lose_only_their_inputs_and_outputs_rounding():
  narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays()]
  y = aa.attend(*narrow)
  assert y.dtype == jnp.bfloat16
  exact = aa.attend(*(x.astype(jnp.float32) for x in narrow))
  np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_a_query_that_sees_nothing_is_finite_and_so_are_gradients():
  given = [jnp.asarray(x, jnp.float32) for x in arrays()]
  mask = jnp.zeros((1, 1, QUERIES, KEYS), bool).at[..., 1:, :2].set(True)

  def total(arrays):
    return jnp.sum(jnp.sin(aa.attend(*arrays, mask)))

  for x in (given, [1e5 * x for x in given]):
    slopes = jit(jax.grad(total))(x)
    assert finite((aa.attend(*x, mask), slopes))
  key_slopes, value_slopes = jit(jax.grad(total))(given)[1:]
  # Other queries' gradients are those of what they see.
  assert jnp.all(key_slopes[:, 2:] == 0)
  assert jnp.any(value_slopes[:, :2] != 0)


def test_pieces_are_the_whole_and_hold_any_tree():
  length, piece = 11, 4
  x = jnp.arange(2.0 * length * 3).reshape(2, length, 1, 3)
  index = jnp.arange(length, dtype=jnp.int32)[None]
  sizes = []

  def function(queries):
    x, index, nothing = queries
    assert nothing is None
    sizes.append(x.shape[1])
    return x * (1.0 + index[..., None, None].astype(x.dtype))

  expected = function((x, index, None))
  sizes.clear()
  np.testing.assert_array_equal(
    in_pieces(function, (x, index, None), piece), expected
  )
  assert set(sizes) == {piece}
