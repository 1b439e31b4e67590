"""Orthogonalisation: what it does to singular values, and to odd inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from atlas_jax import memory as am
from tests.memory.cases import assert_close, same_bits

pytestmark = pytest.mark.usefixtures("x64")

PLAIN = am.Muon(every=1, epsilon=1e-7)


orthogonalise = jax.jit(am.newton_schulz, static_argnums=1)


def normal(*shape, seed=0, dtype=jnp.float64):
  x = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(x, dtype)


def with_singular_values(values, rows=64, columns=256):
  u, _, v = np.linalg.svd(normal(rows, columns), full_matrices=False)
  s = np.zeros(rows)
  s[: len(values)] = values
  return jnp.asarray((u * s) @ v)


def singular_values(x):
  return np.linalg.svd(np.asarray(x), compute_uv=False)


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (256, 64)])
def test_gaussian_matrices_become_almost_orthogonal(rows, columns):
  s = singular_values(orthogonalise(normal(rows, columns), PLAIN))
  assert s.min() > 0.68
  assert s.max() < 1.14


def test_square_matrices_stay_below_the_fixed_range():
  s = singular_values(orthogonalise(normal(8, 64, 64), PLAIN))
  assert s.max() < 1.21


@pytest.mark.parametrize(
  ("relative", "after"), [(1e-2, 0.70), (1e-3, 0.47), (1e-4, 0.05)]
)
def test_small_singular_values_grow_as_known(relative, after):
  x = with_singular_values([1.0, relative])
  s = singular_values(orthogonalise(x, PLAIN))
  np.testing.assert_allclose(s[1], after, atol=0.02)


def test_rank_and_subspaces_are_kept():
  x = normal(64, 3) @ normal(3, 256, seed=1)
  y = orthogonalise(x, PLAIN)
  s = singular_values(y)
  assert s[2] > 0.6
  assert s[3] < 1e-13
  u, _, v = np.linalg.svd(x, full_matrices=False)
  inside = u[:, :3].T @ y @ v[:3].T
  np.testing.assert_allclose(np.linalg.norm(inside), np.linalg.norm(s))
  assert np.all(np.diagonal(inside) > 0.6)


def test_more_steps_come_nearer():
  x = normal(16, 32)
  distance = []
  # These coefficients converge to one; the default ones stay in a range.
  exact = ((1.875, -1.25, 0.375),)
  for steps in (2, 4, 6, 15):
    muon = am.Muon(every=1, steps=steps, epsilon=1e-7, coefficients=exact)
    distance.append(np.abs(singular_values(orthogonalise(x, muon)) - 1).max())
  assert np.all(np.diff(distance) < 0), distance
  assert distance[-1] < 1e-13


def test_each_iteration_takes_its_own_coefficients():
  first, second = (2.0, -1.5, 0.5), (3.0, -3.0, 1.0)
  muon = am.Muon(every=1, steps=3, epsilon=1e-7, coefficients=(first, second))
  x = with_singular_values([0.8, 0.6], 2, 5)
  s = np.array([0.8, 0.6]) / np.hypot(0.8, 0.6)
  for a, b, c in (first, second, second):
    s = a * s + b * s**3 + c * s**5
  got = singular_values(orthogonalise(x, muon))
  np.testing.assert_allclose(got, np.sort(np.abs(s))[::-1], rtol=1e-10)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e4, 1e30])
def test_length_does_not_matter_above_epsilon(scale):
  muon = am.Muon(every=1, epsilon=1e-25)
  x = normal(6, 9, dtype=jnp.float32)
  base = orthogonalise(x, muon)
  got = orthogonalise(x * jnp.float32(scale), muon)
  assert_close(got, base, 1e-5)


def test_zero_takes_a_zero_step_with_finite_gradients():
  zero = jnp.zeros((3, 4), jnp.float32)
  muon = am.Muon(every=1)
  total = lambda x: jnp.sum(orthogonalise(x, muon) * 3)
  assert np.all(orthogonalise(zero, muon) == 0)
  assert np.all(np.isfinite(jax.grad(total)(zero)))
  # Below epsilon a momentum is no longer stretched to full length.
  small = zero.at[0, 0].set(1e-5)
  assert np.max(np.abs(orthogonalise(small, muon))) < 30


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e18, 1e30])
def test_gradients_stay_finite(size):
  muon = am.Muon(every=1)
  x = normal(5, 4, dtype=jnp.float32) * jnp.float32(size)
  for x_ in (x, jnp.ones_like(x) * size, x.at[1:].set(0.0)):
    gradient = jax.grad(lambda x: jnp.sum(orthogonalise(x, muon)))(x_)
    assert np.all(np.isfinite(gradient))


def test_a_transposed_matrix_gives_the_transposed_result():
  x = normal(5, 8)
  muon = am.Muon(every=1)
  assert_close(orthogonalise(x.T, muon), orthogonalise(x, muon).T, 1e-13)


def test_batches_are_single_matrices_and_repeat_to_the_bit():
  x = normal(2, 3, 5, 8)
  muon = am.Muon(every=1)
  batch = orthogonalise(x, muon)
  for i in range(2):
    for j in range(3):
      assert_close(batch[i, j], orthogonalise(x[i, j], muon), 1e-13)
  assert same_bits(batch, orthogonalise(x, muon))


@pytest.mark.parametrize("steps", [1, 5])
def test_bfloat16_operands_are_close_and_accumulate_in_float32(steps):
  """Stated tolerance: 3 % of the norm after one and after five steps."""
  x = normal(16, 64, dtype=jnp.float32)
  exact = orthogonalise(x, am.Muon(every=1, steps=steps))
  got = orthogonalise(x, am.Muon(every=1, steps=steps, dtype="bfloat16"))
  assert got.dtype == jnp.float32
  error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
  assert 1e-5 < error < 0.03


def test_optax_agrees():
  """One step of optax's Muon from zero momentum is the step of its gradient."""
  x = normal(6, 9, dtype=jnp.float32)
  muon = optax.contrib.scale_by_muon(
    ns_steps=5,
    beta=0.0,
    eps=1e-8,
    nesterov=False,
    weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers()},
  )
  params = {"w": jnp.zeros_like(x)}
  # Optax promotes types on the way.
  with jax.numpy_dtype_promotion("standard"):
    update, _ = muon.update({"w": x}, muon.init(params), params)
  ours = orthogonalise(x, am.Muon(every=1, epsilon=1e-8))
  assert_close(ours, update["w"], 1e-5)
