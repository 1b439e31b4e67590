"""Retentions that are not linear in the weights, by themselves."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am

pytestmark = pytest.mark.usefixtures("x64")

SHAPE = (6, 4)
NONLINEAR = (am.LqRetention(), am.LqRetention(power=2.5), am.KLRetention(2.0))


def normal(seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE))


@pytest.mark.parametrize("power", [2.0, 3.0, 4.0, 5.0])
def test_lq_divides_by_a_power_of_its_norm(power):
  """arXiv 2504.13173, Eq. 24."""
  retention = am.LqRetention(power, floor=1e-6)
  a = normal()
  norm = np.sum(np.abs(a) ** power) ** (1 / power)
  want = np.asarray(a) / norm ** (power - 2)
  np.testing.assert_allclose(retention.working(a), want, rtol=1e-12)
  np.testing.assert_allclose(
    retention.write_scale(a), norm ** (2 - power), rtol=1e-12
  )


def test_lq_with_power_two_is_plain_decay():
  a = normal()
  np.testing.assert_array_equal(am.LqRetention(2.0).working(a), a)


def test_lq_grows_no_further_than_its_floor_lets_it():
  retention = am.LqRetention(4.0, floor=0.1)
  for size in (0.0, 1e-30, 1e-3, 1.0, 1e3, 1e20):
    w = retention.working(size * normal())
    assert np.sum(np.abs(w) ** 4) ** 0.25 <= 1 / (2 * 0.1) + 1e-9


def test_kl_keeps_a_probability_simplex():
  """Positive weights whose sum is c, whatever is added to the logarithms."""
  retention = am.KLRetention(2.0)
  total = 2.0 * 24 / math.sqrt(6)
  assert retention.total(SHAPE) == pytest.approx(total)
  z = 3 * normal()
  w = retention.working(z)
  assert np.all(w > 0)
  np.testing.assert_allclose(jnp.sum(w), total, rtol=1e-12)
  np.testing.assert_allclose(retention.working(z + 7.0), w, rtol=1e-12)
  np.testing.assert_allclose(
    jnp.log(w) - jnp.mean(jnp.log(w)), z - jnp.mean(z), atol=1e-12
  )
  np.testing.assert_allclose(
    retention.working(retention.border(z, None)), w, rtol=1e-12
  )


def test_weight_norm_gives_rows_their_length():
  lengths = jnp.arange(1.0, 7.0)
  w = am.WeightNorm().border(normal(), lengths)
  np.testing.assert_allclose(
    np.linalg.norm(w, axis=1), np.arange(1.0, 7.0), rtol=1e-6
  )
  angle = np.sum(w * normal(), 1) / np.linalg.norm(normal(), axis=1)
  np.testing.assert_allclose(angle, lengths, rtol=1e-6)
  zero = am.WeightNorm().border(jnp.zeros(SHAPE), lengths)
  np.testing.assert_array_equal(zero, np.zeros(SHAPE))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e6, 1e20])
@pytest.mark.parametrize("retention", [*NONLINEAR, am.WeightNorm()])
def test_values_and_slopes_are_finite(retention, size):
  stored = jnp.asarray(size * normal(), jnp.float32)
  lengths = jnp.ones((6,), jnp.float32)

  def total(stored):
    w = retention.working(retention.border(stored, lengths))
    return jnp.sum(jnp.cos(w)) + jnp.cos(retention.write_scale(stored))

  value, slope = jax.value_and_grad(total)(stored)
  assert np.isfinite(value)
  assert np.all(np.isfinite(slope))
