"""Special cases, each against its own plain loop or known answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from tests.memory.calls import call, with_gates
from tests.memory.cases import (
  BATCH,
  HEADS,
  LENGTH,
  assert_close,
  at,
  make_params,
  make_tokens,
  same_bits,
)
from tests.memory.memories import MEMORIES, MORE_MEMORIES, POLYNOMIAL, SMALL_MLP

pytestmark = pytest.mark.usefixtures("x64")


def matrix_memory(**changes):
  return am.Memory(
    am.Identity(),
    am.Matrix(),
    **{
      "optimizer": am.GradientDescent(),
      "retention": am.NoRetention(),
      "window": 1,
      "chunk": 1,
      "bound": None,
    }
    | changes,
  )


@pytest.mark.parametrize("chunk", [1, 4])
def test_window_of_one_with_momentum_is_titans(chunk):
  """arXiv 2501.00663, Eq. 13-14, with gradients frozen over a chunk."""
  memory = am.Memory(
    am.Identity(),
    SMALL_MLP,
    optimizer=am.Momentum(),
    window=1,
    chunk=chunk,
    bound=None,
  )
  params, tokens = make_params(memory), make_tokens(memory)
  tokens = with_gates(tokens, window=1.0)
  got = call(memory, params, tokens)

  def memorised(w, x):
    return x + w["out"] @ jax.nn.gelu(w["in"] @ x)

  @jax.jit
  @jax.grad
  def gradient(w, key, value):
    return jnp.sum(jnp.square(memorised(w, key) - value))

  add = functools.partial(jax.tree.map, jnp.add)
  scaled = lambda factor, tree: jax.tree.map(lambda x: factor * x, tree)
  for row in range(BATCH):
    for head in range(HEADS):
      w = {name: x[head] for name, x in params["start"].items()}
      frozen, s = w, jax.tree.map(jnp.zeros_like, w)
      for t in range(LENGTH):
        if t % chunk == 0:
          frozen = w
        q, k, v, gate = at(tokens, row, t, head)
        g = gradient(frozen, k, v)
        theta, alpha = np.exp(gate.log_momentum), np.exp(gate.log_decay[0])
        s = add(scaled(theta, s), scaled(-gate.rate, g))
        w = add(scaled(alpha, w), s)
        assert_close(got.y[row, t, head], memorised(w, q), 1e-12)


@pytest.mark.parametrize("chunk", [1, 4])
def test_dot_product_matrix_is_linear_attention(chunk):
  memory = matrix_memory(objective=am.DotProduct(), chunk=chunk)
  params, tokens = make_params(memory), make_tokens(memory)
  tokens = with_gates(tokens, rate=1.0, window=1.0)
  scores = jnp.einsum("bthk,bihk->bhti", tokens.query, tokens.key)
  want = jnp.einsum("bhti,bihv->bthv", jnp.tril(scores), tokens.value)
  want += jnp.einsum("hvk,bthk->bthv", params["start"]["matrix"], tokens.query)
  assert_close(call(memory, params, tokens).y, want, 1e-12)


def test_decayed_dot_product_matrix_is_gated_linear_attention():
  memory = matrix_memory(
    objective=am.DotProduct(), chunk=4, retention=am.ScalarRetention()
  )
  params, tokens = make_params(memory), make_tokens(memory)
  tokens = with_gates(tokens, rate=1.0, window=1.0)
  got = call(memory, params, tokens).y
  w = jnp.broadcast_to(
    params["start"]["matrix"], (BATCH, *params["start"]["matrix"].shape)
  )
  for t in range(LENGTH):
    q, k, v, gate = jax.tree.map(lambda x, t=t: x[:, t], tokens)
    w = jnp.exp(gate.log_decay)[..., None] * w + jnp.einsum(
      "bhv,bhk->bhvk", v, k
    )
    assert_close(got[:, t], jnp.einsum("bhvk,bhk->bhv", w, q), 1e-12)


def test_swla_of_a_matrix_is_the_sum_over_two_tokens():
  """arXiv 2505.23735, Eq. 54-55, signs corrected; 2602.24281, Eq. 28."""
  memory = matrix_memory(
    objective=am.DotProduct(),
    retention=am.ScalarRetention(),
    window=2,
    chunk=4,
  )
  params, tokens = make_params(memory), make_tokens(memory)
  got = call(memory, params, tokens)
  for row in range(BATCH):
    for head in range(HEADS):
      w = np.asarray(params["start"]["matrix"][head])
      before = 0.0
      for t in range(LENGTH):
        q, k, v, gate = at(tokens, row, t, head)
        own = np.outer(v, k)
        now, earlier = gate.rate * gate.window
        w = np.exp(gate.log_decay[0]) * w + earlier * before + now * own
        before = own
        np.testing.assert_allclose(got.y[row, t, head], w @ q, rtol=1e-10)


def test_dla_is_swla_with_the_older_gate_shut():
  wide, narrow = MORE_MEMORIES["swla"], MORE_MEMORIES["dla"]
  params, tokens = make_params(wide), make_tokens(wide)
  own = tokens.gates.window.at[..., 1:].set(0.0)
  tokens = with_gates(tokens, window=own)
  short = tokens._replace(gates=tokens.gates._replace(window=own[..., :1]))
  want = call(narrow, params, short)
  assert_close(call(wide, params, tokens).y, want.y, 1e-10)


def test_titans_without_momentum_forgets_it_at_once():
  with_momentum, without = MEMORIES["titans"], MORE_MEMORIES["titans_nomom"]
  params, tokens = make_params(without), make_tokens(without)
  tokens = with_gates(tokens, log_momentum=-jnp.inf)
  got = call(without, params, tokens)
  want = call(with_momentum, params, tokens)
  assert_close(got.y, want.y, 1e-10)
  assert_close(got.state.weights, want.state.weights, 1e-10)


def test_square_error_matrix_is_the_delta_rule_with_half_the_step():
  """DeltaNet: W <- W (I - beta k k^T) + beta v k^T, beta = 2 eta."""
  memory = matrix_memory()
  params, tokens = make_params(memory), make_tokens(memory)
  tokens = with_gates(tokens, window=1.0)
  got = call(memory, params, tokens).y
  for row in range(BATCH):
    for head in range(HEADS):
      w = np.asarray(params["start"]["matrix"][head])
      for t in range(LENGTH):
        q, k, v, gate = at(tokens, row, t, head)
        beta = 2 * gate.rate
        w = w @ (np.eye(len(k)) - beta * np.outer(k, k)) + beta * np.outer(v, k)
        np.testing.assert_allclose(got[row, t, head], w @ q, rtol=1e-10)


def test_a_window_whose_gates_are_shut_is_no_window():
  wide = am.Memory(
    POLYNOMIAL, SMALL_MLP, window=5, chunk=4, optimizer=am.Muon(2)
  )
  narrow = am.Memory(
    POLYNOMIAL, SMALL_MLP, window=1, chunk=4, optimizer=am.Muon(2)
  )
  params, tokens = make_params(wide), make_tokens(wide)
  own = tokens.gates.window.at[..., 1:].set(0.0)
  tokens = with_gates(tokens, window=own)
  short = tokens._replace(gates=tokens.gates._replace(window=own[..., :1]))
  got, want = call(wide, params, tokens), call(narrow, params, short)
  assert_close(got.y, want.y, 1e-10)
  assert_close(got.state.weights, want.state.weights, 1e-10)


def test_gates_of_one_are_no_gates():
  """Decay 1 is no retention; momentum 0 with rate eta is plain descent."""
  kept = matrix_memory(chunk=4, retention=am.ScalarRetention())
  free = matrix_memory(chunk=4)
  params, tokens = make_params(kept), make_tokens(kept)
  tokens = with_gates(tokens, log_decay=0.0)
  plain = tokens._replace(
    gates=tokens.gates._replace(log_decay=tokens.gates.log_decay[..., :0])
  )
  want = call(free, params, plain).y
  assert_close(call(kept, params, tokens).y, want, 1e-13)
  momentum = matrix_memory(chunk=4, optimizer=am.Momentum())
  still = with_gates(plain, log_momentum=-jnp.inf)
  assert_close(call(momentum, params, still).y, want, 1e-13)


def test_equal_channel_decays_are_one_decay():
  one = matrix_memory(chunk=4, retention=am.ScalarRetention())
  many = matrix_memory(chunk=4, retention=am.ChannelRetention(3))
  params, tokens = make_params(one), make_tokens(one)
  spread = jnp.repeat(tokens.gates.log_decay, 3, axis=-1)
  wide = tokens._replace(gates=tokens.gates._replace(log_decay=spread))
  assert_close(call(many, params, wide).y, call(one, params, tokens).y, 1e-13)


def test_degree_one_polynomial_without_constant_is_the_identity():
  plain = matrix_memory(chunk=4, window=3)
  lifted = matrix_memory(chunk=4, window=3)
  lifted = am.Memory(**{**vars(lifted), "features": am.Polynomial(degree=1)})
  params, tokens = make_params(plain), make_tokens(plain)
  start = jnp.pad(params["start"]["matrix"], ((0, 0), (0, 0), (1, 0)))
  more = {
    "start": {"matrix": start},
    "features": {"coefficient": jnp.array([0.0, 1.0])},
  }
  got, want = call(lifted, more, tokens), call(plain, params, tokens)
  assert_close(got.y, want.y, 1e-13)


@pytest.mark.parametrize(
  "optimizer", [am.GradientDescent(), am.Momentum(), am.Muon(every=2)]
)
def test_a_rate_of_zero_leaves_the_memory_unchanged(optimizer):
  memory = am.Memory(
    POLYNOMIAL, SMALL_MLP, optimizer=optimizer, window=3, chunk=4
  )
  params, tokens = make_params(memory), make_tokens(memory)
  tokens = with_gates(tokens, rate=0.0, log_decay=0.0)
  out = call(memory, params, tokens)
  start = jax.tree.map(
    lambda w: jnp.broadcast_to(w, (BATCH, *w.shape)), params["start"]
  )
  assert same_bits(out.state.weights, start)
  # Decay alone shrinks the weights by the product of the gates.
  tokens = make_tokens(memory)
  tokens = with_gates(tokens, rate=0.0)
  out = call(memory, params, tokens)
  whole = LENGTH // memory.chunk * memory.chunk
  product = jnp.exp(jnp.sum(tokens.gates.log_decay[:, :whole], axis=1))
  want = jax.tree.map(lambda w: product[..., None] * w, start)
  assert_close(out.state.weights, want, 1e-12)


def test_muon_acts_on_the_momentum():
  """With decay 1 one step moves by rate x the orthogonalised momentum."""
  memory = am.Memory(
    am.Identity(),
    am.Matrix(),
    optimizer=am.Muon(every=8, epsilon=1e-9),
    retention=am.NoRetention(),
    window=1,
    chunk=8,
    bound=None,
  )
  params, tokens = make_params(memory), make_tokens(memory, length=8)
  tokens = with_gates(tokens, log_momentum=jnp.log(0.9), window=1.0)
  out = call(memory, params, tokens)
  moved = params["start"]["matrix"][None] - out.state.weights["matrix"]
  s = np.linalg.svd(moved, compute_uv=False)
  rate = np.asarray(jnp.sum(tokens.gates.rate, 1))[..., None]
  assert np.all(s > 0.68 * rate)
  assert np.all(s < 1.21 * rate)
  weights = params["start"]["matrix"]
  error = jnp.einsum("hvk,bthk->bthv", weights, tokens.key) - tokens.value
  age = 0.9 ** jnp.arange(7, -1, -1, dtype=jnp.float64)
  momentum = jnp.einsum("t,bthv,bthk->bhvk", age, 2 * error, tokens.key)
  assert_close(out.state.momentum["matrix"], momentum, 1e-12)
  step = rate[..., None] * am.newton_schulz(momentum, memory.optimizer)
  assert_close(moved, step, 1e-9)


def test_muons_rate_does_not_depend_on_how_often_it_steps():
  """Every token's write gate counts once, decayed to the block's end."""
  tokens = None
  for every in (1, 2, 4):
    memory = am.Memory(
      am.Identity(),
      am.Matrix(),
      optimizer=am.Muon(every=every, epsilon=1e-9),
      window=1,
      chunk=4,
      bound=None,
    )
    params = make_params(memory)
    tokens = make_tokens(memory, length=4)
    # One pair all along: the momentum's direction never changes.
    first = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :1], x.shape), tokens)
    tokens = first._replace(gates=tokens.gates)
    moved = call(memory, params, tokens).state.weights["matrix"]
    if every == 1:
      want = moved
    assert_close(moved, want, 1e-6)


def test_a_stored_pair_is_read_back_exactly():
  memory = matrix_memory()
  params, tokens = make_params(memory), make_tokens(memory, length=5)
  tokens = with_gates(tokens, rate=0.5, window=1.0)
  tokens = tokens._replace(query=tokens.key)
  assert_close(call(memory, params, tokens).y, tokens.value, 1e-11)


@pytest.mark.parametrize(
  "optimizer",
  # A small epsilon would stretch rounding errors to whole steps.
  [am.GradientDescent(), am.Momentum(), am.Muon(every=2, epsilon=100.0)],
)
def test_what_is_known_is_not_written(optimizer):
  """Loss, step and momentum are zero where the memory maps keys to values."""
  memory = am.Memory(
    POLYNOMIAL, SMALL_MLP, optimizer=optimizer, window=3, chunk=4
  )
  params, tokens = make_params(memory), make_tokens(memory)
  shut = with_gates(tokens, rate=0.0, log_decay=0.0)
  predicted = call(memory, params, shut._replace(query=tokens.key)).y
  known = with_gates(tokens, log_decay=0.0)._replace(value=predicted)
  out = call(memory, params, known)
  assert np.max(np.abs(out.inner_loss)) < 1e-18
  start = jax.tree.map(
    lambda w: jnp.broadcast_to(w, (BATCH, *w.shape)), params["start"]
  )
  assert_close(out.state.weights, start, 1e-9)
  # Muon's momentum is the rounding error of every token so far, fed back.
  for s in jax.tree.leaves(out.state.momentum):
    assert np.max(np.abs(s)) < 1e-10


def stored(features, pairs, passes=3000):
  """Largest error after repeated passes of the delta rule over the pairs."""
  width, values = 4, 3
  memory = am.Memory(**{**vars(matrix_memory()), "features": features})
  params = make_params(memory, heads=1, width=width, values=values)
  tokens = make_tokens(
    memory, batch=1, length=pairs, heads=1, width=width, values=values
  )
  repeat = lambda x: jnp.tile(x, (1, passes, *[1] * (x.ndim - 2)))
  tokens = with_gates(jax.tree.map(repeat, tokens), rate=0.2, window=1.0)
  out = call(memory, params, tokens)
  return float(jnp.max(out.inner_loss[0, -pairs:]))


def test_capacity_grows_with_the_features():
  """A matrix stores as many pairs as it has independent features, no more."""
  identity, quadratic = am.Identity(), am.Polynomial(degree=2)
  assert stored(identity, 4) < 1e-6
  assert stored(identity, 8) > 0.1
  assert stored(quadratic, 8) < 1e-3
  assert stored(quadratic, 20) > 0.1
