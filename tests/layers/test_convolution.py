"""The short convolution against a loop, in one go and in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.layers import Convolution


def by_loop(x, kernel, documents):
  """y[b, t] from the definition, in float64."""
  x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
  y = np.zeros_like(x)
  for b, t in np.ndindex(x.shape[:2]):
    for j in range(kernel.shape[0]):
      if t >= j and documents[b, t] == documents[b, t - j]:
        y[b, t] += kernel[j] * x[b, t - j]
  return y


def history_of(documents):
  """How many tokens of its document stand before each token."""
  history = np.zeros(documents.shape, np.int32)
  for b, t in np.ndindex(documents.shape):
    if t and documents[b, t] == documents[b, t - 1]:
      history[b, t] = history[b, t - 1] + 1
  return jnp.asarray(history)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_equals_the_definition(taps):
  conv = Convolution(taps, 3, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (2, 9, 3))
  y, tail = conv(x)
  expected = by_loop(x, conv.kernel[...], np.zeros((2, 9)))
  np.testing.assert_allclose(y, expected, atol=1e-6)
  np.testing.assert_array_equal(tail, x[:, 9 - (taps - 1) :])


def test_documents_do_not_see_each_other():
  conv = Convolution(4, 3, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (2, 9, 3))
  documents = np.array([[1, 1, 1, 1, 1, 2, 2, 3, 3], [1] * 8 + [2]])
  y, tail = conv(x, history=history_of(documents))
  expected = by_loop(x, conv.kernel[...], documents)
  np.testing.assert_allclose(y, expected, atol=1e-6)
  # The tail holds the last document only.
  np.testing.assert_array_equal(tail[0, 0], np.zeros(3))
  np.testing.assert_array_equal(tail[0, 1:], x[0, 7:])
  np.testing.assert_array_equal(tail[1, :2], np.zeros((2, 3)))
  np.testing.assert_array_equal(tail[1, 2], x[1, 8])


def test_any_split_gives_the_same_bits():
  conv = Convolution(4, 3, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (2, 9, 3))
  whole, last = conv(x)
  for cut in range(1, 9):
    first, tail = conv(x[:, :cut])
    second, tail = conv(x[:, cut:], tail)
    np.testing.assert_array_equal(
      jnp.concatenate([first, second], axis=1), whole
    )
    np.testing.assert_array_equal(tail, last)


def test_rows_of_unequal_length_keep_their_own_tails():
  conv = Convolution(4, 3, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (3, 6, 3))
  before = jax.random.normal(jax.random.key(2), (3, 3, 3))
  lengths = jnp.array([0, 2, 6], jnp.int32)
  history = jnp.full((3, 6), 100, jnp.int32)
  _, tail = conv(x, before, history=history, lengths=lengths)
  for row, length in enumerate([0, 2, 6]):
    joined = jnp.concatenate([before[row], x[row, :length]])
    np.testing.assert_array_equal(tail[row], joined[-3:])


def test_sums_of_bfloat16_are_float32():
  conv = Convolution(4, 3, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (2, 9, 3)).astype(jnp.bfloat16)
  y, tail = conv(x)
  assert y.dtype == tail.dtype == jnp.bfloat16
  exact = conv(x.astype(jnp.float32))[0]
  assert jnp.array_equal(y, exact.astype(jnp.bfloat16))
