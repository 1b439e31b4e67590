"""Batches of windows: a function of seed, step and host.

The pipeline is one random-access `grain.MapDataset`. Batch `s` of host `i` of
`n` is computed from `(seed, s, i, n)` alone, so the state of an iterator is one
integer, equal on every host, and a run may be continued on another number of
hosts: the batches of all hosts at a step are together the batch of one host.
"""

from collections.abc import Iterator

import grain
import numpy as np
from jaxtyping import Int

from atlas_jax.data import records, windows
from atlas_jax.data.records import Batch
from atlas_jax.data.windows import Split
from atlas_jax.errors import UserError

# Held-out windows are drawn in one order for every run, so that the first few
# of them are a fair sample.
_VALID_SEED = 0


def train_dataset(
  split: Split,
  *,
  batch: int,
  seed: int,
  shuffle: bool = True,
  host_index: int = 0,
  host_count: int = 1,
) -> grain.MapDataset:
  """The endless training data: element `s` is this host's batch of step `s`.

  Args:
    split: The training windows.
    batch: Windows in the batch of all hosts together, B.
    seed: Decides the order; 0 to 2**32 - 1.
    shuffle: Whether to draw a new order for every epoch.
    host_index: Which host this is.
    host_count: How many hosts there are, n.

  Returns:
    A dataset of dicts of arrays [B / n, T]: `tokens`, `targets` and
    `segment_ids` int32, `weights` float32 (see `records.lay_out`).

  Raises:
    UserError: There are no training windows, the batch does not divide by the
      number of hosts, or the seed is out of range.
  """
  rows = _rows_per_host(batch, host_index, host_count)
  order = _order(split, seed, shuffle)
  mine = order.slice(slice(host_index, None, host_count))
  return mine.map(_Reader(split)).batch(rows, drop_remainder=True)


def iterate(
  dataset: grain.MapDataset, *, read_threads: int = 2
) -> grain.DatasetIterator:
  """Iterates over a dataset, reading a few batches ahead in threads.

  The iterator has `get_state`, `set_state` and `close`, and Orbax saves it as
  it is. Close it when done.
  """
  options = grain.ReadOptions(
    num_threads=read_threads, prefetch_buffer_size=2 * read_threads
  )
  return iter(dataset.to_iter_dataset(options))


def valid_batches(
  split: Split,
  *,
  batch: int,
  limit: int = 0,
  host_index: int = 0,
  host_count: int = 1,
) -> Iterator[Batch]:
  """The held-out windows in a fixed order, as whole batches.

  Args:
    split: The held-out windows.
    batch: Windows in the batch of all hosts together, B.
    limit: Read this many windows; 0 reads all.
    host_index: Which host this is.
    host_count: How many hosts there are, n.

  Yields:
    Batches as in `train_dataset`, equally many on every host. The last one is
    filled up with windows of padding (weights 0).

  Raises:
    UserError: The batch does not divide by the number of hosts.
  """
  rows = _rows_per_host(batch, host_index, host_count)
  read = _Reader(split)
  indices = valid_indices(split, limit)
  for begin in range(0, len(indices), batch):
    mine = indices[begin : begin + batch][host_index::host_count]
    examples = [read(index) for index in mine.tolist()]
    examples += [records.empty(split.window)] * (rows - len(examples))
    yield {
      name: np.stack([example[name] for example in examples])
      for name in examples[0]
    }


def train_indices(
  split: Split, *, batch: int, steps: int, seed: int, shuffle: bool = True
) -> Int[np.ndarray, "N"]:
  """The distinct windows that `steps` steps of training read, ascending."""
  order = _order(split, seed, shuffle)
  # One epoch reads every window once, so no more need be asked for.
  reads = min(batch * steps, split.windows)
  return np.unique(np.array([order[i] for i in range(reads)], np.int64))


def valid_indices(split: Split, limit: int = 0) -> Int[np.ndarray, "N"]:
  """The windows that `valid_batches` reads, in its order."""
  if not split.windows:
    return np.zeros(0, np.int64)
  order = grain.MapDataset.range(split.windows).seed(_VALID_SEED).shuffle()
  count = min(limit or split.windows, split.windows)
  return np.array([order[i] for i in range(count)], np.int64)


def _rows_per_host(batch: int, host_index: int, host_count: int) -> int:
  if batch < 1 or batch % host_count:
    raise UserError(
      f"a batch of {batch} does not divide among {host_count} hosts; "
      f"use a multiple of {host_count}"
    )
  if not 0 <= host_index < host_count:
    raise ValueError(f"host {host_index} of {host_count} does not exist")
  return batch // host_count


def _order(split: Split, seed: int, shuffle: bool) -> grain.MapDataset:
  """Window indices without end, each epoch a permutation of all of them."""
  if not split.windows:
    raise UserError(
      f"there is no {split.name} text; check data.path and data.valid_fraction"
    )
  if not 0 <= seed < 2**32:
    raise UserError(f"the seed is {seed}; give 0 to {2**32 - 1}")
  order = grain.MapDataset.range(split.windows)
  if shuffle:
    order = order.seed(seed).shuffle()
  return order.repeat()


class _Reader:
  """Reads the window of an index as an example."""

  def __init__(self, split: Split):
    self._window = split.window
    self._path = split.path
    self._source = grain.sources.ArrayRecordDataSource(str(split.path))

  def __call__(self, index: int) -> Batch:
    with windows.reading(self._path):
      return records.lay_out(self._source[index], self._window)
