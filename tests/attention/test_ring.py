"""The ring of a window: wrapped around, split anywhere, one slot a step."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.cases import BATCH, Case, empty, fast, inputs, slow, step
from tests.layers.helpers import assert_close

LENGTH = 14
CASES = {
  "one": Case(window=1),
  "two": Case(window=2, persistent=1),
  "three": Case(window=3),
  "one_global": Case(window=1, global_tokens=2),
  "few_global": Case(window=3, global_tokens=2, persistent=1),
  "many_global": Case(window=2, global_tokens=5),
}
every_case = pytest.mark.parametrize("name", CASES)

# In the middle of rings, two in a row, and none.
RESTART = jnp.asarray(
  [np.isin(np.arange(LENGTH), (5, 6, 10)), np.zeros(LENGTH, bool)]
)


def assert_same(actual, expected):
  """Caches are equal to the bit."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for x, y in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(x, y)


@every_case
def test_steps_and_calls_in_turn_are_the_definition(name):
  case = CASES[name]
  given = inputs(case, length=LENGTH)
  wanted, state = slow(case, given, empty(case))
  cache, parts, t = empty(case), [], 0
  # Steps, a call that goes on from them, steps again, and so on.
  for size in (1, 1, 4, 1, 1, 1, 4, 1):
    some = given.part(t, t + size)
    y, cache = step(some, cache) if size == 1 else fast(case, some, cache)
    parts.append(y)
    t += size
  assert t == LENGTH
  assert_close(jnp.concatenate(parts, axis=1), wanted, 1e-5)
  assert_same(cache, state)
  assert_same(fast(case, given)[1], state)


@every_case
def test_documents_begin_in_the_middle_of_a_ring(name):
  case = CASES[name]
  given = inputs(case, length=LENGTH)
  # Rows of different counts.
  ends = jnp.array([3, 8], jnp.int32)
  past = fast(case, inputs(case, 1, length=LENGTH), None, None, ends)[1]
  assert past.count.tolist() == [3, 8]
  lengths = jnp.array([LENGTH, LENGTH - 3], jnp.int32)
  y, cache = fast(case, given, past, RESTART, lengths)
  wanted, state = slow(case, given, past, RESTART, lengths)
  there = (jnp.arange(LENGTH)[None] < lengths[:, None])[..., None, None]
  assert_close(jnp.where(there, y, 0), jnp.where(there, wanted, 0), 1e-5)
  assert_same(cache, state)
  # The state is that of the last document alone.
  fresh = fast(case, given.part(10, LENGTH))[1]
  assert_same(*(jax.tree.map(lambda x: x[0], one) for one in (cache, fresh)))
  # And steps go on from there, each row at its own place.
  more = inputs(case, 2, length=LENGTH)
  for t in range(4):
    y, cache = step(more.part(t, t + 1), cache)
    wanted, state = slow(case, more.part(t, t + 1), state)
    assert_close(y, wanted, 1e-5)
    assert_same(cache, state)


@every_case
def test_rows_without_a_token_keep_their_cache(name):
  case = CASES[name]
  given = inputs(case, length=LENGTH)
  cache = fast(case, given)[1]
  one, none = jnp.array([1, 0], jnp.int32), jnp.zeros((BATCH,), jnp.int32)
  after = step(given.part(0, 1), cache, one)[1]
  assert_same(*(jax.tree.map(lambda x: x[1], c) for c in (after, cache)))
  assert after.count.tolist() == [LENGTH + 1, LENGTH]
  assert_same(step(given.part(0, 1), cache, none)[1], cache)
  assert_same(fast(case, given, cache, None, none)[1], cache)
  assert_same(slow(case, given, cache, None, none)[1], cache)


@pytest.mark.parametrize("filled", [2, 7, 12])
def test_a_step_writes_one_slot(filled):
  case = Case(window=5)
  given = inputs(case, length=LENGTH)
  cache = fast(case, given.part(0, filled))[1]
  after = step(given.part(filled, filled + 1), cache)[1]
  for new, old in zip(after.recent[:2], cache.recent[:2], strict=True):
    changed = np.any(np.asarray(new != old), axis=(0, 2, 3))
    assert np.flatnonzero(changed).tolist() == [filled % 5]


def test_a_compiled_step_moves_nothing_of_the_size_of_the_window():
  case = Case(window=64)
  given, cache = inputs(case, length=1), empty(case)
  window = cache.recent.key.size

  def moved(lowered):
    """Operations that bring as many numbers to other places."""
    text = lowered.as_text()
    found = re.findall(
      r"stablehlo\.(concatenate|gather|pad)\W.*tensor<([0-9x]+)x[a-z]", text
    )
    return {
      name
      for name, shape in found
      if math.prod(map(int, shape.split("x"))) >= window
    }

  assert moved(step.lower(given, cache)) == set()
  # A call does.
  assert {"concatenate", "gather"} <= moved(fast.lower(case, given, cache))
