"""Whole documents from packed windows.

Training reads windows in which pieces of documents are packed. Here they are
put together again, so that the held-out documents are exactly those of
training, from the same cache on disk.
"""

import functools
import hashlib
import json
import pathlib

import grain
import numpy as np
from jaxtyping import Int

from atlas_jax.data import records
from atlas_jax.data.windows import Split, Windows
from atlas_jax.errors import UserError

_MANY = 64  # Records kept in memory.


class Documents:
  """The documents of a split, read from disk in stretches.

  Attributes:
    ids: Identities, such as file names.
    lengths: Input tokens of each, which is also the number of its targets.

  Raises:
    UserError: The split is empty.
  """

  def __init__(self, windows: Windows, split: Split):
    if not split.windows:
      raise UserError(
        "no text was held out from training: give one by --data.path"
      )
    path = windows.folder / "documents.jsonl"
    rows = _rows(path, split.name)
    self.ids = [row["id"] for row in rows]
    self.lengths = np.array([row["tokens"] for row in rows], np.int64)
    self._window = split.window
    self._source = grain.sources.ArrayRecordDataSource(str(split.path))
    self._unpacked = functools.lru_cache(_MANY)(
      lambda record: records.unpack(self._source[record])
    )
    # Where piece k of document d lies: in row `first[d] + k`.
    places = sorted(
      (piece.document, piece.start, record, number)
      for record in range(split.windows)
      for number, piece in enumerate(records.unpack(self._source[record]))
    )
    self._places = np.array(places, np.int64).reshape(-1, 4)
    self._first = np.searchsorted(self._places[:, 0], np.arange(len(self.ids)))

  def __len__(self) -> int:
    return len(self.ids)

  def read(
    self, document: int, start: int, stop: int
  ) -> Int[np.ndarray, "stop-start+1"]:
    """The input tokens from `start` to before `stop`, and the one after them.

    Args:
      document: Its index.
      start: Of the first token.
      stop: At most the document's length.
    """
    parts = []
    for number in range(start // self._window, -(-stop // self._window)):
      _, begin, record, place = self._places[self._first[document] + number]
      tokens = self._unpacked(int(record))[place].tokens
      inside = slice(max(start - begin, 0), stop - begin + 1)
      parts.append(tokens[inside])
    # The token after a piece is also the first of the next one.
    parts[:-1] = [part[:-1] for part in parts[:-1]]
    return np.concatenate(parts).astype(np.int32)

  def order(self) -> Int[np.ndarray, "D"]:
    """The documents in an order that depends on their identities alone.

    The first few in it are a fair sample, whatever their names.
    """
    digests = [hashlib.sha256(id_.encode()).digest() for id_ in self.ids]
    return np.array(sorted(range(len(self)), key=digests.__getitem__), np.int64)


def _rows(path: pathlib.Path, split: str) -> list[dict]:
  with path.open(encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
  return [row for row in rows if row["split"] == split]
