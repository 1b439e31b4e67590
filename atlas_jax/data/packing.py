"""Which piece of which document goes where in which window.

A memory works through a window chunk by chunk and starts afresh at every
document, so a document may begin only at a multiple of the chunk; what is left
of a document's last chunk is padding. A document longer than a window fills
whole windows and goes on in the next one with a fresh memory. What remains of
it, and every short document, is one piece that shares a window with others.

Pieces are placed largest first, each into the fullest window that still has
room (best fit, decreasing), which keeps the padding near what the chunk alone
costs: half a chunk a document.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from atlas_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Plan:
  """Pieces of documents in windows, ordered by window, then by offset.

  Piece p lies in window `window[p]` at `offset[p]` and holds the `length[p]`
  tokens of document `document[p]` from its token `start[p]` on.
  """

  window: Int[np.ndarray, "P"]
  document: Int[np.ndarray, "P"]
  start: Int[np.ndarray, "P"]
  offset: Int[np.ndarray, "P"]
  length: Int[np.ndarray, "P"]

  @property
  def windows(self) -> int:
    """How many windows there are."""
    return int(self.window[-1]) + 1 if len(self.window) else 0

  @property
  def tokens(self) -> int:
    """How many tokens lie in all windows together."""
    return int(self.length.sum())


def check_window(window: int, chunk: int) -> None:
  """Checks that windows can be cut into chunks.

  Raises:
    UserError: `window` is no multiple of `chunk`.
  """
  if chunk < 1:
    raise UserError(f"the memory's chunk is {chunk}; give at least 1")
  if window % chunk:
    near = [size for size in (window // chunk * chunk,) if size]
    near.append((window // chunk + 1) * chunk)
    raise UserError(
      f"data.window={window} is not a multiple of {chunk}, where documents may "
      "begin (a multiple of data.align and of all chunks and segments of the "
      f"model): use {' or '.join(map(str, near))}, or change those"
    )


def plan(lengths: Int[np.ndarray, "D"], window: int, chunk: int) -> Plan:
  """Places documents into windows; the same lengths give the same plan.

  Args:
    lengths: Input tokens of every document.
    window: Tokens in a window.
    chunk: Granularity of the places where a document may begin.

  Returns:
    The plan, in which every token of every document occurs exactly once.

  Raises:
    UserError: `window` is no multiple of `chunk`.
  """
  check_window(window, chunk)
  lengths = np.asarray(lengths, np.int64)
  documents = np.arange(len(lengths))

  whole = lengths // window
  whole_document = np.repeat(documents, whole)
  before = np.cumsum(whole) - whole
  whole_number = np.arange(len(whole_document))
  whole_start = (whole_number - np.repeat(before, whole)) * window

  rest = lengths - whole * window
  short = np.flatnonzero(rest)
  bins, offsets = _best_fit(-(-rest[short] // chunk), window // chunk)

  def join(of_whole, of_short):
    return np.concatenate([of_whole, of_short]).astype(np.int64)

  fields = (
    join(whole_number, bins + len(whole_document)),
    join(whole_document, short),
    join(whole_start, whole[short] * window),
    join(np.zeros_like(whole_number), offsets * chunk),
    join(np.full_like(whole_number, window), rest[short]),
  )
  order = np.lexsort((fields[3], fields[0]))
  return Plan(*(field[order] for field in fields))


def _best_fit(
  sizes: Int[np.ndarray, "P"], capacity: int
) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
  """Best fit decreasing of pieces of 1 to `capacity` units.

  Returns:
    The bin of every piece, and its offset in it, in units.
  """
  bins = np.zeros(len(sizes), np.int64)
  offsets = np.zeros(len(sizes), np.int64)
  # open_bins[room] are the bins with that much room; bit `room` of `rooms` is
  # set where there are any, so that the fullest bin with enough room is found
  # by one shift whatever the capacity.
  open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]
  rooms = 0
  count = 0
  for piece in np.argsort(-sizes, kind="stable").tolist():
    size = int(sizes[piece])
    fitting = rooms >> size
    if fitting:
      room = size + (fitting & -fitting).bit_length() - 1
      place = open_bins[room].pop()
      if not open_bins[room]:
        rooms &= ~(1 << room)
    else:
      room, place = capacity, count
      count += 1
    bins[piece], offsets[piece] = place, capacity - room
    left = room - size
    if left:
      open_bins[left].append(place)
      rooms |= 1 << left
  return bins, offsets
