"""Losses by context."""

import math

import numpy as np
import pytest

from atlas_jax.evaluation.positions import ByPosition, edges


@pytest.mark.parametrize(
  ("longest", "expected"),
  [(1, [1, 2]), (2, [1, 2, 4]), (3, [1, 2, 4]), (4, [1, 2, 4, 8])],
)
def test_edges_are_powers_of_two(longest, expected):
  assert edges(longest).tolist() == expected


def test_sums_are_those_of_a_loop():
  random = np.random.default_rng(0)
  lengths = [1, 9, 30]
  table = ByPosition(3, 30)
  nats = [random.random(length) for length in lengths]
  sizes = [random.integers(0, 4, length) for length in lengths]
  for document, length in enumerate(lengths):
    for start in range(0, length, 7):
      part = slice(start, start + 7)
      table.add(document, start, nats[document][part], sizes[document][part])
  found = table.buckets(np.array([True, False, True]))
  assert [(b.first, b.last) for b in found] == [
    (1, 1),
    (2, 3),
    (4, 7),
    (8, 15),
    (16, 31),
  ]
  for bucket in found:
    inside = [
      (nats[d][context - 1], sizes[d][context - 1])
      for d in (0, 2)
      for context in range(1, lengths[d] + 1)
      if bucket.first <= context <= bucket.last
    ]
    total = sum(x for x, _ in inside)
    count = sum(int(x) for _, x in inside)
    assert bucket.tokens == len(inside)
    assert bucket.documents == (2 if bucket.first == 1 else 1)
    assert bucket.loss == pytest.approx(total / len(inside))
    assert bucket.bits_per_byte == pytest.approx(total / count / math.log(2))


def test_the_error_is_that_of_means_over_documents():
  # With equally many tokens a ratio of sums is a mean of means.
  random = np.random.default_rng(1)
  nats = random.random((6, 2)) + random.random((6, 1))
  table = ByPosition(6, 3)
  for document in range(6):
    table.add(document, 1, nats[document], np.ones(2, int))
  (bucket,) = table.buckets(np.ones(6, bool))
  means = nats.mean(axis=1)
  assert bucket.loss == pytest.approx(means.mean())
  assert bucket.error == pytest.approx(means.std(ddof=1) / math.sqrt(6))


def test_what_cannot_be_known_is_none():
  table = ByPosition(2, 1)
  table.add(0, 0, np.array([2.0]), np.array([0]))
  (bucket,) = table.buckets(np.array([True, True]))
  assert bucket.error is None
  assert bucket.bits_per_byte is None
  assert table.buckets(np.array([False, True])) == []
