"""Caches: what is kept, room, and rows that had none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import attention as aa
from atlas_jax.attention.cache import in_order
from atlas_jax.errors import UserError
from tests.attention.cases import BATCH, CASES, empty, fast, inputs, step

FULL = CASES["full"]


def entries(length):
  """Entries whose keys say which token and row they are."""
  row = 100.0 * jnp.arange(BATCH, dtype=jnp.float32)
  number = jnp.arange(1.0, length + 1)[None] + row[:, None]
  key = jnp.broadcast_to(number[..., None, None], (BATCH, length, 2, 4))
  return aa.Entries(key, -key)


def numbers(entries):
  """Which tokens entries are."""
  np.testing.assert_array_equal(entries.key, -entries.value)
  return np.asarray(entries.key[..., 0, 0]).tolist()


def test_a_cache_holds_the_last_document_at_the_front():
  restart = jnp.zeros((BATCH, 5), bool).at[0, 3].set(True)
  cache = aa.extend(None, entries(2))
  assert numbers(cache.entries) == [[1, 2], [101, 102]]
  cache = aa.extend(
    cache, entries(5), restart=restart, lengths=jnp.array([5, 1], jnp.int32)
  )
  assert numbers(cache.entries) == [
    [4, 5, 0, 0, 0, 0, 0],
    [101, 102, 101, 0, 0, 0, 0],
  ]
  assert cache.count.tolist() == [2, 3]
  none = jnp.zeros((BATCH,), jnp.int32)
  again = aa.extend(cache, entries(5), lengths=none, grow=False)
  assert numbers(again.entries) == numbers(cache.entries)
  assert again.count.tolist() == [2, 3]


def test_a_window_is_a_ring_of_the_last_tokens_beside_the_first():
  case = FULL._replace(window=3, global_tokens=2)
  lengths = jnp.array([3, 1], jnp.int32)
  cache = aa.extend_window(empty(case), entries(3), lengths=lengths)
  assert numbers(cache.recent) == [[1, 2, 3], [101, 0, 0]]
  assert numbers(cache.first) == [[1, 2], [101, 0]]
  assert numbers(in_order(cache)) == [[1, 2, 3], [0, 0, 101]]
  cache = aa.extend_window(cache, entries(2))
  assert numbers(cache.recent) == [[1, 2, 3], [101, 101, 102]]
  assert numbers(cache.first) == [[1, 2], [101, 101]]
  assert numbers(in_order(cache)) == [[3, 1, 2], [101, 101, 102]]
  assert cache.count.tolist() == [5, 3]
  restart = jnp.zeros((BATCH, 3), bool).at[0, 2].set(True)
  cache = aa.extend_window(cache, entries(3), restart=restart)
  assert numbers(cache.recent) == [[3, 0, 0], [101, 102, 103]]
  assert numbers(cache.first) == [[3, 0], [101, 101]]
  assert cache.count.tolist() == [1, 6]


def test_a_token_goes_into_one_slot_of_rows_that_have_one():
  case = FULL._replace(window=3, global_tokens=2)
  lengths = jnp.array([3, 1], jnp.int32)
  cache = aa.extend_window(empty(case), entries(4), lengths=lengths)
  token = jax.tree.map(lambda x: x[:, 8:], entries(9))
  cache = aa.append(cache, token)
  assert numbers(cache.recent) == [[9, 2, 3], [101, 109, 0]]
  assert numbers(cache.first) == [[1, 2], [101, 109]]
  assert cache.count.tolist() == [4, 2]
  again = aa.append(cache, token, lengths=jnp.array([0, 1], jnp.int32))
  assert numbers(again.recent) == [[9, 2, 3], [101, 109, 109]]
  assert numbers(again.first) == numbers(cache.first)
  assert again.count.tolist() == [4, 3]


def test_room_can_be_made_and_taken_also_in_stacks():
  cache = aa.extend(None, entries(3), lengths=jnp.array([1, 3], jnp.int32))
  stack = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
  larger = aa.resize(stack, 5)
  assert aa.room(larger) == 5
  assert aa.room(aa.resize(larger, 3)) == 3
  back = aa.resize(larger, 3)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, back, stack))
  with pytest.raises(UserError, match="capacity of -1 tokens: use 0 or more"):
    aa.resize(cache, -1)


def test_rows_that_held_more_than_there_is_room_for_are_nan_for_ever():
  given = inputs(FULL)
  _, cache = fast(FULL, given, lengths=jnp.array([5, 23], jnp.int32))
  cache = aa.resize(aa.resize(cache, 10), 30)
  y, after = fast(FULL, given, cache)
  assert jnp.all(jnp.isfinite(y[0]))
  assert jnp.all(jnp.isnan(y[1]))
  y, after = step(given.part(0, 1), after)
  assert jnp.isfinite(y[0]).all()
  assert jnp.isnan(y[1]).all()
  # A new document is sound again.
  restart = jnp.zeros((BATCH, 23), bool).at[1, 4].set(True)
  y, after = fast(FULL, given, after, restart)
  assert jnp.all(jnp.isnan(y[1, :4]))
  assert jnp.all(jnp.isfinite(y[1, 4:]))
  assert after.count.tolist() == [5 + 23 + 1 + 23, 19]


def test_a_step_into_a_full_row_is_nan_and_outside_jit_an_error():
  given = inputs(FULL)
  _, cache = fast(FULL, given, lengths=jnp.array([22, 23], jnp.int32))
  with pytest.raises(UserError, match=r"row 1 .* room for 23 .* `resize`"):
    aa.check_room(cache, None)
  aa.check_room(cache, jnp.array([True, False]))
  y, cache = step(given.part(0, 1), cache)
  assert jnp.isfinite(y[0]).all()
  assert jnp.isnan(y[1]).all()
  y, cache = step(given.part(0, 1), aa.resize(cache, 40))
  assert jnp.isfinite(y[0]).all()
  assert jnp.isnan(y[1]).all()
