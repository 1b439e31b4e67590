"""Calls as users make them: real lengths, no masks, carried states, types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from tests.memory.cases import (
  BATCH,
  LENGTH,
  WIDTH,
  assert_close,
  cached,
  differentiated,
  finite,
  fresh_state,
  made_of,
  make_params,
  make_probe,
  make_tokens,
  same_bits,
  stepped,
)
from tests.memory.memories import MEMORIES

pytestmark = pytest.mark.usefixtures("x64")

LIMIT = 1e-10
# What a call does around its chunks is the same for every memory.
SOME = [
  "omeganet",
  pytest.param("atlas", marks=pytest.mark.full),
  pytest.param("omeganet_deep_huber_channels", marks=pytest.mark.full),
  pytest.param("titans", marks=pytest.mark.full),
]
# The second in steps; around chunks of 4.
PIECES = (5, 3, 5)

some_memories = pytest.mark.parametrize("name", SOME)


@functools.cache
def applied(memory):
  return jax.jit(
    functools.partial(am.apply, memory),
    static_argnames=("implementation", "max_segments", "aligned"),
  )


@functools.cache
def case_of(name):
  memory = MEMORIES[name]
  params = make_params(memory)
  probe = make_probe(memory, params)
  ones = np.ones((BATCH, LENGTH))
  everything = (ones > 0, ones.astype(np.int32), probe)
  return memory, params, make_tokens(memory), everything


def pieces_of(tokens):
  start = 0
  for length in PIECES:
    yield jax.tree.map(lambda x, s=start, n=length: x[:, s : s + n], tokens)
    start += length


@some_memories
def test_a_plain_call_is_a_call_with_everything_valid(name):
  memory, params, tokens, everything = case_of(name)
  fresh = fresh_state(memory, params)
  want = differentiated(memory)(params, tokens, fresh, *everything).made
  got = applied(memory)(params, *tokens)
  assert_close(made_of(got), want, LIMIT)


@some_memories
def test_pieces_of_any_length_are_one_call(name):
  """Also where steps come in between and leave their cache in the state."""
  memory, params, tokens, _ = case_of(name)
  want = applied(memory)(params, *tokens)
  step, state, y = stepped(memory), None, []
  for i, piece in enumerate(pieces_of(tokens)):
    if i == 1:
      for t in range(PIECES[i]):
        token = jax.tree.map(lambda x, t=t: x[:, t], piece)
        out = step(params, *token, state)
        state = out.state
        y.append(out.y[:, None])
    else:
      out = applied(memory)(params, *piece, state)
      state = out.state
      y.append(out.y)
  assert_close(jnp.concatenate(y, 1), want.y, LIMIT)
  assert_close(state, want.state, LIMIT)


@some_memories
def test_aligned_documents_are_unaligned_ones(name):
  """Values and gradients, with windows that reach over chunks."""
  memory, params, tokens, _ = case_of(name)
  ids = np.array(
    [[1] * 4 + [2] * 7 + [0] + [3], [4] * 3 + [0] + [5] * 9], np.int32
  )
  probe = make_probe(memory, params)
  no_state = jax.tree.map(jnp.zeros_like, probe.state)

  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def aligned(params, tokens):
    out = am.apply(memory, params, *tokens, segment_ids=ids, aligned=True)
    assert out.state is None
    loss = jnp.sum(out.inner_loss * probe.inner_loss)
    return jnp.sum(out.y * probe.y) + loss, (out.y, out.inner_loss)

  gradients, made = jax.jit(aligned)(params, tokens)
  want = differentiated(memory)(
    params,
    tokens,
    fresh_state(memory, params),
    ids > 0,
    ids,
    probe._replace(state=no_state),
  )
  assert_close(made, (want.made.y, want.made.inner_loss), LIMIT)
  assert_close(gradients[1], want.tokens, LIMIT)
  through_state = jax.tree.map(lambda g: g.sum(0), want.state.weights)
  start = jax.tree.map(jnp.add, want.params["start"], through_state)
  assert_close(gradients[0], want.params | {"start": start}, LIMIT)


def test_a_layout_made_once_is_the_mask_and_the_documents():
  memory, params, tokens, _ = case_of("omeganet")
  ids = np.array([[0, 1, 1, 0] + [2] * 9, [3] * 5 + [0] * 8], np.int32)
  state = fresh_state(memory, params)
  run = applied(memory)
  want = run(params, *tokens, state, segment_ids=ids, max_segments=2)
  compaction = am.layout.compact(jnp.asarray(ids > 0))
  plan = am.layout.plan(
    LENGTH,
    memory.chunk,
    BATCH,
    count=state.count,
    lengths=compaction.lengths,
    segment_ids=compaction.gather(jnp.asarray(ids)),
    max_segments=2,
  )
  moved = jax.tree.map(compaction.gather, tokens)
  for implementation in ("xla", "reference"):
    got = run(params, *moved, state, layout=plan, implementation=implementation)
    assert_close(compaction.scatter(got.y), want.y, LIMIT)
    assert_close(got.state, want.state, LIMIT)


def test_implementations_by_name():
  memory, params, tokens, _ = case_of("omeganet")
  run = applied(memory)
  auto = run(params, *tokens)
  assert same_bits(run(params, *tokens, implementation="xla"), auto)
  reference = run(params, *tokens, implementation="reference")
  assert_close(reference, auto, LIMIT)
  state = auto.state
  token = jax.tree.map(lambda x: x[:, 0], tokens)
  slow = functools.partial(am.step, memory, implementation="reference")
  got = jax.jit(slow)(params, *token, state)
  assert_close(
    made_of(got), made_of(stepped(memory)(params, *token, state)), LIMIT
  )


def test_state_of_a_call_fits_the_next_and_counts():
  memory, params, tokens, _ = case_of("omeganet")
  out = applied(memory)(params, *tokens)
  fresh = fresh_state(memory, params)
  types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert types(out.state) == types(fresh)
  np.testing.assert_array_equal(out.state.count, LENGTH % memory.chunk)
  np.testing.assert_array_equal(out.state.seen, memory.window - 1)
  np.testing.assert_array_equal(fresh.seen, 0)
  assert_close(out.weight_norm, am.norm(out.state.weights), 1e-14)
  flat = jnp.concatenate(
    [w.reshape(*w.shape[:2], -1) for w in out.state.weights.values()], -1
  )
  assert_close(out.weight_norm, jnp.linalg.norm(flat, axis=-1), 1e-10)


def test_reset_rows_start_anew_and_others_keep_their_bits():
  memory, params, tokens, _ = case_of("omeganet")
  used = applied(memory)(params, *tokens).state
  state = am.reset(memory, params, used, jnp.array([True, False]))
  row = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
  assert same_bits(row(state, 1), row(used, 1))
  assert same_bits(row(state, 0), row(fresh_state(memory, params), 0))


def to(dtype, tree):
  return jax.tree.map(lambda x: x.astype(dtype), tree)


@pytest.mark.parametrize(
  ("name", "limit"),
  [
    ("omeganet", 1e-2),
    pytest.param("titans", 1e-2, marks=pytest.mark.full),
    pytest.param("atlas", 3e-2, marks=pytest.mark.full),
  ],
)
def test_bfloat16_inputs_keep_a_float32_carry(name, limit):
  """Stated tolerance against float64: 1 % of the outputs' norm, Muon 3 %."""
  memory, params, tokens, _ = case_of(name)
  want = applied(memory)(params, *tokens)
  narrow = to(jnp.bfloat16, tokens)._replace(
    gates=to(jnp.float32, tokens.gates)
  )
  got = applied(memory)(to(jnp.float32, params), *narrow)
  assert got.y.dtype == jnp.bfloat16
  assert got.inner_loss.dtype == jnp.float32
  for leaf in jax.tree.leaves(got.state):
    assert leaf.dtype in (jnp.float32, jnp.int32)
  error = np.asarray(got.y, np.float64) - want.y
  assert np.linalg.norm(error) < limit * np.linalg.norm(want.y)
  assert np.linalg.norm(error) > 1e-4 * np.linalg.norm(want.y)


def test_bfloat16_parameters_work():
  memory, params, tokens, _ = case_of("omeganet")
  got = applied(memory)(to(jnp.bfloat16, params), *to(jnp.bfloat16, tokens))
  assert got.y.dtype == jnp.bfloat16
  assert finite(to(jnp.float32, got.y))
  shapes = jax.eval_shape(
    lambda key: am.init_params(
      key,
      MEMORIES["atlas"],
      heads=1,
      key_width=WIDTH,
      value_width=WIDTH,
      dtype=jnp.bfloat16,
    ),
    jax.random.key(0),
  )
  assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}


def test_a_step_compiles_once():
  memory, params, tokens, _ = case_of("omeganet")
  step = jax.jit(functools.partial(am.step, memory))
  state = cached(memory)(params, fresh_state(memory, params))
  for t in range(9):
    token = jax.tree.map(lambda x, t=t: x[:, t], tokens)
    state = step(params, *token, state).state
  assert step._cache_size() == 1
