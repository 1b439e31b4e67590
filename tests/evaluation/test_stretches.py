"""Stretches of documents in the rows of a batch."""

import collections

import numpy as np
import pytest

from atlas_jax.evaluation.stretches import Stretch, schedule, stretches

LENGTHS = np.array([5, 16, 63, 0, 38, 1])
ORDER = [4, 0, 5, 2, 3, 1]


def test_a_document_is_one_stretch():
  found = stretches(LENGTHS, ORDER)
  assert found == [
    Stretch(4, 0, 38),
    Stretch(0, 0, 5),
    Stretch(5, 0, 1),
    Stretch(2, 0, 63),
    Stretch(1, 0, 16),
  ]


def test_a_limited_context_cuts_documents():
  found = stretches(LENGTHS, [0, 4], context=16)
  assert found == [
    Stretch(0, 0, 5),
    Stretch(4, 0, 16),
    Stretch(4, 16, 32),
    Stretch(4, 32, 38),
  ]


@pytest.mark.parametrize("limit", [1, 38, 40, 43, 44, 100, 10_000])
def test_a_limit_is_kept_exactly(limit):
  found = stretches(LENGTHS, ORDER, context=7, tokens=limit)
  assert sum(x.stop - x.start for x in found) == min(limit, LENGTHS.sum())
  whole = stretches(LENGTHS, ORDER, context=7)
  assert found[:-1] == whole[: len(found) - 1]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("segment", [1, 4, 16, 100])
def test_every_token_is_read_once_and_in_order(rows, segment):
  items = stretches(LENGTHS, ORDER, context=20)
  steps = schedule(items, rows=rows, segment=segment)
  seen = collections.Counter()
  for row in range(rows):
    lane = [step[row] for step in steps]
    used = [part for part in lane if part is not None]
    # Once a row has nothing left, nothing more comes.
    assert lane[: len(used)] == used
    before = None
    for part in used:
      assert 0 < part.stop - part.start <= segment
      seen.update((part.document, t) for t in range(part.start, part.stop))
      if part.fresh:
        assert part.context == 0
      else:
        assert part.document == before.document
        assert part.start == before.stop
        assert part.context == before.context + before.stop - before.start
      before = part
  assert set(seen.values()) == {1}
  assert len(seen) == LENGTHS.sum()
  # No row waits while another has two stretches or more to go.
  longest = max(-(-(x.stop - x.start) // segment) for x in items)
  work = sum(-(-(x.stop - x.start) // segment) for x in items)
  assert len(steps) <= work / rows + longest
