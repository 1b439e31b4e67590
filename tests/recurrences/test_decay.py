"""Matrix memories with decay against their definition, token by token."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.recurrences import channel_decay, scalar_decay
from tests.layers.helpers import assert_close, finite, jit

BATCH, HEADS, KEY, VALUE = 2, 2, 3, 5
CHUNK = 8

# How log decays are given, and how many heads share a query and a key.
KINDS = ("scalar", "shared", "none", "channel")

# Lengths and chunks: those of every run, and the full grid.
LENGTHS = [(1, 8), (2, 8), (7, 8), (8, 8), (77, 32), (77, 12), (256, 64)]
CASES = [
  *((kind, 77, CHUNK) for kind in KINDS),
  ("scalar", CHUNK + 1, CHUNK),
  ("channel", CHUNK + 1, CHUNK),
  *(
    pytest.param(kind, *case, marks=pytest.mark.full)
    for kind in KINDS
    for case in LENGTHS
  ),
]


@pytest.fixture
def x64():
  """Lets a test use float64; rounding no longer hides a mistake."""
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


every_kind = pytest.mark.parametrize("kind", KINDS)


def tokens(kind, length, dtype="float32", seed=0):
  """Arguments of one call: query, key, value, log decay, state."""
  random = np.random.default_rng(seed)

  def normal(*shape):
    return random.standard_normal((BATCH, *shape))

  groups = 1 if kind == "shared" else HEADS
  decay = normal(length, HEADS, *((KEY,) if kind == "channel" else ()))
  arrays = (
    normal(length, groups, KEY),
    normal(length, groups, KEY),
    normal(length, HEADS, VALUE),
    -np.abs(decay) * random.choice([0.01, 1.0, 30.0], decay.shape),
    normal(HEADS, VALUE, KEY),
  )
  q, k, v, g, state = (jnp.asarray(x, dtype) for x in arrays)
  return q, k, v, None if kind == "none" else g, state


def decayed(kind, arrays, restart, valid, chunk, **static):
  op = channel_decay if kind == "channel" else scalar_decay
  return op(*arrays, restart=restart, valid=valid, chunk=chunk, **static)


@functools.partial(jit, static_argnames=("kind", "chunk", "implementation"))
def run(kind, arrays, restart=None, valid=None, chunk=CHUNK, **static):
  return decayed(kind, arrays, restart, valid, chunk, **static)


@functools.partial(jit, static_argnames=("kind", "chunk", "implementation"))
def slopes(kind, arrays, restart=None, valid=None, chunk=CHUNK, **static):
  """Outputs, and gradients by all arrays, of a sum that weighs them all."""

  def total(arrays):
    y, state = decayed(kind, arrays, restart, valid, chunk, **static)
    if valid is not None:
      y = jnp.where(valid[..., None, None], y, jnp.zeros((), y.dtype))
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state)), (y, state)

  return jax.grad(total, has_aux=True)(arrays)


def documents(length):
  """Tokens that begin documents, and places of padding, a few of both."""
  random = np.random.default_rng(5)
  restart = random.random((BATCH, length)) < 0.1
  valid = random.random((BATCH, length)) < 0.8
  return jnp.asarray(restart), jnp.asarray(valid)


@pytest.mark.parametrize(("kind", "length", "chunk"), CASES)
@pytest.mark.usefixtures("x64")
def test_the_fast_form_is_the_definition(kind, length, chunk):
  arrays = tokens(kind, length, "float64")
  where = documents(length)
  actual = slopes(kind, arrays, *where, chunk=chunk)
  expected = slopes(kind, arrays, *where, implementation="reference")
  assert_close(actual, expected, 1e-8)


@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_float32_is_near_the_definition(kind):
  arrays = tokens(kind, 77)
  actual = slopes(kind, arrays)
  assert_close(actual, slopes(kind, arrays, implementation="reference"), 1e-5)


@every_kind
def test_the_definition_is_its_equation(kind):
  q, k, v, g, state = (
    None if x is None else np.asarray(x, np.float64) for x in tokens(kind, 5)
  )
  memory, expected = state.copy(), []
  for t in range(5):
    for row in range(BATCH):
      for head in range(HEADS):
        group = min(head, q.shape[2] - 1)
        decay = 1.0 if g is None else np.exp(g[row, t, head])
        write = np.outer(v[row, t, head], k[row, t, group])
        memory[row, head] = memory[row, head] * decay + write
        expected.append(memory[row, head] @ q[row, t, group])
  y, last = run(kind, tokens(kind, 5), implementation="reference")
  expected = np.reshape(expected, (5, BATCH, HEADS, VALUE)).swapaxes(0, 1)
  assert_close((y, last), (expected, memory), 1e-6)


@every_kind
def test_any_split_is_one_call(kind):
  arrays = tokens(kind, 77)
  expected = run(kind, arrays)
  parts, state = [], arrays[-1]
  for start, stop in ((0, 33), (33, 76), (76, 77)):
    part = [None if x is None else x[:, start:stop] for x in arrays[:-1]]
    y, state = run(kind, (*part, state))
    parts.append(y)
  assert_close((jnp.concatenate(parts, axis=1), state), expected, 1e-5)


@every_kind
def test_documents_and_padding_are_invisible(kind):
  length = 30
  arrays = tokens(kind, length)
  restart = np.zeros((BATCH, length), bool)
  valid = np.ones((BATCH, length), bool)
  restart[0, 11], valid[0, 5:9], valid[:, 20:23] = True, False, False
  hidden = [
    None
    if x is None
    else jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, jnp.nan)
    for x in arrays[:-1]
  ]
  y, state = run(
    kind, (*hidden, arrays[-1]), jnp.asarray(restart), jnp.asarray(valid)
  )
  assert jnp.all(y[~valid] == 0)
  for row, first in ((0, 11), (1, 0)):
    kept = np.flatnonzero(valid[row, first:]) + first
    alone = [None if x is None else x[row : row + 1, kept] for x in arrays[:-1]]
    start = arrays[-1][row : row + 1] * (0.0 if first else 1.0)
    expected = run(kind, (*alone, start))
    assert_close(
      (y[row, kept], state[row]), tuple(x[0] for x in expected), 1e-5
    )


@every_kind
def test_nothing_looks_ahead(kind):
  arrays = tokens(kind, 77)
  y, _ = run(kind, arrays)
  for t in (1, 40):
    other = list(arrays)
    for i in range(4):
      if arrays[i] is not None:
        other[i] = arrays[i].at[1, t].add(-1.0)
    changed, _ = run(kind, tuple(other))
    assert jnp.array_equal(changed[0], y[0])
    assert jnp.array_equal(changed[1, :t], y[1, :t])
    assert jnp.any(changed[1, t] != y[1, t])


@every_kind
@pytest.mark.parametrize("log_decay", [0.0, -1e-8, -20.0, -1e30, -math.inf])
def test_hostile_tokens_stay_finite(kind, log_decay):
  q, k, v, g, state = tokens(kind, 77)
  if g is not None:
    g = jnp.where(jnp.arange(77)[None, :, None] % 3 == 0, log_decay, 0.0)
    ends = (KEY,) if kind == "channel" else ()
    g = jnp.broadcast_to(
      g.reshape(1, 77, 1, *[1] * len(ends)), (BATCH, 77, HEADS, *ends)
    )
  for key in (1e4 * k, jnp.zeros_like(k), jnp.broadcast_to(k[:, :1], k.shape)):
    out = slopes(kind, (1e4 * q, key, 1e4 * v, g, state))
    assert finite(out)
  definition = run(kind, (q, k, v, g, state), implementation="reference")
  assert_close(run(kind, (q, k, v, g, state)), definition, 1e-5)


@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_a_closed_gate_forgets_exactly(kind):
  q, k, v, g, state = tokens(kind, 20)
  g = g.at[:, 13].set(-math.inf)
  y, last = run(kind, (q, k, v, g, state))
  other, same = run(kind, (q, k.at[:, 4].add(1e3), v, g, 1e3 * state))
  assert jnp.array_equal(other[:, 13:], y[:, 13:])
  assert jnp.array_equal(same, last)
  assert jnp.any(other[:, 12] != y[:, 12])


@every_kind
def test_bfloat16_tokens_make_a_float32_state(kind):
  arrays = tokens(kind, 77)
  exact, _ = run(kind, arrays)
  narrow = [x.astype(jnp.bfloat16) for x in arrays[:3]]
  y, state = run(kind, (*narrow, *arrays[3:]))
  assert y.dtype == jnp.bfloat16
  assert state.dtype == jnp.float32
  error = jnp.sqrt(jnp.mean((y.astype(jnp.float32) - exact) ** 2))
  assert 0 < error < 0.05 * jnp.sqrt(jnp.mean(exact**2))


@pytest.mark.parametrize("kind", ["shared", "channel"])
def test_rows_in_groups_are_the_same_rows(kind, monkeypatch):
  arrays = tokens(kind, 20)
  expected = run(kind, arrays)
  monkeypatch.setattr(
    "atlas_jax.memory.dispatch.rows_at_once", lambda rows, _: 1
  )
  op = channel_decay if kind == "channel" else scalar_decay
  actual = jit(lambda *arrays: op(*arrays, chunk=CHUNK))(*arrays)
  assert_close(actual, expected, 1e-6)


def test_no_tokens_give_no_outputs():
  arrays = tokens("scalar", 0)
  y, state = scalar_decay(*arrays)
  assert y.shape == (BATCH, 0, HEADS, VALUE)
  assert jnp.array_equal(state, arrays[-1])


def test_equal_decays_of_channels_are_one_decay():
  q, k, v, g, state = tokens("scalar", 30)
  every = jnp.broadcast_to(g[..., None], k.shape)
  assert_close(
    run("channel", (q, k, v, every, state)),
    run("scalar", (q, k, v, g, state)),
    1e-5,
  )


def test_a_descending_memory_with_the_dot_product_is_linear_attention():
  memory = am.Memory(
    am.Identity(),
    am.Matrix(),
    am.DotProduct(),
    am.GradientDescent(),
    retention=am.ScalarRetention(),
    window=1,
    chunk=4,
    bound=None,
  )
  q, k, v, g, _ = tokens("scalar", 21)
  params = am.init_params(
    jax.random.key(0), memory, heads=HEADS, key_width=KEY, value_width=VALUE
  )
  rate = jnp.abs(v[..., 0])
  out = jit(lambda *args: am.apply(memory, params, *args))(
    q,
    k,
    v,
    am.Gates(
      log_decay=g[..., None],
      log_momentum=jnp.zeros_like(g),
      rate=rate,
      window=jnp.ones((*g.shape, 1)),
    ),
  )
  start = am.init_state(memory, params, BATCH).weights["matrix"]
  expected, _ = run("scalar", (q, k, rate[..., None] * v, g, start))
  assert_close(out.y, expected, 1e-5)


def test_what_does_not_fit_is_refused():
  q, k, v, g, state = tokens("scalar", 4)
  with pytest.raises(UserError, match=r"key is .* but must be"):
    scalar_decay(q, k[:, :3], v, g, state)
  with pytest.raises(UserError, match="groups of keys do not divide 2 heads"):
    scalar_decay(*(jnp.concatenate([x, x[:, :, :1]], 2) for x in (q, k)), v, g)
  with pytest.raises(UserError, match=r"log_decay is .* but must be"):
    channel_decay(q, k, v, g)
  with pytest.raises(UserError, match="chunk 0: use 1 or more"):
    channel_decay(q, k, v, k, chunk=0)
  with pytest.raises(UserError, match="implementation 'fast'"):
    scalar_decay(q, k, v, g, implementation="fast")
