"""Batches by seed, step and host; exact resumption; held-out batches."""

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from atlas_jax.data import (
  DataConfig,
  iterate,
  prepare,
  train_dataset,
  train_indices,
  valid_batches,
  valid_indices,
  window_bytes,
)
from atlas_jax.errors import UserError

T = 32


@pytest.fixture
def windows(text_folder, tokenizer, tmp_path):
  config = DataConfig(path=str(text_folder), window=T, valid_fraction=0.3)
  return prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")


def rows(batch) -> list[bytes]:
  """One value per row that tells windows apart."""
  return [row.tobytes() for row in batch["tokens"]]


def test_batch_has_the_agreed_fields(windows):
  batch = train_dataset(windows.train, batch=4, seed=0)[0]
  described = {name: (v.shape, str(v.dtype)) for name, v in batch.items()}
  assert described == {
    "tokens": ((4, T), "int32"),
    "targets": ((4, T), "int32"),
    "segment_ids": ((4, T), "int32"),
    "weights": ((4, T), "float32"),
  }


def test_batch_is_a_function_of_seed_and_step(windows):
  one = train_dataset(windows.train, batch=4, seed=5)
  two = train_dataset(windows.train, batch=4, seed=5)
  other = train_dataset(windows.train, batch=4, seed=6)
  for step in (7, 0, 100, 7):
    assert rows(one[step]) == rows(two[step])
  assert [rows(one[s]) for s in range(3)] != [rows(other[s]) for s in range(3)]


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_share_the_batch(windows, hosts):
  whole = train_dataset(windows.train, batch=8, seed=1)
  parts = [
    train_dataset(
      windows.train, batch=8, seed=1, host_index=i, host_count=hosts
    )
    for i in range(hosts)
  ]
  for step in (0, 1, 50):
    together = [row for part in parts for row in rows(part[step])]
    assert all(len(rows(part[step])) == 8 // hosts for part in parts)
    assert sorted(together) == sorted(rows(whole[step]))


def test_every_epoch_is_another_permutation(windows):
  n = windows.train.windows
  dataset = train_dataset(windows.train, batch=1, seed=2)
  epochs = [[rows(dataset[e * n + i])[0] for i in range(n)] for e in range(3)]
  in_order = train_dataset(windows.train, batch=1, seed=2, shuffle=False)
  expected = [rows(in_order[i])[0] for i in range(n)]
  for epoch in epochs:
    assert sorted(epoch) == sorted(expected)
  assert len({tuple(epoch) for epoch in [*epochs, expected]}) == 4
  assert [rows(in_order[n + i])[0] for i in range(n)] == expected


def test_iterator_resumes_exactly(windows):
  dataset = train_dataset(windows.train, batch=4, seed=3)
  iterator = iterate(dataset)
  for _ in range(5):
    next(iterator)
  state = iterator.get_state()
  assert state == {"next_index": 5}
  expected = [rows(next(iterator)) for _ in range(30)]
  iterator.set_state(state)
  assert [rows(next(iterator)) for _ in range(30)] == expected
  iterator.close()
  assert expected == [rows(dataset[5 + i]) for i in range(30)]


def test_state_moves_to_another_number_of_hosts(windows):
  first = iterate(train_dataset(windows.train, batch=4, seed=3))
  for _ in range(6):
    next(first)
  state = first.get_state()
  expected = rows(next(first))
  first.close()
  together = []
  for host in range(2):
    iterator = iterate(
      train_dataset(
        windows.train, batch=4, seed=3, host_index=host, host_count=2
      )
    )
    iterator.set_state(state)
    together += rows(next(iterator))
    iterator.close()
  assert sorted(together) == sorted(expected)


def test_orbax_keeps_the_iterator(windows, tmp_path):
  dataset = train_dataset(windows.train, batch=4, seed=3)
  iterator = iterate(dataset)
  for _ in range(3):
    next(iterator)
  with ocp.training.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    checkpointer.save_checkpointables(3, {"data": iterator})
    expected = rows(next(iterator))
    fresh = iterate(dataset)
    checkpointer.load_checkpointables(3, {"data": fresh})
    assert rows(next(fresh)) == expected
  iterator.close()
  fresh.close()


@pytest.mark.parametrize("limit", [0, 1, 5, 10**6])
@pytest.mark.parametrize("hosts", [1, 2])
def test_held_out_batches_are_fixed_and_whole(windows, limit, hosts):
  split = windows.valid
  count = min(limit or split.windows, split.windows)
  assert split.windows % 4 != 0, "the last batch should need filling"
  per_host = [
    list(
      valid_batches(split, batch=4, limit=limit, host_index=i, host_count=hosts)
    )
    for i in range(hosts)
  ]
  read = 0.0
  for batches in per_host:
    assert len(batches) == -(-count // 4)
    for batch in batches:
      assert batch["tokens"].shape == (4 // hosts, T)
      assert batch["weights"].dtype == np.float32
      read += batch["weights"].sum()
  if count == split.windows:
    assert read == split.tokens
  again = list(valid_batches(split, batch=4, limit=limit, host_count=hosts))
  assert [rows(b) for b in again] == [rows(b) for b in per_host[0]]
  assert len(set(valid_indices(split, limit).tolist())) == count


def test_bytes_read_are_those_of_the_windows(windows, tokenizer):
  dataset = train_dataset(windows.train, batch=4, seed=9)
  steps = windows.train.windows // 8
  seen = set()
  for step in range(steps):
    seen.update(rows(dataset[step]))
  indices = train_indices(windows.train, batch=4, steps=steps, seed=9)
  assert len(indices) == len(seen) == 4 * steps
  in_order = train_dataset(windows.train, batch=1, seed=0, shuffle=False)
  assert {rows(in_order[int(i)])[0] for i in indices} == seen
  runs = window_bytes(windows.train, tokenizer, indices)
  # A run is the inputs of its windows and one target that is no input, but for
  # the end of a document, which is no byte.
  whole = window_bytes(windows.train, tokenizer, range(windows.train.windows))
  assert all(any(run in text for text in whole) for run in runs)
  scored = sum(len(run) - 1 for run in runs)
  weights = targets = 0
  for index in indices.tolist():
    example = in_order[index]
    weights += int(example["weights"].sum())
    targets += int((example["targets"] == tokenizer.end_of_text).sum())
  assert scored == weights - targets


def test_whole_documents_are_joined(windows, tokenizer):
  runs = window_bytes(windows.train, tokenizer, range(windows.train.windows))
  assert len(runs) == windows.train.documents
  doubled = [*range(windows.train.windows)] * 2
  assert window_bytes(windows.train, tokenizer, doubled) == runs


def test_more_steps_than_windows_read_everything(windows):
  indices = train_indices(windows.train, batch=8, steps=10**6, seed=0)
  assert indices.tolist() == list(range(windows.train.windows))


@pytest.mark.parametrize("batch", [0, 3])
def test_batch_that_does_not_divide(windows, batch):
  with pytest.raises(UserError, match="does not divide among 2 hosts"):
    train_dataset(windows.train, batch=batch, seed=0, host_count=2)
  with pytest.raises(UserError, match="does not divide among 2 hosts"):
    list(valid_batches(windows.valid, batch=batch, host_count=2))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(windows, seed):
  with pytest.raises(UserError, match="the seed is"):
    train_dataset(windows.train, batch=1, seed=seed)


def test_no_training_text(text_folder, tokenizer, tmp_path):
  config = DataConfig(path=str(text_folder), window=T, valid_fraction=1.0)
  windows = prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  with pytest.raises(UserError, match="there is no train text"):
    train_dataset(windows.train, batch=1, seed=0)
  assert list(valid_batches(windows.train, batch=1)) == []
