"""An interpolated byte trigram: the simple baseline that a model must beat.

The probability of byte c after the bytes ab mixes the counts of three orders:

  p(c | ab) = (n(abc) + k3 u(ab) p(c | b)) / (n(ab) + k3 u(ab))
  p(c | b)  = (n(bc)  + k2 u(b)  p(c))     / (n(b)  + k2 u(b))
  p(c)      = (n(c)   + k1 u     / 256)    / (n     + k1 u)

n counts occurrences with a following byte, u the different following bytes. For
k = 1 this is Witten and Bell's estimate (IEEE Trans. Inf. Theory 37:1085, 1991,
method C; interpolated as in Chen and Goodman, TR-10-98). The three k are chosen
on a tenth of the training text that is first kept out of the counts; then all
of the training text is counted. The text that is scored decides nothing.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

from atlas_jax.errors import UserError

_BYTES = 256
_ORDERS = (1, 2, 3)
# Positions counted at once, which bounds the memory for temporary arrays.
_BLOCK = 1 << 22
_STRENGTHS = (
  0.02,
  0.05,
  0.1,
  0.2,
  0.35,
  0.5,
  0.7,
  1.0,
  1.4,
  2.0,
  4.0,
  8.0,
  16.0,
)
_TENTH = 10

# A stretch of text whose first bytes, given in number, are only context.
_Stretch = tuple[UInt8[np.ndarray, "N"], int]


class Trigram:
  """A fitted trigram.

  Attributes:
    strengths: k1, k2, k3.
  """

  def __init__(self, runs: Sequence[bytes]):
    """Fits to text.

    Args:
      runs: Stretches of text; the first byte of a run follows nothing. Takes
        about a second for 10 MB, and 0.5 GB of memory.

    Raises:
      UserError: There is no text.
    """
    if not any(map(len, runs)):
      raise UserError("there is no text to fit a trigram to")
    most, tenth = _divide(runs)
    counts, kept_out = _Counts(most), _Counts(tenth)
    self.strengths = _choose(counts, kept_out)
    counts.add(kept_out)
    self._counts = counts

  def bits_per_byte(self, runs: Iterable[bytes]) -> float:
    """Scores text.

    Args:
      runs: Stretches of text. The first byte of each is only context, as it is
        for a model that predicts the next byte; all others are scored.

    Returns:
      Mean of -log2 p over the scored bytes.

    Raises:
      UserError: There is no byte to score.
    """
    scored = _Counts((_bytes(run), 0) for run in runs)
    pairs, triples = scored.of[2], scored.of[3]
    if not pairs.sum():
      raise UserError("there is no text to score a trigram on")
    # Pairs are all bytes but first ones. Those with another byte before them
    # are triples; the rest are second bytes of a run.
    second = pairs - triples.reshape(_BYTES, -1).sum(axis=0)
    bits = self._counts.bits(*_sparse(triples), 3, self.strengths)
    bits += self._counts.bits(*_sparse(second), 2, self.strengths)
    return float(bits / pairs.sum())


class _Counts:
  """Counts of single bytes, pairs and triples, never across two runs.

  `of[order]` is flat, indexed by the bytes as one number, oldest first.
  """

  def __init__(self, stretches: Iterable[_Stretch]):
    self.of = {order: np.zeros(_BYTES**order, np.int64) for order in _ORDERS}
    for block in _blocks(stretches):
      self._count(block)
    self._update()

  def add(self, other: "_Counts") -> None:
    """Adds other counts to these."""
    for order in _ORDERS:
      self.of[order] += other.of[order]
    self._update()

  def bits(
    self,
    codes: Int[np.ndarray, "N"],
    times: Int[np.ndarray, "N"],
    order: int,
    strengths: Sequence[float],
  ) -> float:
    """Sum of -log2 p over stretches of `order` bytes and their numbers."""
    chance = self._probability(codes, order, strengths)
    return float(-(times * np.log2(chance)).sum())

  def _probability(
    self, codes: Int[np.ndarray, "N"], order: int, strengths: Sequence[float]
  ) -> Float[np.ndarray, "N"]:
    if order == 0:
      return np.full(len(codes), 1.0 / _BYTES)
    shorter = codes % _BYTES ** (order - 1)
    lower = self._probability(shorter, order - 1, strengths)
    context = codes // _BYTES
    mass = strengths[order - 1] * self._different[order][context]
    total = self._total[order][context] + mass
    # A context that never occurred says nothing; the shorter one decides.
    seen = total > 0
    upper = self.of[order][codes] + mass * lower
    return np.where(seen, upper / np.where(seen, total, 1.0), lower)

  def _update(self) -> None:
    tables = {order: self.of[order].reshape(-1, _BYTES) for order in _ORDERS}
    self._total = {o: table.sum(axis=1) for o, table in tables.items()}
    self._different = {
      o: np.count_nonzero(table, axis=1) for o, table in tables.items()
    }

  def _count(self, block: list[_Stretch]) -> None:
    data = np.concatenate([part for part, _ in block]).astype(np.int64)
    lengths = np.array([len(part) for part, _ in block])
    contexts = np.array([context for _, context in block])
    # Place of every byte inside its own stretch, and the first one to count.
    place = np.arange(len(data)) - np.repeat(
      np.cumsum(lengths) - lengths, lengths
    )
    first = np.repeat(contexts, lengths)
    codes = np.zeros_like(data)
    for order in _ORDERS:
      codes[order - 1 :] += data[: len(data) - order + 1] * _BYTES ** (
        order - 1
      )
      counted = codes[place >= np.maximum(first, order - 1)]
      np.add.at(self.of[order], counted, 1)


def _bytes(run: bytes) -> UInt8[np.ndarray, "N"]:
  return np.frombuffer(run, np.uint8)


def _blocks(stretches: Iterable[_Stretch]) -> Iterator[list[_Stretch]]:
  """Groups stretches into blocks of bounded size; long ones are cut."""
  block: list[_Stretch] = []
  size = 0
  for data, context in stretches:
    for begin in range(0, len(data), _BLOCK):
      # Two bytes of overlap are the context of a cut.
      head = max(begin - 2, 0)
      part = data[head : begin + _BLOCK]
      block.append((part, context if begin == 0 else begin - head))
      size += len(part)
      if size >= _BLOCK:
        yield block
        block, size = [], 0
  if block:
    yield block


def _divide(runs: Sequence[bytes]) -> tuple[list[_Stretch], list[_Stretch]]:
  """Nine tenths and one tenth: every tenth run, or the end of each of a few."""
  stretches = [(_bytes(run), 0) for run in runs]
  if len(stretches) >= _TENTH:
    tenth = stretches[_TENTH - 1 :: _TENTH]
    most = [s for i, s in enumerate(stretches) if i % _TENTH != _TENTH - 1]
    return most, tenth
  most, tenth = [], []
  for data, _ in stretches:
    cut = len(data) - len(data) // _TENTH
    head = max(cut - 2, 0)
    most.append((data[:cut], 0))
    tenth.append((data[head:], cut - head))
  return most, tenth


def _sparse(
  counts: Int[np.ndarray, "codes"],
) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"]]:
  """The codes that occur, and how often."""
  codes = np.flatnonzero(counts)
  return codes, counts[codes]


def _choose(counts: _Counts, kept_out: _Counts) -> tuple[float, ...]:
  """The k of each order, from the lowest up, that scores kept-out text best."""
  chosen: tuple[float, ...] = ()
  for order in _ORDERS:
    codes, times = _sparse(kept_out.of[order])
    bits = [
      counts.bits(codes, times, order, (*chosen, strength))
      for strength in _STRENGTHS
    ]
    chosen = (*chosen, _STRENGTHS[int(np.argmin(bits))])
  return chosen
