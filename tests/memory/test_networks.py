"""Memory networks against the formulas, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.memory.factors import prepare, prepare_heads
from atlas_jax.memory.networks import ACTIVATIONS, layer_norm
from tests.memory.cases import assert_close, make_params

pytestmark = pytest.mark.usefixtures("x64")

WIDTH = 4
NETWORKS = {
  "matrix": am.Matrix(),
  "depth_one": am.MLP(depth=1, bias=True),
  "depth_two": am.MLP(expansion=1.5),
  "depth_four": am.MLP(depth=4, expansion=2, bias=True, layer_norm=True),
  "no_residual": am.MLP(expansion=1.5, residual=False, activation="silu"),
  "gated": am.GatedMLP(expansion=1.5, bias=True, layer_norm=True),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def parts(network, features=None):
  """A head's weights, what the network shares, and a plain `linear`."""
  features = features or am.Identity()
  memory = am.Memory(features, network, optimizer=am.GradientDescent())
  params = make_params(memory, heads=1, width=WIDTH, values=WIDTH)
  weights = {name: w[0] for name, w in params["start"].items()}
  own = prepare_heads(memory, params, jnp.float64)
  shared = prepare(memory, params, WIDTH, jnp.float64)
  shared |= jax.tree.map(lambda p: p[0], own)
  table = memory.entries(WIDTH, WIDTH)

  def linear(name, x):
    return table[name].lift.map(x, shared["features"]) @ weights[name].T

  return weights, shared, linear


def inputs(count=3):
  return jnp.asarray(np.random.default_rng(5).normal(size=(count, WIDTH)))


def gelu(x):
  """The tanh form (Hendrycks and Gimpel, arXiv 1606.08415)."""
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def with_one(x):
  return np.concatenate([x, np.ones_like(x[:, :1])], 1)


def normalised(h, norm):
  h = h - h.mean(1, keepdims=True)
  h = h / np.sqrt((h**2).mean(1, keepdims=True) + 1e-6)
  return h * norm["scale"] + norm["offset"]


def by_hand(name, x, w, shared):
  if name == "matrix":
    return x @ w["matrix"].T
  if name == "depth_one":
    return x + x @ w["out"].T
  if name == "depth_two":
    return x + gelu(x @ w["in"].T) @ w["out"].T
  if name == "depth_four":
    h = gelu(x @ w["in"].T)
    h = gelu(with_one(h) @ w["hidden_1"].T)
    h = gelu(with_one(h) @ w["hidden_2"].T)
    return x + normalised(with_one(h) @ w["out"].T, shared["norm"])
  if name == "no_residual":
    h = x @ w["in"].T
    return (h / (1 + np.exp(-h))) @ w["out"].T
  h = gelu(x @ w["in"].T) * (x @ w["gate"].T)
  return x + normalised(with_one(h) @ w["out"].T, shared["norm"])


@every_network
def test_forward_is_the_formula(name):
  network = NETWORKS[name]
  weights, shared, linear = parts(network)
  x = inputs()
  got = network.apply(linear, x, am.Identity(), shared)
  weights, numpy_shared = jax.tree.map(np.asarray, (weights, shared))
  want = by_hand(name, np.asarray(x), weights, numpy_shared)
  np.testing.assert_allclose(got, want, rtol=1e-12)


@every_network
def test_each_matrix_is_used_once_and_named(name):
  network = NETWORKS[name]
  _, shared, linear = parts(network)
  table = network.entries(am.Identity(), WIDTH, WIDTH)
  used = []

  def record(matrix, x):
    used.append(matrix)
    assert x.shape[-1] == table[matrix].inputs
    out = linear(matrix, x)
    assert out.shape[-1] == table[matrix].rows
    return out

  network.apply(record, inputs(), am.Identity(), shared)
  assert sorted(used) == sorted(table)


@every_network
def test_tokens_never_mix(name):
  network = NETWORKS[name]
  _, shared, linear = parts(network)
  run = lambda x: network.apply(linear, x, am.Identity(), shared)
  slope = jax.jit(jax.jacobian(run))(inputs(3))
  for i in range(3):
    for j in range(3):
      assert np.any(slope[i, :, j] != 0) == (i == j)


def test_features_reach_only_the_first_matrix():
  features = am.Polynomial(2, key_width=2)
  for network in (am.MLP(depth=3), am.GatedMLP()):
    table = network.entries(features, WIDTH, WIDTH)
    lifted = {name for name, entry in table.items() if entry.lift == features}
    assert lifted == set(table) - {"hidden_1", "out"}
    assert table["in"].shape == (16, 6)
  table = am.MLP(depth=3, bias=True).entries(features, WIDTH, WIDTH)
  assert table["out"].shape == (4, 17)


def test_residual_adds_the_unlifted_unprojected_input():
  features = am.Polynomial(2, key_width=2)
  plain = am.MLP(residual=False)
  _, shared, linear = parts(plain, features)
  x = inputs()
  without = plain.apply(linear, x, features, shared)
  assert_close(am.MLP().apply(linear, x, features, shared), x + without, 1e-14)


def test_layer_norm_of_a_constant_is_its_offset():
  shared = {"scale": jnp.full((3,), 2.0), "offset": jnp.array([1.0, 2.0, 3.0])}
  run = lambda x: layer_norm(x, shared)
  x = jnp.full((2, 3), 7.0)
  np.testing.assert_allclose(run(x), np.tile([1.0, 2.0, 3.0], (2, 1)))
  assert np.all(np.isfinite(jax.jacobian(run)(x)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_survive_huge_inputs(activation):
  act = ACTIVATIONS[activation]
  x = jnp.array([-1e18, -1e4, 0.0, 1e4, 1e18], jnp.float32)
  assert np.all(np.isfinite(act(x)))
  assert np.all(np.isfinite(jax.vmap(jax.grad(act))(x)))
