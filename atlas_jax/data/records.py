"""One window as bytes: which pieces of documents it holds, and their tokens.

A record is, in little-endian order, a header of two int64 (number of pieces,
bytes of a token), four int64 a piece (document, start, offset, length), and
then `length + 1` tokens a piece: the inputs and the token after the last of
them. Padding is not stored.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

Batch = dict[str, np.ndarray]

_INT = np.dtype("<i8")
_HEADER = 2 * _INT.itemsize
_COLUMNS = 4


@dataclasses.dataclass(frozen=True)
class Piece:
  """A stretch of one document inside a window.

  Attributes:
    document: Index of the document among those of the same split.
    start: Index in the document of the first input token.
    offset: Place of that token in the window.
    tokens: The input tokens, and the one after the last of them.
  """

  document: int
  start: int
  offset: int
  tokens: Int[np.ndarray, "length+1"]


def token_dtype(vocab_size: int) -> np.dtype:
  """The smallest type that tokens are stored in."""
  return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def pack(pieces: list[Piece]) -> bytes:
  """Writes the pieces of one window, which share one dtype, as a record."""
  tokens = np.concatenate([piece.tokens for piece in pieces])
  rows = [
    (piece.document, piece.start, piece.offset, len(piece.tokens) - 1)
    for piece in pieces
  ]
  header = np.array([len(pieces), tokens.dtype.itemsize], _INT)
  return header.tobytes() + np.array(rows, _INT).tobytes() + tokens.tobytes()


def unpack(record: bytes) -> list[Piece]:
  """Reads the pieces of one window, in the order of their offsets."""
  count, itemsize = np.frombuffer(record, _INT, 2).tolist()
  rows = np.frombuffer(record, _INT, count * _COLUMNS, _HEADER)
  begin = _HEADER + rows.nbytes
  tokens = np.frombuffer(record, np.dtype(f"<u{itemsize}"), offset=begin)
  pieces = []
  used = 0
  for document, start, offset, length in rows.reshape(-1, _COLUMNS).tolist():
    part = tokens[used : used + length + 1]
    pieces.append(Piece(document, start, offset, part))
    used += length + 1
  return pieces


def lay_out(record: bytes, window: int) -> Batch:
  """Lays one record out as a training example.

  Args:
    record: From `pack`.
    window: Tokens in the example, T.

  Returns:
    `tokens`, `targets` (the next token of the same document), `segment_ids`
    (counted from 1, 0 at padding), all int32 [T], and `weights` float32 [T] (1
    where there is a target, 0 at padding).
  """
  example = empty(window)
  for number, piece in enumerate(unpack(record), start=1):
    place = slice(piece.offset, piece.offset + len(piece.tokens) - 1)
    example["tokens"][place] = piece.tokens[:-1]
    example["targets"][place] = piece.tokens[1:]
    example["segment_ids"][place] = number
    example["weights"][place] = 1.0
  return example


def empty(window: int) -> Batch:
  """An example of nothing but padding, with the fields of `lay_out`."""
  return {
    "tokens": np.zeros(window, np.int32),
    "targets": np.zeros(window, np.int32),
    "segment_ids": np.zeros(window, np.int32),
    "weights": np.zeros(window, np.float32),
  }
