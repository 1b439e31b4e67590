"""Exponential-kernel memories against their definition, in float64.

The blocks are the token-by-token form, in values, states and gradients; any
split and any number of steps is one call.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.attention import exponential as ex
from atlas_jax.errors import UserError
from atlas_jax.memory import layout as layouts
from tests.attention.exponential_cases import (
  BATCH,
  CASES,
  HEADS,
  KEYS,
  LENGTH,
  WIDTH,
  call,
  cut,
  inputs_of,
  params_of,
  slopes,
  step,
)
from tests.layers.helpers import assert_close, finite, jit

# One memory of each kind of state, with and without a normaliser; the others in
# `make test-full`.
SOME = [
  pytest.param(name, marks=() if name in ("bare", "dot") else pytest.mark.full)
  for name in CASES
]
some_cases = pytest.mark.parametrize("name", SOME)

# The tokens of the first of two calls.
FIRST = 5


@pytest.fixture(autouse=True)
def x64():
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


def case(name):
  """The memory, its parameters, and tokens."""
  memory = CASES[name]
  return memory, params_of(memory), inputs_of(memory)


@some_cases
def test_blocks_are_the_definition(name):
  memory, params, tokens = case(name)
  found, out = slopes(memory, params, tokens)
  expected, slow = slopes(memory, params, tokens, "reference")
  assert_close(out.y, slow.y, 1e-9)
  room = 16
  assert_close(
    ex.resize(memory, out.state, room),
    ex.resize(memory, slow.state, room),
    1e-9,
  )
  assert_close(found, expected, 1e-8)
  assert not jnp.array_equal(out.y, slow.y), "one computes both"
  for path, leaf in jax.tree_util.tree_leaves_with_path(found):
    # No memory here has momentum.
    place = jax.tree_util.keystr(path)
    if not memory.linear and "momentum" not in place:
      assert jnp.any(leaf != 0), place


@some_cases
def test_any_split_and_any_number_of_steps_is_one_call(name):
  memory, params, tokens = case(name)
  _, whole = slopes(memory, params, tokens)
  expected = ex.resize(memory, whole.state, LENGTH)
  first = call(memory, params, *cut(tokens, 0, FIRST))
  second = call(memory, params, *cut(tokens, FIRST, LENGTH), first.state)
  both = jnp.concatenate([first.y, second.y], axis=1)
  assert_close(both, whole.y, 1e-9)
  assert_close(ex.resize(memory, second.state, LENGTH), expected, 1e-9)
  state = ex.resize(memory, first.state, LENGTH)
  state = ex.prepare(memory, params, state)
  ys = [first.y]
  for t in range(FIRST, LENGTH):
    y, state = step(memory, params, *cut(tokens, t, t + 1), state)
    ys.append(y)
  assert_close(jnp.concatenate(ys, axis=1), whole.y, 1e-9)
  assert_close(ex.unprepare(state), expected, 1e-9)


@some_cases
def test_a_state_is_the_definition_s(name):
  memory, params, tokens = case(name)
  first = call(memory, params, *cut(tokens, 0, FIRST))
  rest = cut(tokens, FIRST, LENGTH)
  out = call(memory, params, *rest, first.state)
  slow = call(memory, params, *rest, first.state, "reference")
  assert_close(slow.y, out.y, 1e-9)
  assert_close(
    ex.resize(memory, slow.state, 16), ex.resize(memory, out.state, 16), 1e-9
  )


@pytest.mark.full
@pytest.mark.parametrize("name", ["bare", "dot"])
def test_documents_and_padding_are_invisible(name):
  memory = CASES[name]
  params, (inputs, gates) = params_of(memory), inputs_of(memory)
  # Row 0 has documents of 3 and 6 tokens, row 1 has one of 7.
  restart = jnp.zeros((BATCH, LENGTH), bool).at[0, 3].set(True)
  lengths = jnp.array([9, 7], jnp.int32)
  valid = jnp.arange(LENGTH, dtype=jnp.int32)[None] < lengths[:, None]
  dirty = jax.tree.map(
    lambda x: jnp.where(
      valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, jnp.nan
    ),
    (inputs, gates),
  )
  layout = None
  if memory.chunk is not None:
    ids = 1 + jnp.cumsum(restart, axis=1, dtype=jnp.int32)
    ids = jnp.where(valid, ids, 0)
    layout = layouts.plan(
      LENGTH, memory.chunk, BATCH, lengths=lengths, segment_ids=ids
    )
  for implementation in ("xla", "reference"):
    out = jit(
      lambda inputs, gates, implementation=implementation: ex.apply(
        memory,
        params,
        inputs,
        gates,
        restart=restart,
        valid=valid,
        lengths=lengths,
        layout=layout,
        implementation=implementation,
      )
    )(*dirty)
    for row, start, end in ((0, 0, 3), (0, 3, 9), (1, 0, 7)):
      alone = jax.tree.map(
        lambda x, r=row, s=start, e=end: x[r : r + 1, s:e], (inputs, gates)
      )
      expected = call(memory, params, *alone)
      assert_close(out.y[row, start:end], expected.y[0], 1e-9)
      if start or row:
        state = jax.tree.map(lambda x, r=row: x[r : r + 1], out.state)
        assert_close(
          ex.resize(memory, state, 12),
          ex.resize(memory, expected.state, 12),
          1e-9,
        )


def test_many_blocks_are_one(monkeypatch):
  memory, params, tokens = case("bare")
  grads, whole = slopes(memory, params, tokens)
  monkeypatch.setattr("atlas_jax.attention.exponential_once.BLOCK", 1)
  found, out = jit(
    lambda params, tokens: slopes.__wrapped__(memory, params, tokens)
  )(params, tokens)
  assert_close(out, whole, 1e-9)
  assert_close(found, grads, 1e-8)


@some_cases
def test_gates_at_their_ends_stay_exact_and_finite(name):
  memory, params, (inputs, gates) = case(name)
  gates = gates._replace(
    # Forget all at the fourth token; keep all from the sixth on.
    log_decay=gates.log_decay.at[:, 3].set(-jnp.inf).at[:, 5:].set(0.0),
    rate=gates.rate.at[:, ::3].set(0.0),
  )
  found, out = slopes(memory, params, (inputs, gates))
  expected, slow = slopes(memory, params, (inputs, gates), "reference")
  assert_close(out.y, slow.y, 1e-9)
  assert finite(found)
  assert_close(found, expected, 1e-8)
  # A closed gate can open again.
  assert jnp.any(found[1][1].rate[:, 3:10:3] != 0)
  closed = gates._replace(rate=jnp.zeros_like(gates.rate))
  assert finite(slopes(memory, params, (inputs, closed)))


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name == "bare_dot" else pytest.mark.full)
    for name in CASES
  ],
)
def test_hostile_vectors_stay_finite_in_float32(name):
  memory, params, (inputs, gates) = case(name)
  if memory.chunk is not None:
    # The part of the definition that bounds what goes from chunk to chunk.
    memory = dataclasses.replace(memory, error_clip=memory.error_clip or 2.0)
  huge = jax.tree.map(lambda x: 1e4 * x, inputs)
  if not memory.normalised:
    # Scores are of unit vectors at a temperature of 8 there.
    unit = lambda x: x * (8**0.5 / jnp.linalg.norm(x, axis=-1, keepdims=True))
    huge = huge._replace(
      score_query=unit(inputs.score_query), score_key=unit(inputs.score_key)
    )
  same = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :1], x.shape), huge)
  zero = jax.tree.map(jnp.zeros_like, inputs)
  narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  for hostile in (huge, same, zero):
    assert finite(slopes(memory, *narrow((params, (hostile, gates)))))


@pytest.mark.parametrize("name", ["bare", "dot"])
def test_room_is_kept_account_of(name):
  memory, params, tokens = case(name)
  first = call(memory, params, *cut(tokens, 0, FIRST))
  token = cut(tokens, 0, 1)
  assert ex.capacity(memory, ex.init_state(memory, 1, KEYS, WIDTH)) == 0
  assert ex.capacity(memory, first.state) >= FIRST
  assert ex.capacity(memory, ex.resize(memory, first.state, 16)) == 16

  def steps(state, count):
    state, y = ex.prepare(memory, params, state), None
    for _ in range(count):
      y, state = step(memory, params, *token, state)
    return y, state

  # With a chunk of 4 there is room for 8 tokens, and for 3 pending ones.
  left = LENGTH - FIRST
  y, full = steps(
    ex.resize(memory, first.state, 8 if memory.chunk else 11), left
  )
  assert finite((y, full))
  with pytest.raises(UserError, match="row 0 of the state is full"):
    ex.step(memory, params, *token, full)
  _, lost = steps(full, 2)
  # Lost tokens never come back.
  y, _ = steps(ex.resize(memory, ex.resize(memory, lost, 20), 11), 1)
  assert jnp.all(jnp.isnan(y))
  y, _ = steps(ex.resize(memory, ex.resize(memory, first.state, 0), 11), 1)
  assert jnp.all(jnp.isnan(y))


def test_what_does_not_fit_is_refused():
  memory, params, (inputs, gates) = case("dot")
  with pytest.raises(UserError, match="no implementation is called 'fast'"):
    ex.apply(memory, params, inputs, gates, implementation="fast")
  other = ex.init_state(CASES["plain"], BATCH, KEYS, WIDTH, jnp.float64)
  with pytest.raises(UserError, match="start from `init_state`"):
    ex.apply(memory, params, inputs, gates, other)
  restart = jnp.zeros(inputs.key.shape[:2], bool)
  with pytest.raises(UserError, match="need a layout"):
    ex.apply(memory, params, inputs, gates, restart=restart)
  with pytest.raises(UserError, match="takes a lam other than 1"):
    ex.apply(memory, params, inputs, gates, lam=0.5)
  empty = ex.init_state(memory, BATCH, KEYS, WIDTH, jnp.float64)
  with pytest.raises(UserError, match="has no room for a token"):
    ex.step(memory, params, *cut((inputs, gates), 0, 1), empty)
  with pytest.raises(UserError, match="use 0 or more"):
    ex.resize(memory, empty, -1)
  for options, message in (
    ({"window": 0}, "window 0: use 1 or more"),
    ({"chunk": 0}, "chunk 0: use 1 or more"),
    ({"activation": "sine"}, "activation 'sine': use one of"),
    ({"objective": am.Huber()}, "use a value of DotProduct, L2"),
    ({"attends": True, "linear": True}, "leave it at 1"),
  ):
    with pytest.raises(UserError, match=message):
      ex.ExponentialMemory(**options)


def test_a_state_of_many_heads_is_shared_by_queries():
  # H / N queries in a row read the memory of one head of keys.
  memory = CASES["plain"]
  params, (inputs, gates) = params_of(memory), inputs_of(memory)
  out = call(memory, params, inputs, gates)
  repeated = lambda x: jnp.repeat(x, HEADS // KEYS, axis=2)
  each = ex.Inputs(
    inputs.query,
    *(repeated(x) for x in (inputs.key, inputs.value)),
    inputs.score_query,
    repeated(inputs.score_key),
  )
  many = jax.tree.map(lambda x: jnp.repeat(x, HEADS // KEYS, axis=0), params)
  alone = call(memory, many, each, jax.tree.map(repeated, gates))
  assert_close(out.y, alone.y, 1e-12)
  assert np.shape(out.y) == np.shape(inputs.query)


@pytest.mark.full
@pytest.mark.parametrize("name", ["bare", "bare_dot"])
def test_sums_over_64k_tokens_stay_finite(name):
  # Scores at a temperature of 8, all kept and all written.
  memory = dataclasses.replace(CASES[name], expansion=1.0)
  if memory.chunk is not None:
    memory = dataclasses.replace(memory, chunk=1024)
  inputs, gates = inputs_of(memory, length=2**16, batch=1)
  unit = lambda x: x * (8**0.5 / jnp.linalg.norm(x, axis=-1, keepdims=True))
  inputs = inputs._replace(
    score_query=unit(inputs.score_query), score_key=unit(inputs.score_key)
  )
  one_head = lambda x: x[:, :, :1]
  gates = gates._replace(
    log_decay=jnp.zeros_like(gates.log_decay), rate=jnp.ones_like(gates.rate)
  )
  inputs, gates = jax.tree.map(one_head, (inputs, gates))
  params = jax.tree.map(lambda x: x[:1], params_of(memory))
  narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  assert finite(call(memory, *narrow((params, inputs, gates))).y)
