"""Linear, RMSNorm and SwiGLU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.layers import Linear, RMSNorm, SwiGLU
from tests.layers.helpers import finite


def test_linear_keeps_the_size_of_its_input():
  linear = Linear(256, 64, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (64, 256))
  assert jnp.std(linear(x)) == pytest.approx(1.0, rel=0.1)
  small = Linear(256, 64, scale=0.1, rngs=nnx.Rngs(0))
  np.testing.assert_allclose(small(x), 0.1 * linear(x), rtol=1e-4, atol=1e-6)


def test_linear_computes_in_its_own_type():
  linear = Linear(
    8, 4, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
  )
  assert linear.kernel.dtype == jnp.float32
  assert linear(jnp.ones((2, 8))).dtype == jnp.bfloat16


def test_norm_gives_every_head_a_mean_square_of_one():
  norm = RMSNorm((2, 8), epsilon=1e-9)
  x = jax.random.normal(jax.random.key(1), (3, 5, 2, 8)) * 7
  y = norm(x)
  np.testing.assert_allclose(jnp.mean(y**2, axis=-1), 1.0, rtol=1e-5)
  norm.scale = nnx.Param(jnp.arange(16.0).reshape(2, 8))
  np.testing.assert_allclose(
    norm(x), y * jnp.arange(16.0).reshape(1, 1, 2, 8), rtol=1e-6
  )


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4, 1e15])
def test_norm_is_finite_with_finite_slopes(size):
  norm = RMSNorm(8)
  x = size * jax.random.normal(jax.random.key(1), (3, 8))
  assert finite(norm(x))
  assert finite(jax.grad(lambda x: jnp.sum(norm(x) ** 2))(x))
  if not size:
    np.testing.assert_array_equal(norm(x), 0.0)


def test_norm_of_bfloat16_is_computed_in_float32():
  norm = RMSNorm(64)
  x = jax.random.normal(jax.random.key(1), (3, 64)).astype(jnp.bfloat16)
  y = norm(x)
  assert y.dtype == jnp.bfloat16
  wide = norm(x.astype(jnp.float32))
  assert jnp.array_equal(y, wide.astype(jnp.bfloat16))


def test_swiglu_equals_its_formula():
  mlp = SwiGLU(6, 10, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (4, 6))
  gate, up, down = (
    np.asarray(layer.kernel[...]) for layer in (mlp.gate, mlp.up, mlp.down)
  )
  z = np.asarray(x) @ gate
  expected = (z / (1 + np.exp(-z)) * (np.asarray(x) @ up)) @ down
  np.testing.assert_allclose(mlp(x), expected, rtol=1e-4, atol=1e-6)
  np.testing.assert_array_equal(mlp(jnp.zeros((1, 6))), 0.0)
