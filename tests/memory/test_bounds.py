"""Each part of the bound, alone and inside a memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.memory import bounds
from atlas_jax.memory.coefficients import has_budget
from atlas_jax.memory.numerics import cap_norm, safe_norm, unit
from tests.memory.cases import (
  BATCH,
  HEADS,
  LENGTH,
  assert_close,
  make_params,
  make_tokens,
)

pytestmark = pytest.mark.usefixtures("x64")


def call(memory, params, tokens):
  """One call, compiled quickly."""
  run = jax.jit(
    lambda params, tokens: am.apply(memory, params, *tokens),
  )
  return run(params, tokens)


def test_clip_shortens_only_long_gradients():
  bound = am.Bound(error_clip=2.0)
  size = jnp.array([0.0, 1.0, 6.0, 12.0, 1e30])
  got = bounds.clip_scale(bound, size, 9)
  np.testing.assert_allclose(got, [1, 1, 1, 0.5, 6e-30])
  off = bounds.clip_scale(bounds.UNBOUNDED, size, 9)
  np.testing.assert_array_equal(off, np.ones(5))


def test_gain_is_the_ratio_of_lengths_down_to_a_floor():
  u = jnp.array([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
  error = jnp.array([[2.0], [0.0], [0.0]])
  got = bounds.gain(u, error)
  np.testing.assert_allclose(got, [2.5, 5e4, 0], rtol=1e-6, atol=1e-7)
  slope = jax.grad(lambda u, e: jnp.sum(bounds.gain(u, e)), (0, 1))(u, error)
  assert all(np.all(np.isfinite(s)) for s in slope)


def test_growth_is_the_largest_reached():
  written = jnp.array([[0.5, 0.0], [0.5, 1.0]])
  overlap = jnp.array([[4.0, 1.0], [1.0, 9.0]])
  reach = jnp.array([[1.0, 0.0], [1.0, 1.0]])
  got = bounds.growth(written, overlap, reach)
  np.testing.assert_allclose(got, [2.0, 9.5])


def test_caps_by_matrix():
  bound = am.Bound(error_clip=2.0, weight_cap=3.0)
  weights = {"in": jnp.full((4, 9), 5.0), "out": jnp.full((2, 2), 0.1)}
  plain = am.ScalarRetention()
  got = bounds.cap_weights(bound, weights, plain)
  np.testing.assert_allclose(np.linalg.norm(got["in"]), 3 * 2)
  np.testing.assert_array_equal(got["out"], weights["out"])
  # Logarithms of weights start longer, and so does their ball.
  got = bounds.cap_weights(bound, weights, am.KLRetention())
  np.testing.assert_allclose(np.linalg.norm(got["in"]), 3 * 6)
  got = bounds.cap_momentum(bound, weights, 16)
  np.testing.assert_allclose(np.linalg.norm(got["in"]), 2 * 4)
  np.testing.assert_array_equal(got["out"], weights["out"])
  free = am.Bound(weight_cap=None)
  assert bounds.cap_weights(free, weights, plain) is weights
  assert bounds.cap_momentum(free, weights, 16) is weights


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e4, 1e30])
def test_norms_are_finite_with_finite_slopes(size):
  x = jnp.full((3, 4), size, jnp.float32)
  for function in (
    lambda x: safe_norm(x, (-2, -1)),
    lambda x: cap_norm(x, 2.0, (-2, -1)),
    lambda x: unit(x, axis=-1),
  ):
    assert np.all(np.isfinite(function(x)))
    slope = jax.grad(lambda x, f=function: jnp.sum(f(x)))(x)
    assert np.all(np.isfinite(slope))
  want = size * math.sqrt(12)
  np.testing.assert_allclose(
    safe_norm(x, (-2, -1))[0, 0], want, rtol=1e-6, atol=1e-17
  )


def test_gradient_clip_is_the_identity_with_short_cotangents():
  x = jnp.arange(6.0).reshape(2, 3)
  np.testing.assert_array_equal(bounds.clip_gradient(1.0, x), x)
  pull = jax.vjp(lambda x: bounds.clip_gradient(2.0, x), x)[1]
  small, large = jnp.full((2, 3), 0.1), jnp.full((2, 3), 10.0)
  assert_close(pull(small)[0], small, 1e-12)
  assert_close(pull(large)[0], large * 2 / np.linalg.norm(large), 1e-12)


def one_matrix(**changes):
  return am.Memory(
    am.Identity(),
    am.Matrix(),
    **{
      "optimizer": am.GradientDescent(),
      "retention": am.NoRetention(),
      "window": 1,
      "chunk": 4,
    }
    | changes,
  )


ONLY = {
  "damp_momentum": False,
  "error_clip": None,
  "budget": None,
  "weight_cap": None,
  "gradient_clip": None,
}


def test_momentum_is_damped_by_one_minus_theta():
  """A damped memory is an undamped one with smaller rates."""
  damped = one_matrix(
    optimizer=am.Momentum(), bound=am.Bound(**ONLY | {"damp_momentum": True})
  )
  free = one_matrix(optimizer=am.Momentum(), bound=None)
  params, tokens = make_params(damped), make_tokens(damped)
  gates = tokens.gates
  rate = gates.rate * (1 - jnp.exp(gates.log_momentum))
  slower = tokens._replace(gates=gates._replace(rate=rate))
  learned = lambda out: (out.y, out.state.weights, out.state.momentum)
  want = learned(call(free, params, slower))
  assert_close(learned(call(damped, params, tokens)), want, 1e-12)
  assert not np.allclose(call(free, params, tokens).y, want[0])


@pytest.mark.parametrize("optimizer", [am.GradientDescent(), am.Momentum()])
def test_clip_limits_what_one_token_moves(optimizer):
  memory = one_matrix(
    optimizer=optimizer, chunk=1, bound=am.Bound(**ONLY | {"error_clip": 0.5})
  )
  params, tokens = make_params(memory), make_tokens(memory, length=1)
  huge = tokens._replace(value=1e6 * tokens.value)
  out = call(memory, params, huge)
  moved = out.state.weights["matrix"] - params["start"]["matrix"][None]
  length = jnp.linalg.norm(moved, axis=(-2, -1))
  limit = 0.5 * math.sqrt(tokens.value.shape[-1])
  rate = tokens.gates.rate * tokens.gates.window[..., 0]
  assert_close(length, limit * rate[:, 0], 1e-9)


@pytest.mark.parametrize("budget", ["full", "diagonal"])
def test_budget_keeps_one_repeated_fact_from_overshooting(budget):
  """Full steps to one pair write it, however often it comes in a chunk."""
  limited = one_matrix(chunk=8, bound=am.Bound(**ONLY | {"budget": budget}))
  free = one_matrix(chunk=8, bound=None)
  params = make_params(limited)
  tokens = make_tokens(limited, length=8)
  once = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :1], x.shape), tokens)
  once = once._replace(
    query=once.key,
    gates=once.gates._replace(
      rate=jnp.ones((BATCH, 8, HEADS)), window=jnp.ones((BATCH, 8, HEADS, 1))
    ),
  )
  before = jnp.einsum("hvk,bhk->bhv", params["start"]["matrix"], once.key[:, 0])
  error = before - once.value[:, 0]
  left = call(limited, params, once).y - once.value
  # Part of the error that is left, along the error.
  part = jnp.sum(left * error[:, None], -1) / jnp.sum(error**2, -1)[:, None]
  assert np.all(np.abs(part) < 1e-6)
  grown = call(free, params, once).y - once.value
  part = jnp.sum(grown * error[:, None], -1) / jnp.sum(error**2, -1)[:, None]
  assert np.all(part[:, -1] < -10)


def test_budget_counts_how_a_write_shows():
  """Moneta's weights move by what is stored times a power of its norm."""
  memory = one_matrix(
    retention=am.LqRetention(4.0),
    chunk=8,
    bound=am.Bound(**ONLY | {"budget": "full"}),
  )
  params, tokens = make_params(memory), make_tokens(memory, length=8)
  once = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :1], x.shape), tokens)
  gates = once.gates._replace(
    log_decay=jnp.zeros_like(once.gates.log_decay),
    rate=jnp.ones_like(once.gates.rate),
    window=jnp.ones_like(once.gates.window),
  )
  once = once._replace(query=once.key, gates=gates)
  # As short as its floor, so that a write shows a hundredfold.
  params["start"] = {"matrix": 1e-3 * params["start"]["matrix"]}
  y = call(memory, params, once).y
  before = call(
    memory, params, once._replace(gates=gates._replace(rate=0 * gates.rate))
  ).y
  part = jnp.sum((y - before) * (once.value - before), -1)
  part /= jnp.sum((once.value - before) ** 2, -1)
  # Before the border each token is read as one whole step leaves it.
  np.testing.assert_allclose(part[:, :7], 1.0, atol=1e-6)


