"""Rotary embedding is multiplication by complex numbers of length 1."""

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.layers.rotary import rotate
from tests.layers.helpers import assert_close


def vectors(seed=0):
  random = np.random.default_rng(seed)
  return random.standard_normal((2, 5, 3, 8))


def test_it_turns_pairs_half_a_width_apart():
  x = vectors()
  position = np.array([[0, 1, 2, 3, 4], [0, 0, 7, 1000, 60000]])
  pairs = x[..., :4] + 1j * x[..., 4:]
  angle = position[..., None] * 500.0 ** (-np.arange(4) / 4)
  turned = pairs * np.exp(1j * angle)[:, :, None]
  expected = np.concatenate([turned.real, turned.imag], axis=-1)
  with jax.enable_x64(True):
    y = rotate(jnp.asarray(x), jnp.asarray(position, jnp.int32), 500.0)
    assert y.dtype == jnp.float64
    assert_close(y, expected, 1e-11)
  y = rotate(jnp.asarray(x, jnp.float32), jnp.asarray(position), 500.0)
  # The angle of position 60000 has an error of 2^-9.
  assert_close(y, expected, 5e-3)
  assert_close(y[0], expected[0], 1e-6)


def test_narrow_types_are_turned_in_float32():
  x = jnp.asarray(vectors(), jnp.bfloat16)
  position = jnp.arange(300, 305, dtype=jnp.int32)[None]
  y = rotate(x, position, 1e4)
  assert y.dtype == jnp.bfloat16
  exact = rotate(x.astype(jnp.float32), position, 1e4)
  np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_products_depend_on_the_distance_only():
  query, key = (jnp.asarray(vectors(seed), jnp.float32) for seed in (0, 1))
  position = jnp.arange(5, dtype=jnp.int32)[None]

  def products(shift):
    turned = rotate(query, position + shift, 1e4)
    others = rotate(key, position + shift, 1e4)
    return jnp.einsum("bthk,bshk->bhts", turned, others)

  assert_close(products(100), products(0), 1e-5)
  unturned = jnp.einsum("bthk,bshk->bhts", query, key)
  assert jnp.max(jnp.abs(products(0) - unturned)) > 0.1
