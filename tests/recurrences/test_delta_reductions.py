"""Where members of the delta family meet, and the solvers they rest on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import memory as am
from atlas_jax.layers.delta_mixer import DeltaNetMixer, GatedDeltaNetMixer
from atlas_jax.recurrences import delta_rule, longhorn, mesa, rwkv7
from atlas_jax.recurrences.conjugate_gradients import solve_symmetric
from atlas_jax.recurrences.triangular import unit_lower_inverse
from tests.layers.helpers import assert_close, jit, made, randomised
from tests.models.mixers import call, inputs
from tests.recurrences.delta_cases import tokens_of


@pytest.fixture(scope="module", autouse=True)
def x64():
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


def tokens(name="deltanet"):
  """Query, key, value, rate and state of one case."""
  args = tokens_of(name)
  return [args[k] for k in ("query", "key", "value", "rate", "state")]


def test_gated_deltanet_without_decay_is_deltanet():
  x = inputs(40)
  same = {"expand_key": 1.0, "expand_value": 1.0, "gated": True}
  gated, plain = (
    made(lambda rngs, kind=kind: kind(16, 2, **same, rngs=rngs))
    for kind in (GatedDeltaNetMixer, DeltaNetMixer)
  )
  gated = randomised(gated)
  nnx.update(plain, nnx.state(gated, lambda path, _: "decay" not in path))
  assert not jnp.allclose(call(gated, x).y, call(plain, x).y)
  gated.decay.log_rate = nnx.Param(jnp.full((2,), -jnp.inf))
  assert_close(call(gated, x).y, call(plain, x).y, 1e-6)


def test_a_square_error_matrix_memory_of_chunk_one_is_deltanet():
  """The memory keeps the factor 2 of its gradient: half the step."""
  query, key, value, rate, _ = tokens()
  start = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 5)))
  memory = am.Memory(
    features=am.Identity(),
    network=am.Matrix(),
    objective=am.L2(),
    optimizer=am.GradientDescent(),
    retention=am.NoRetention(),
    window=1,
    chunk=1,
    bound=None,
  )
  gates = am.Gates(
    log_decay=jnp.zeros((*rate.shape, 0)),
    log_momentum=jnp.zeros_like(rate),
    rate=rate / 2,
    window=jnp.ones((*rate.shape, 1)),
  )
  params = {"features": {}, "start": {"matrix": start}}
  out = jit(lambda *args: am.apply(memory, *args))(
    params, query, key, value, gates
  )
  state = jnp.broadcast_to(start[None], (2, *start.shape))
  y, last = delta_rule(query, key, value, rate, state=state)
  assert out.state is not None
  assert_close(out.y, y, 1e-10)
  assert_close(out.state.weights["matrix"], last, 1e-10)


def test_longhorn_of_unit_keys_is_the_delta_rule_with_a_smaller_rate():
  query, key, value, rate, state = tokens()
  length = jnp.sum(key * key, axis=-1)
  assert jnp.any(length == 0)
  want = delta_rule(query, key, value, rate / (1 + rate * length), None, state)
  assert_close(longhorn(query, key, value, rate, state), want, 1e-10)
  rows = jnp.broadcast_to(rate[..., None], value.shape)
  assert_close(longhorn(query, key, value, rows, state), want, 1e-10)


def test_longhorn_reads_back_what_a_huge_rate_or_key_has_written():
  _, key, value, rate, state = tokens("longhorn")
  nonzero = jnp.any(key != 0, axis=-1, keepdims=True)
  for size, more in ((1.0, 1e12), (1e8, 0.0)):
    y, _ = longhorn(size * key, size * key, value, rate + more, state)
    assert_close(jnp.where(nonzero, y, value), value, 1e-6)


def test_rwkv7_with_equal_rates_and_no_decay_is_the_delta_rule():
  query, key, value, rate, state = tokens()
  rates = jnp.broadcast_to(rate[..., None], key.shape)
  got = rwkv7(query, rates * key, value, key, rates, jnp.zeros_like(key), state)
  assert_close(got, delta_rule(query, key, value, rate, None, state), 1e-10)


def test_mesa_with_a_large_ridge_is_linear_attention():
  query, key, value, rate, _ = tokens()
  ridge = jnp.full((2, 5), 1e6)
  y, _ = mesa(query, key, value, rate, jnp.zeros_like(rate), ridge)
  scores = jnp.tril(jnp.einsum("bthk,bnhk->bhtn", query, key))
  want = jnp.einsum("bhtn,bnh,bnhv->bthv", scores, rate, value)
  assert_close(1e6 * y, want, 1e-4)


def test_mesa_recalls_as_many_pairs_as_keys_have_channels():
  random = np.random.default_rng(0)
  key, value = (jnp.asarray(random.standard_normal((1, 5, 1, 5))) for _ in "kv")
  one = jnp.ones((1, 5, 1))
  ridge = jnp.full((1, 5), 1e-9)
  query = jnp.broadcast_to(key[:, :1], key.shape)
  y, _ = mesa(query, key, value, one, 0 * one, ridge)
  assert_close(y, jnp.broadcast_to(value[:, :1], value.shape), 1e-5)


def systems(condition, dtype):
  """Eight symmetric matrices [8, 6, 6], and right-hand sides [8, 6]."""
  random = np.random.default_rng(0)
  base = np.linalg.qr(random.standard_normal((8, 6, 6)))[0]
  spread = condition ** np.linspace(0, 1, 6)
  matrices = (base * spread) @ base.swapaxes(-1, -2)
  right = random.standard_normal((8, 6))
  return jnp.asarray(matrices, dtype), jnp.asarray(right, dtype)


def solved(matrices, right, tolerance, iterations=200):
  return solve_symmetric(
    lambda x: jnp.einsum("nij,nj->ni", matrices, x, precision="highest"),
    right,
    jnp.diagonal(matrices, axis1=1, axis2=2),
    tolerance=tolerance,
    iterations=iterations,
  )


def test_conjugate_gradients_solve_and_differentiate():
  matrices, right = systems(1e4, jnp.float64)

  def direct(matrices, right):
    return jnp.linalg.solve(matrices, right[..., None])[..., 0]

  total = lambda solve: lambda *args: jnp.sum(jnp.sin(100 * solve(*args)))
  iterative = lambda *args: solved(*args, 1e-12)
  assert_close(iterative(matrices, right), direct(matrices, right), 1e-8)
  got = jax.grad(total(iterative), argnums=(0, 1))(matrices, right)
  want = jax.grad(total(direct), argnums=(0, 1))(matrices, right)
  assert_close(got, want, 1e-8)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_residuals_meet_the_tolerance_at_any_scale(scale):
  matrices, right = systems(1e3, jnp.float32)
  x = np.float64(solved(matrices, jnp.float32(scale) * right, 1e-6))
  wide = np.float64(right)
  left = np.einsum("nij,nj->ni", matrices, x)
  gap = np.linalg.norm(left - scale * wide, axis=-1)
  # The product with x alone is rounded by as much as the second term.
  rounding = 1e-7 * 1e3 * np.linalg.norm(x, axis=-1)
  norm = scale * np.linalg.norm(wide, axis=-1)
  assert np.all(gap < 1e-6 * norm + rounding)
  assert jnp.all(solved(matrices, 0 * right, 1e-6) == 0)


def test_a_system_gives_the_same_bits_beside_any_others():
  matrices, right = systems(1e3, jnp.float32)
  easy = jnp.broadcast_to(jnp.eye(6, dtype=jnp.float32)[None], matrices.shape)
  mixed = jnp.where(jnp.arange(8)[:, None, None] < 1, easy, matrices)
  call = jit(lambda *args: solved(*args, 1e-6))
  assert jnp.array_equal(call(mixed, right)[0], call(easy, right)[0])
  assert jnp.all(jnp.isfinite(solved(matrices, right, 1e-6, iterations=1)))


@pytest.mark.parametrize("size", [1, 3, 8, 64])
def test_the_inverse_bears_repeated_keys(size):
  """A series in powers of this matrix has terms of 1e18 at size 64."""
  lower = jnp.tril(jnp.ones((size, size), jnp.float32), -1)
  inverse = unit_lower_inverse(lower)
  want = np.eye(size) - np.eye(size, k=-1)
  np.testing.assert_array_equal(inverse, want)
