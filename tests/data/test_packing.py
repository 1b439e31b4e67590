"""Invariants of packing over random documents, and records of windows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_jax.data import packing, records
from atlas_jax.errors import UserError

CASES = st.tuples(
  st.sampled_from([(8, 1), (8, 4), (12, 4), (16, 16), (32, 8)]),
  st.lists(st.integers(0, 70), min_size=1, max_size=60),
)


@settings(max_examples=150, deadline=None)
@given(CASES)
def test_examples_hold_every_token_once(case):
  (window, chunk), lengths = case
  # Every token is different; 10^6 marks the end of a document.
  documents = [
    np.append(np.arange(n) + 100 * d + 1, 10**6).astype("<u4")
    for d, n in enumerate(lengths)
  ]
  plan = packing.plan(np.array(lengths), window, chunk)
  assert plan.tokens == sum(lengths)
  inputs, targets = [], []
  for number in range(plan.windows):
    pieces = [
      records.Piece(
        int(plan.document[p]),
        int(plan.start[p]),
        int(plan.offset[p]),
        documents[plan.document[p]][
          plan.start[p] : plan.start[p] + plan.length[p] + 1
        ],
      )
      for p in np.flatnonzero(plan.window == number)
    ]
    example = records.lay_out(records.pack(pieces), window)
    segments = example["segment_ids"]
    real = segments > 0
    np.testing.assert_array_equal(example["weights"], real)
    assert real[0]
    # Segments are 1, 2, ... from left to right, begin at multiples of the
    # chunk, and each is one uninterrupted stretch of one document.
    begins = np.flatnonzero((np.diff(segments, prepend=0) != 0) & real)
    assert segments[begins].tolist() == list(range(1, len(pieces) + 1))
    assert not (begins % chunk).any()
    same = (segments[1:] == segments[:-1]) & real[1:]
    assert (np.diff(example["tokens"])[same] == 1).all()
    np.testing.assert_array_equal(
      example["targets"][:-1][same], example["tokens"][1:][same]
    )
    inputs += example["tokens"][real].tolist()
    targets += example["targets"][real].tolist()
    assert not example["tokens"][~real].any()
    assert not example["targets"][~real].any()
  expected = [
    (int(a), int(b))
    for document in documents
    for a, b in itertools.pairwise(document)
  ]
  assert sorted(zip(inputs, targets, strict=True)) == sorted(expected)


@settings(max_examples=50, deadline=None)
@given(CASES)
def test_packing_is_tight_and_repeatable(case):
  (window, chunk), lengths = case
  plan = packing.plan(np.array(lengths), window, chunk)
  again = packing.plan(np.array(lengths), window, chunk)
  np.testing.assert_array_equal(plan.window, again.window)
  np.testing.assert_array_equal(plan.offset, again.offset)
  rounded = sum(-(-n // chunk) * chunk for n in lengths)
  # Best fit decreasing needs at most 11/9 of the fewest bins, and 4 more.
  assert plan.windows <= 11 / 9 * -(-rounded // window) + 4
  # All windows but the last few are more than half full.
  used = np.zeros(plan.windows, int)
  np.add.at(used, plan.window, -(-plan.length // chunk) * chunk)
  assert (used <= window).all()
  assert (used * 2 <= window).sum() <= 1


def test_padding_is_little_more_than_the_chunk_costs():
  lengths = np.random.default_rng(0).integers(1, 1500, 2000)
  plan = packing.plan(lengths, 1024, 64)
  rounded = (-(-lengths // 64) * 64).sum()
  assert plan.windows * 1024 <= rounded * 1.01


@pytest.mark.parametrize(
  ("window", "chunk", "message"),
  [
    (100, 64, "use 64 or 128, or"),
    (32, 64, "use 64, or"),
    (64, 0, "chunk is 0"),
  ],
)
def test_window_must_be_whole_chunks(window, chunk, message):
  with pytest.raises(UserError, match=message):
    packing.plan(np.array([5]), window, chunk)


def test_no_documents_no_windows():
  plan = packing.plan(np.array([], np.int64), 8, 4)
  assert plan.windows == plan.tokens == 0


@pytest.mark.parametrize("vocab", [257, 65_536, 65_537])
def test_record_round_trip(vocab):
  dtype = records.token_dtype(vocab)
  assert np.iinfo(dtype).max >= vocab - 1
  pieces = [
    records.Piece(7, 2**40, 0, np.array([1, vocab - 1, 3], dtype)),
    records.Piece(9, 0, 4, np.array([4, 5], dtype)),
  ]
  back = records.unpack(records.pack(pieces))
  for before, after in zip(pieces, back, strict=True):
    assert (before.document, before.start, before.offset) == (
      after.document,
      after.start,
      after.offset,
    )
    np.testing.assert_array_equal(before.tokens, after.tokens)
    assert after.tokens.dtype == dtype
  example = records.lay_out(records.pack(pieces), 6)
  assert example["tokens"].tolist() == [1, vocab - 1, 0, 0, 4, 0]
  assert example["targets"].tolist() == [vocab - 1, 3, 0, 0, 5, 0]
  assert example["segment_ids"].tolist() == [1, 1, 0, 0, 2, 0]
  assert example["weights"].tolist() == [1, 1, 0, 0, 1, 0]
  dtypes = {name: str(values.dtype) for name, values in example.items()}
  assert dtypes == {
    "tokens": "int32",
    "targets": "int32",
    "segment_ids": "int32",
    "weights": "float32",
  }
