"""Which part of which document each row of a batch reads at each step.

A stretch is what is read with one memory: a document, or a part of one where
the context is limited. Stretches are laid out in the rows of a batch, one
after the other, and every step reads one segment of each row's stretch.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Stretch(NamedTuple):
  """Tokens `start` to before `stop` of a document, read with one memory."""

  document: int
  start: int
  stop: int


class Segment(NamedTuple):
  """What one row reads in one step: tokens `start` to before `stop`.

  Attributes:
    fresh: Whether a stretch begins, with a fresh memory.
    context: Tokens of the stretch before this segment.
  """

  document: int
  start: int
  stop: int
  fresh: bool
  context: int


def stretches(
  lengths: Int[np.ndarray, "D"],
  order: Sequence[int],
  *,
  context: int = 0,
  tokens: int = 0,
) -> list[Stretch]:
  """Cuts documents into stretches.

  Args:
    lengths: Tokens of each document.
    order: In which documents are taken.
    context: Tokens after which the memory starts afresh; 0: at documents only.
    tokens: How many to take in all; the last document is cut; 0: all.
  """
  out = []
  left = tokens or int(lengths.sum())
  for document in order:
    length = min(int(lengths[document]), left)
    left -= length
    step = context or max(length, 1)
    for start in range(0, length, step):
      stop = min(start + step, length)
      out.append(Stretch(int(document), start, stop))
    if not left:
      break
  return out


def schedule(
  items: Sequence[Stretch], *, rows: int, segment: int
) -> list[list[Segment | None]]:
  """Lays stretches out in rows: the longest first, each where it ends soonest.

  Args:
    items: The stretches.
    rows: Rows of a batch, B.
    segment: Most tokens of a row in one step.

  Returns:
    For each step what each row reads; None where it has nothing left.
  """
  lanes: list[list[Segment]] = [[] for _ in range(rows)]
  ends = [(0, row) for row in range(rows)]
  longest_first = sorted(items, key=lambda item: item.start - item.stop)
  for item in longest_first:
    steps, row = heapq.heappop(ends)
    for start in range(item.start, item.stop, segment):
      stop = min(start + segment, item.stop)
      fresh = start == item.start
      lanes[row].append(
        Segment(item.document, start, stop, fresh, start - item.start)
      )
    heapq.heappush(ends, (len(lanes[row]), row))
  steps = max(map(len, lanes), default=0)
  return [
    [lane[step] if step < len(lane) else None for lane in lanes]
    for step in range(steps)
  ]
