"""Padding, documents and carried tokens as indices, against plain lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from atlas_jax.errors import UserError
from atlas_jax.memory import layout as layouts

BATCH, LENGTH = 3, 11
SEEDS = range(8)

# As in a model: shapes and the largest number of documents are static.
plan_of = jax.jit(
  layouts.plan, static_argnames=("length", "chunk", "batch", "max_segments")
)


def random_mask(random):
  return random.random((BATCH, LENGTH)) < random.choice([0.0, 0.3, 0.8, 1.0])


def random_documents(random):
  """Ids of runs of random lengths."""
  rows = []
  for _ in range(BATCH):
    ids, runs = [], 0
    while len(ids) < LENGTH:
      runs += 1
      ids += [int(random.integers(1, 5)) * 10 + runs] * int(
        random.choice([1, 2, 5, 11])
      )
    rows.append(ids[:LENGTH])
  return np.array(rows, np.int32)


@pytest.mark.parametrize("seed", SEEDS)
def test_compaction_moves_valid_tokens_to_the_front_in_order(seed):
  random = np.random.default_rng(seed)
  mask = random_mask(random)
  x = random.normal(size=(BATCH, LENGTH, 2)).astype(np.float32)
  x[~mask] = np.nan
  compaction = layouts.compact(jnp.asarray(mask))
  moved = np.asarray(compaction.gather(jnp.asarray(x)))
  back = np.asarray(compaction.scatter(jnp.asarray(moved)))
  for row in range(BATCH):
    valid = x[row][mask[row]]
    assert compaction.lengths[row] == len(valid)
    np.testing.assert_array_equal(moved[row, : len(valid)], valid)
    assert np.all(moved[row, len(valid) :] == 0)
  np.testing.assert_array_equal(back, np.where(mask[..., None], x, 0))


def slots_by_hand(chunk, count, documents, length):
  """Slots of one row as a list: "p3" pending, 7 a token, None nothing.

  Returns also the slots at which a further document starts, and where the
  row's last document ends.
  """
  slots = [f"p{i}" for i in range(count)]
  restarts = []
  for i in range(length):
    if i and documents[i] != documents[i - 1]:
      slots += [None] * (-len(slots) % chunk)
      restarts.append(len(slots))
    slots.append(i)
  return slots, restarts


@pytest.mark.parametrize("chunk", [1, 4, 5])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("packed", [False, True])
def test_plan_is_the_list(chunk, seed, packed):
  random = np.random.default_rng(seed)
  carried = bool(random.random() < 0.6)
  count = random.integers(0, chunk, BATCH) * carried
  lengths = random.integers(0, LENGTH + 1, BATCH)
  documents = random_documents(random)
  plan = plan_of(
    LENGTH,
    chunk,
    BATCH,
    count=jnp.asarray(count, jnp.int32) if carried else None,
    lengths=jnp.asarray(lengths, jnp.int32),
    segment_ids=jnp.asarray(documents) if packed else None,
    max_segments=LENGTH if packed else None,
  )
  plan = jax.tree.map(np.asarray, plan)
  assert plan.source.shape[1] % chunk == 0
  for row in range(BATCH):
    ids = documents[row] if packed else [1] * LENGTH
    n = lengths[row]
    slots, restarts = slots_by_hand(chunk, count[row], ids, n)
    source = np.full(plan.source.shape[1], -1)
    for place, what in enumerate(slots):
      if isinstance(what, str):
        source[place] = int(what[1:])
      elif what is not None:
        source[place] = what + chunk - 1
        assert plan.position[row, what] == place
    np.testing.assert_array_equal(plan.source[row], source)
    assert np.all(np.asarray(plan.position[row, n:]) == len(source))
    assert plan.lengths[row] == n
    left = len(slots) // chunk * chunk
    assert plan.count[row] == len(slots) - left
    np.testing.assert_array_equal(
      plan.pending[row], left + np.arange(chunk - 1)
    )
    borders = np.arange(len(source) // chunk) * chunk
    np.testing.assert_array_equal(
      plan.commit[row], borders + chunk <= len(slots)
    )
    if packed:
      np.testing.assert_array_equal(
        plan.restart[row], np.isin(borders, restarts)
      )
    for i in range(n):
      starts = [j for j in range(1, i + 1) if ids[j] != ids[j - 1]]
      history = i - max(starts, default=0)
      if carried and not starts:
        history += layouts.LONG_AGO
      assert plan.history[row, i] == history


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_go_to_their_slots_and_back(seed):
  random = np.random.default_rng(seed)
  chunk = 4
  count = random.integers(0, chunk, BATCH).astype(np.int32)
  lengths = random.integers(0, LENGTH + 1, BATCH).astype(np.int32)
  x = 1 + random.random((BATCH, LENGTH, 2)).astype(np.float32)
  pending = 3 + random.random((BATCH, chunk - 1, 2)).astype(np.float32)
  plan = plan_of(
    LENGTH,
    chunk,
    BATCH,
    count=jnp.asarray(count),
    lengths=jnp.asarray(lengths),
    segment_ids=jnp.asarray(random_documents(random)),
    max_segments=LENGTH,
  )
  slots = layouts.to_slots(plan, jnp.asarray(pending), jnp.asarray(x))
  back = np.asarray(layouts.from_slots(plan, slots))
  rest = np.asarray(layouts.left_over(plan, slots))
  for row in range(BATCH):
    n = lengths[row]
    np.testing.assert_array_equal(back[row, :n], x[row, :n])
    assert np.all(back[row, n:] == 0)
    # Every slot holds a token, a pending token or nothing.
    filled = int(np.sum(np.any(np.asarray(slots[row]) != 0, -1)))
    assert filled == n + count[row]
    kept = int(plan.count[row])
    assert np.all(rest[row, :kept] != 0)
    assert np.all(rest[row, kept:] == 0)
    together = np.concatenate([pending[row, : count[row]], x[row, :n]])
    if kept:
      np.testing.assert_array_equal(rest[row, :kept], together[-kept:])


def test_plan_has_room_for_the_worst_case_and_no_more():
  """T + documents x (chunk - 1) slots, plus the carried tokens, rounded up."""
  ids = jnp.arange(1, LENGTH + 1, dtype=jnp.int32)[None]
  plan = layouts.plan(LENGTH, 4, 1, segment_ids=ids)
  assert plan.source.shape[1] == 44
  assert np.all(np.sort(np.asarray(plan.position[0])) == np.arange(11) * 4)


def test_aligned_documents_restart_at_their_chunks():
  ids = jnp.array([[1, 1, 0, 0, 2, 2, 2, 2, 2, 3, 3, 3], [4] * 12], jnp.int32)
  got = layouts.aligned_restarts(ids.at[0, 8].set(2), 4)
  np.testing.assert_array_equal(
    got, [[False, True, False], [False, False, False]]
  )


def test_mask_and_documents_must_agree():
  ids = jnp.array([[1, 1, 0]], jnp.int32)
  mask = jnp.array([[True, False, False]])
  np.testing.assert_array_equal(layouts.valid_mask(mask, ids), mask)
  np.testing.assert_array_equal(layouts.valid_mask(None, ids), ids > 0)
  assert layouts.valid_mask(None, None) is None
  with pytest.raises(UserError, match="segment id is 0"):
    layouts.valid_mask(jnp.ones((1, 3), bool), ids)


def test_too_many_documents_are_refused():
  ids = jnp.array([[1, 2, 3, 3], [1, 1, 1, 1]], jnp.int32)
  plan = lambda ids, most: layouts.plan(
    4, 2, 2, segment_ids=ids, max_segments=most
  )
  with pytest.raises(UserError, match="3 documents, more than max_segments 2"):
    plan(ids, 2)
  plan(ids, 3)
  with pytest.raises(UserError, match="inside jit need `max_segments`"):
    jax.jit(lambda ids: plan(ids, None))(ids)


def test_too_many_documents_inside_jit_are_a_checkify_error():
  plan = lambda ids: layouts.plan(4, 2, 2, segment_ids=ids, max_segments=2)
  checked = jax.jit(checkify.checkify(plan))
  error, _ = checked(jnp.array([[1, 2, 3, 3], [1, 1, 1, 1]], jnp.int32))
  with pytest.raises(
    checkify.JaxRuntimeError, match="more documents than max_segments=2"
  ):
    error.throw()
  error, _ = checked(jnp.array([[1, 2, 2, 2], [1, 1, 1, 1]], jnp.int32))
  error.throw()
  # Without checkify the check costs nothing and the call goes through.
  jax.jit(plan)(jnp.array([[1, 2, 2, 2], [1, 1, 1, 1]], jnp.int32))
