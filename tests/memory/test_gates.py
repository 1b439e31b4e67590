"""Decay and window matrices against direct products and plain loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.memory import gates

pytestmark = pytest.mark.usefixtures("x64")


def products(gate):
  """L[t, n] = gate[n + 1] ... gate[t], one product at a time."""
  size = len(gate)
  out = np.zeros((size, size))
  for t in range(size):
    for n in range(t + 1):
      out[t, n] = math.prod(gate[n + 1 : t + 1])
  return out


def log(gate):
  with np.errstate(divide="ignore"):
    return jnp.asarray(np.log(gate))


GATES = {
  "ordinary": np.array([0.9, 0.5, 1.0, 0.99, 0.1, 0.7]),
  "zeros": np.array([0.9, 0.0, 0.5, 0.0, 0.0, 0.7]),
  "all_zero": np.zeros(4),
  "all_one": np.ones(5),
  "tiny": np.array([1e-30, 1e-300, 0.5, 1e-200]),
  "one_token": np.array([0.3]),
}
every_gate = pytest.mark.parametrize("name", GATES)


@every_gate
def test_decays_are_products(name):
  gate = GATES[name]
  got = gates.decay_products(log(gate))
  np.testing.assert_allclose(got, products(gate), rtol=1e-13)
  start = gates.decay_from_start(log(gate))
  np.testing.assert_allclose(start, np.cumprod(gate), rtol=1e-13)


@every_gate
def test_slopes_of_decays_are_finite_and_right(name):
  """d L[t, n] / d log gate_j = L[t, n] for n < j <= t; 0 at a gate of 0."""
  gate = GATES[name]
  size = len(gate)
  j, t, n = np.meshgrid(*[np.arange(size)] * 3, indexing="ij")
  inside = (n < j) & (j <= t) & (gate[j] > 0)
  want = np.where(inside, products(gate)[None], 0.0)
  got = jax.jacobian(gates.decay_products)(log(gate))
  np.testing.assert_allclose(np.moveaxis(got, -1, 0), want, rtol=1e-13)
  slope = jax.jacobian(gates.decay_from_start)(log(gate))
  assert np.all(np.isfinite(slope))


def test_small_decays_survive_a_long_chunk_and_large_neighbours():
  """The difference of two cumulative sums in float32 loses them."""
  size = 1024
  gate = np.full(size, 1 - 1e-6)
  gate[: size // 2] = 1e-3
  exact = np.log(gate)
  got = gates.decay_products(jnp.asarray(exact, jnp.float32))
  t, n = size - 1, size // 2
  want = math.exp(math.fsum(exact[n + 1 : t + 1]))
  np.testing.assert_allclose(got[t, n], want, rtol=2e-7)
  sums = np.cumsum(exact.astype(np.float32), dtype=np.float32)
  assert abs(np.exp(sums[t] - sums[n]) - want) > 1e-5


def windows(window, seen):
  """Gamma[t, i] by loops: column W - 1 + t holds token t itself."""
  rows, width = window.shape
  out = np.zeros((rows, rows + width - 1))
  for t in range(rows):
    for back in range(width):
      column = width - 1 + t - back
      if column >= width - 1 - seen:
        out[t, column] = window[t, back]
  return out


@pytest.mark.parametrize(
  ("rows", "width"), [(1, 1), (4, 1), (4, 3), (4, 4), (3, 8), (1, 5)]
)
def test_window_matrix_is_the_band(rows, width):
  window = np.random.default_rng(0).random((rows, width)) + 0.1
  for seen in range(width):
    got = gates.window_matrix(jnp.asarray(window), jnp.int32(seen))
    np.testing.assert_array_equal(got, windows(window, seen))


def test_window_matrix_counts_only_the_filled_tail():
  window = jnp.ones((4, 4))
  none = gates.window_matrix(window, jnp.int32(0))
  all_ = gates.window_matrix(window, jnp.int32(3))
  assert np.all(none[:, :3] == 0)
  assert np.all(np.sum(all_, axis=1) == 4)


@pytest.mark.parametrize("offset", [-1, 0, 2])
def test_lower_triangle(offset):
  got = gates.lower_triangle(5, jnp.float64, offset)
  np.testing.assert_array_equal(got, np.tri(5, k=offset))