def test_budget_leaves_small_steps_alone():
  limited = one_matrix(window=3, bound=am.Bound(**ONLY | {"budget": "full"}))
  free = one_matrix(window=3, bound=None)
  params, tokens = make_params(free), make_tokens(free)
  gates = tokens.gates
  small = tokens._replace(gates=gates._replace(rate=gates.rate * 0.01))
  assert_close(call(limited, params, small), call(free, params, small), 1e-13)
  large = tokens._replace(gates=gates._replace(rate=gates.rate * 10))
  assert not np.allclose(
    call(limited, params, large).y, call(free, params, large).y
  )


def test_budget_is_not_for_the_dot_product_or_muon():
  bound = am.Bound(budget="full")
  assert has_budget(one_matrix(bound=bound))
  assert not has_budget(one_matrix(bound=bound, objective=am.DotProduct()))
  assert not has_budget(one_matrix(bound=bound, optimizer=am.Muon(every=2)))
  assert not has_budget(one_matrix(bound=None))


def test_weights_and_momentum_are_capped_at_chunk_ends():
  bound = am.Bound(**ONLY | {"error_clip": 0.1, "weight_cap": 0.2})
  memory = one_matrix(optimizer=am.Momentum(), bound=bound)
  params, tokens = make_params(memory), make_tokens(memory)
  out = call(memory, params, tokens)
  length = lambda tree: jnp.linalg.norm(tree["matrix"], axis=(-2, -1))
  width = tokens.value.shape[-1]
  assert np.all(length(out.state.weights) <= 0.2 * 2 + 1e-9)
  assert np.sum(length(out.state.weights) > 0.2 * 2 - 1e-9) >= 2
  assert np.all(length(out.state.momentum) <= 0.1 * math.sqrt(width) + 1e-9)
  # The last token of a chunk reads the capped weights.
  read = jnp.einsum(
    "bhvk,bhk->bhv", out.state.weights["matrix"], tokens.query[:, LENGTH - 2]
  )
  assert LENGTH % 4 == 1
  assert_close(out.y[:, LENGTH - 2], read, 1e-10)


def test_gradient_clip_changes_gradients_only():
  clipped = one_matrix(bound=am.Bound(**ONLY | {"gradient_clip": 1e-3}))
  free = one_matrix(bound=None)
  params, tokens = make_params(free), make_tokens(free)

  def gradient(memory):
    def total(params):
      out = am.apply(memory, params, *tokens)
      return jnp.sum(out.y), out

    return jax.jit(jax.grad(total, has_aux=True))(params)

  short, out = gradient(clipped)
  long, want = gradient(free)
  assert_close(out, want, 1e-13)
  norm = lambda g: np.linalg.norm(g["start"]["matrix"], axis=(-2, -1))
  assert np.all(norm(short) < norm(long))
  generous = one_matrix(bound=am.Bound(**ONLY | {"gradient_clip": 1e6}))
  assert_close(gradient(generous)[0], long, 1e-12)
