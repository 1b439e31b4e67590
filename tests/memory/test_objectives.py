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
    (am.L2(factor=0.5), np.sum(E**2) / 2, E),
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


@pytest.mark.parametrize(
  "objective",
  [am.L2(), am.L2(0.5), am.DotProduct(), am.Huber(0.5), am.Lp(), am.Lp(2.0)],
)
def test_curvature_bounds_the_second_derivative(objective):
  y = 3 * jax.random.normal(jax.random.key(0), (50, 3), jnp.float64)
  zero = jnp.zeros_like(y)
  hessian = jax.vmap(jax.hessian(objective))(y, zero)
  largest = np.max(np.linalg.eigvalsh(hessian), axis=-1)
  bound = objective.curvature(y, zero)
  assert bound.shape == (50,)
  assert np.all(largest <= bound + 1e-12)
  # It is reached, and so no larger than it need be.
  np.testing.assert_allclose(np.max(largest), np.max(bound), rtol=1e-6)
  assert objective.curved == (np.max(bound) > 0)


EVERY = (am.L2(), am.DotProduct(), am.Huber(0.5), am.Lp(), am.SwitchedHuber())


@pytest.mark.parametrize("objective", EVERY)
def test_tokens_are_separate(objective):
  y = jax.random.normal(jax.random.key(0), (2, 4, 3))
  v = jax.random.normal(jax.random.key(1), (2, 4, 3))
  limit = jnp.full((2, 4), 1.5)
  whole = objective(y, v, limit)
  assert whole.shape == (2, 4)
  one = objective(y[1, 2], v[1, 2], limit[1, 2])
  np.testing.assert_allclose(whole[1, 2], one)
  assert objective.curvature(y, v, limit).shape == (2, 4)


def test_the_switched_objective_bends_most_in_its_best_channel():
  """Beyond the threshold the corner of the l_1 norm bounds the curvature."""
  objective, zero = am.SwitchedHuber(), jnp.zeros(3)
  for y, threshold in ((jnp.array(E), 2.0), (jnp.array(E), 4.0)):
    limit = jnp.array(threshold)
    hessian = jax.hessian(objective)(y, zero, limit)
    largest = np.max(np.linalg.eigvalsh(hessian))
    bound = objective.curvature(y, zero, limit)
    np.testing.assert_allclose(bound, max(1.0, largest), rtol=1e-9)
    assert (bound > 1) == (threshold == 2.0)


@pytest.mark.parametrize("objective", EVERY)
def test_no_error_is_too_large(objective):
  """Slopes and their slopes at sizes that no square may have."""
  y = jnp.array([0.0, 1.0, -1e4, 1e12, -1e30], jnp.float32)
  token = (jnp.zeros_like(y), jnp.float32(2.0))
  slope = jax.grad(objective)
  assert np.all(np.isfinite(slope(y, *token)))
  bent = jax.grad(lambda y: jnp.sum(jnp.cos(slope(y, *token))))(y)
  assert np.all(np.isfinite(bent))


def test_lp_is_the_power_of_the_error():
  """arXiv 2504.13173, Eq. 11, at errors that are not tiny."""
  for power in (2.0, 3.0, 4.0):
    got, slope = jax.value_and_grad(am.Lp(power))(jnp.array(Y), jnp.array(V))
    np.testing.assert_allclose(got, np.sum(np.abs(E) ** power), rtol=1e-4)
    want = power * np.sign(E) * np.abs(E) ** (power - 1)
    np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-9)


def test_lp_grows_linearly_beyond_its_largest_error():
  lp = am.Lp(3.0)
  run = jax.vmap(jax.value_and_grad(lambda e: lp(e[None], jnp.zeros(1))))
  at = lp.largest * jnp.array([0.5, 1 - 1e-9, 1 + 1e-9, 4.0])
  value, slope = run(at)
  np.testing.assert_allclose(slope, [0.25e12, 1e12, 1e12, 1e12], rtol=1e-6)
  np.testing.assert_allclose(value[1], value[2], rtol=1e-6)
  np.testing.assert_allclose(value[3] - value[2], 3e12 * lp.largest, rtol=1e-6)


@pytest.mark.parametrize(("threshold", "small"), [(3.1, True), (2.9, False)])
def test_the_switched_objective_looks_at_the_whole_error(threshold, small):
  """arXiv 2504.13173, Eq. 26; the error's length is 3.007."""
  arguments = jnp.array(Y), jnp.array(V), jnp.array(threshold)
  run = jax.value_and_grad(am.SwitchedHuber(), argnums=(0, 2))
  value, (slope, by_threshold) = run(*arguments)
  norm = np.sum(np.log(np.cosh(3 * E)) / 3)
  if small:
    np.testing.assert_allclose(value, np.sum(E**2) / 2, rtol=1e-12)
    np.testing.assert_allclose(slope, E, rtol=1e-12)
    assert by_threshold == 0
  else:
    np.testing.assert_allclose(value, threshold * norm, rtol=1e-12)
    want = threshold * np.tanh(3 * E)
    np.testing.assert_allclose(slope, want, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(by_threshold, norm, rtol=1e-12)
