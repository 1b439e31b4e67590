"""Inner objectives against values and slopes by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am

pytestmark = pytest.mark.usefixtures("x64")

Y = np.array([0.3, -2.0, 1.5])
V = np.array([0.1, 1.0, 1.5])
E = Y - V


def clipped(e, delta):
  return np.where(np.abs(e) <= delta, 2 * e, 2 * delta * np.sign(e))


@pytest.mark.parametrize(
  ("objective", "value", "slope"),
  [
    (am.L2(), np.sum(E**2), 2 * E),
    (am.DotProduct(), -np.sum(Y * V), -V),
    (am.Huber(1.0), 0.2**2 + 2 * 3.0 - 1, clipped(E, 1.0)),
    (am.Huber(5.0), np.sum(E**2), 2 * E),
  ],
)
def test_value_and_slope(objective, value, slope):
  got, gradient = jax.value_and_grad(objective)(jnp.array(Y), jnp.array(V))
  np.testing.assert_allclose(got, value, rtol=1e-14)
  np.testing.assert_allclose(gradient, slope, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("delta", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_huber_is_smooth_at_its_corner(delta, side):
  huber = am.Huber(delta)
  run = jax.vmap(jax.value_and_grad(lambda e: huber(e[None], jnp.zeros(1))))
  tiny = 1e-9
  at = side * jnp.array([delta - tiny, delta, delta + tiny])
  value, slope = run(at)
  np.testing.assert_allclose(value, delta**2, rtol=1e-8 / delta)
  np.testing.assert_allclose(slope, side * 2 * delta, rtol=1e-8 / delta)


def test_huber_does_not_square_a_large_error():
  value, slope = jax.value_and_grad(am.Huber(1.0))(
    jnp.full((2,), 1e30, jnp.float32), jnp.zeros((2,), jnp.float32)
  )
  np.testing.assert_allclose(value, 4e30, rtol=1e-6)
  np.testing.assert_array_equal(slope, [2, 2])


@pytest.mark.parametrize("objective", [am.L2(), am.DotProduct(), am.Huber(0.5)])
def test_curvature_bounds_the_second_derivative(objective):
  y = 3 * jax.random.normal(jax.random.key(0), (50, 3), jnp.float64)
  hessian = jax.vmap(jax.hessian(objective))(y, jnp.zeros_like(y))
  largest = np.max(np.linalg.eigvalsh(hessian))
  np.testing.assert_allclose(largest, objective.curvature, atol=1e-12)


@pytest.mark.parametrize("objective", [am.L2(), am.DotProduct(), am.Huber(0.5)])
def test_tokens_are_separate(objective):
  y = jax.random.normal(jax.random.key(0), (2, 4, 3))
  v = jax.random.normal(jax.random.key(1), (2, 4, 3))
  whole = objective(y, v)
  assert whole.shape == (2, 4)
  np.testing.assert_allclose(whole[1, 2], objective(y[1, 2], v[1, 2]))
