"""Feature maps and the kernels that stand for them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.memory.features import LARGEST_MAP, narrow

pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(0)


def vectors(count, width, seed=1):
  x = np.random.default_rng(seed).normal(size=(count, width))
  return x / np.linalg.norm(x, axis=1, keepdims=True)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(features, params, x, y):
  """Both maps and the kernel."""
  shared = features.prepare(params, x.shape[-1])
  return (
    features.map(x, shared),
    features.map(y, shared),
    features.kernel(x, y, shared),
  )


def start(features, width, key=KEY):
  return features.init(key, width, jnp.float64)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 4])
def test_polynomial_kernel_is_its_map(degree, width):
  """map(x) . map(y) = sum_i r_i^2 (x . y)^i for any coefficients."""
  features = am.Polynomial(degree)
  r = np.random.default_rng(2).normal(size=degree + 1)
  x, y = vectors(4, width), 2 * vectors(6, width, seed=3)
  map_x, map_y, kernel = evaluate(features, {"coefficient": r}, x, y)
  by_hand = sum(r[i] ** 2 * (x @ y.T) ** i for i in range(degree + 1))
  np.testing.assert_allclose(map_x @ map_y.T, by_hand, atol=1e-12)
  np.testing.assert_allclose(kernel, by_hand, atol=1e-12)


@pytest.mark.parametrize(("degree", "width"), [(1, 5), (2, 5), (3, 3), (4, 2)])
def test_polynomial_map_holds_each_monomial_once(degree, width):
  """As many independent features as there are monomials."""
  features = am.Polynomial(degree)
  size = math.comb(width + degree, degree)
  assert features.size(width) == size
  x = np.random.default_rng(0).normal(size=(size, width))
  mapped, _, _ = evaluate(features, start(features, width), x, x)
  assert mapped.shape == (size, size)
  assert np.linalg.matrix_rank(mapped) == size


def test_key_width_of_sixteen_has_153_features():
  assert am.Polynomial(2, key_width=16).size(16) == 153


def test_coefficients_start_as_the_exponential_series():
  features = am.Polynomial(4)
  shared = features.prepare(start(features, 3), 3)
  want = [1 / math.factorial(i) for i in range(5)]
  np.testing.assert_allclose(shared["powers"], want, rtol=1e-15)


def test_error_to_the_exponential_kernel_falls_with_the_degree():
  x, y = vectors(20, 4), vectors(20, 4, seed=3)
  exact = np.exp(x @ y.T)
  errors = []
  for degree in (1, 2, 3, 4, 6):
    features = am.Polynomial(degree)
    kernel = evaluate(features, start(features, 4), x, y)[2]
    errors.append(np.max(np.abs(kernel - exact)))
  assert np.all(np.diff(errors) < 0)
  assert errors[-1] < 1.2 / math.factorial(7)


def test_degree_one_with_weight_on_the_linear_part_is_the_identity():
  x = vectors(5, 3)
  params = {"coefficient": np.array([0.0, 1.0])}
  mapped = evaluate(am.Polynomial(1), params, x, x)[0]
  np.testing.assert_array_equal(mapped, np.pad(x, ((0, 0), (1, 0))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def sketched_kernels(features, draws, x, y):
  """The kernel of many independent sketches."""

  def kernel(key):
    params = features.init(key, x.shape[-1], jnp.float64)
    return evaluate(features, params, x, y)[2]

  return jax.vmap(kernel)(jax.random.split(KEY, draws))


@pytest.mark.parametrize("degree", [2, 3])
def test_sketch_is_unbiased(degree):
  """The mean kernel over sketches comes to the exact one."""
  exact = am.Polynomial(degree)
  x, y = vectors(3, 4), vectors(3, 4, seed=3)
  want = evaluate(exact, start(exact, 4), x, y)[2]
  draws = sketched_kernels(am.Polynomial(degree, sketch=8), 4000, x, y)
  mean, spread = np.mean(draws, 0), np.std(draws, 0) / math.sqrt(len(draws))
  assert np.all(np.abs(mean - want) < 4.5 * spread)
  # Sharp enough to tell a kernel without the sketched powers.
  assert np.max(np.abs(1 + x @ y.T - want) / spread) > 20


def test_sketch_error_falls_with_its_size():
  exact = am.Polynomial(2)
  x, y = vectors(3, 6), vectors(3, 6, seed=3)
  want = evaluate(exact, start(exact, 6), x, y)[2]
  errors = []
  for size in (4, 64):
    features = am.Polynomial(2, sketch=size)
    assert features.size(6) == 1 + 6 + size
    draws = sketched_kernels(features, 1000, x, y)
    errors.append(np.sqrt(np.mean(np.square(draws - want[None]))))
  # As one over the root of the size.
  assert 3 < errors[0] / errors[1] < 5


def test_sketch_is_in_the_parameters():
  """So a checkpoint holds it, and nothing else is random."""
  features = am.Polynomial(3, sketch=5)
  params = start(features, 4)
  assert params["sketch_2"].shape == (2, 4, 5)
  assert params["sketch_3"].shape == (3, 4, 5)
  x = vectors(3, 4)
  mapped = evaluate(features, params, x, x)[0]
  assert mapped.shape == (3, features.size(4))
  other = start(features, 4, jax.random.key(7))
  assert not np.allclose(mapped, evaluate(features, other, x, x)[0])


def test_too_large_maps_name_the_sketch():
  with pytest.raises(UserError, match=r"4186 features.*set `sketch`"):
    am.Polynomial(2).size(90)
  assert am.Polynomial(2).size(89) <= LARGEST_MAP
  assert am.Polynomial(2, sketch=128).size(90) == 1 + 90 + 128
  with pytest.raises(UserError, match="smaller `sketch`"):
    am.Polynomial(2, sketch=5000).size(8)
  memory = am.Memory(am.Polynomial(3), am.MLP())
  with pytest.raises(UserError, match="sketch"):
    am.init_params(KEY, memory, heads=1, key_width=64, value_width=64)


@pytest.mark.parametrize("bias", [False, True])
def test_identity_with_bias_is_one_more_feature(bias):
  features = am.Identity(bias=bias)
  x, y = vectors(3, 4), vectors(5, 4, seed=3)
  map_x, map_y, kernel = evaluate(features, start(features, 4), x, y)
  assert map_x.shape == (3, features.size(4)) == (3, 4 + bias)
  np.testing.assert_allclose(kernel, map_x @ map_y.T, atol=1e-15)
  np.testing.assert_allclose(kernel, x @ y.T + bias, atol=1e-15)


@pytest.mark.parametrize("kind", [am.Identity, am.Polynomial])
def test_narrow_keys_are_projected_and_normalised(kind):
  features = kind(key_width=2)
  params = start(features, 5)
  basis = np.asarray(params["narrow"])
  assert basis.shape == (5, 2)
  np.testing.assert_allclose(basis.T @ basis, np.eye(2), atol=1e-12)
  x = vectors(3, 5)
  out = narrow(features, x, features.prepare(params, 5))
  short = x @ basis
  short /= np.linalg.norm(short, axis=1, keepdims=True)
  np.testing.assert_allclose(out, short, rtol=1e-9)


def test_zero_keys_have_finite_slopes():
  features = am.Polynomial(2, key_width=2)

  @jax.jit
  @jax.grad
  def slope(x, params):
    shared = features.prepare(params, 4)
    return jnp.sum(features.map(narrow(features, x, shared), shared))

  assert np.all(np.isfinite(slope(jnp.zeros((2, 4)), start(features, 4))))
