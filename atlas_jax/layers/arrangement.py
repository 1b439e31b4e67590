"""How the tokens of one call lie, worked out once and shared by all layers."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from atlas_jax import memory as am
from atlas_jax.errors import UserError


class Arrangement(NamedTuple):
  """Where padding and documents are; None everywhere for plain rows.

  Attributes:
    compaction: Moves valid tokens to the front of their rows, or None.
    layouts: By chunk, a memory's slots for compact tokens.
    segment_ids: Documents [B, T] that start at multiples of all chunks, 0 for
      padding; then there is neither compaction nor layout.
    history: How many tokens of its document precede each (arranged) token; at
      least `layout.LONG_AGO` in a document that a state continues.
    valid: Which arranged tokens are no padding.
    lengths: Valid tokens at the front of each row; None: all, or anywhere.
  """

  compaction: am.layout.Compaction | None = None
  layouts: dict[int, am.layout.Layout] | None = None
  segment_ids: Int[Array, "B T"] | None = None
  history: Int[Array, "B T"] | None = None
  valid: Bool[Array, "B T"] | None = None
  lengths: Int[Array, "B"] | None = None

  def layout(self, chunk: int) -> am.layout.Layout | None:
    """The slots of a memory with this chunk."""
    return None if self.layouts is None else self.layouts[chunk]

  def gather(self, x: Array) -> Array:
    """Arranges x [B, T, ...]; what padding holds becomes 0."""
    if self.compaction is not None:
      return self.compaction.gather(x)
    if self.valid is not None:
      return _zeroed(self.valid, x)
    return x

  def scatter(self, y: Array) -> Array:
    """Undoes `gather`; 0 at the places of padding."""
    if self.compaction is not None:
      return self.compaction.scatter(y)
    if self.valid is not None:
      return _zeroed(self.valid, y)
    return y

  @property
  def restart(self) -> Bool[Array, "B T"] | None:
    """Tokens that begin a document: nothing before them, no state, is seen."""
    if self.history is None:
      return None
    begins = self.history == 0
    return begins if self.valid is None else begins & self.valid


def arrange(
  batch: int,
  length: int,
  counts: Mapping[int, Int[Array, "B"] | None],
  *,
  continues: bool = False,
  mask: Bool[Array, "B T"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  max_segments: int | None = None,
  aligned: bool = False,
) -> Arrangement:
  """Works out the arrangement of a call.

  Args:
    batch: B.
    length: T.
    counts: By chunk of the layers' memories, the tokens in the unfinished chunk
      of the state that the call goes on from; None for a fresh start. Empty if
      no layer has chunks.
    continues: The call goes on from a state.
    mask: False marks padding, anywhere.
    segment_ids: Documents of each row, 0 for padding. The first continues the
      state, each further one starts afresh.
    max_segments: Largest number of documents in a row; needed inside jit for
      documents that are not aligned, if there are chunks. A row that holds more
      has NaN as outputs.
    aligned: Promises that documents start at multiples of all chunks (checked
      outside jit only).

  Raises:
    UserError: There are no tokens, a shape is wrong, arguments contradict each
      other, or there are more documents than `max_segments`.
  """
  if batch < 1 or length < 1:
    raise UserError(
      f"{batch} rows of {length} tokens: give one row and one token or more"
    )
  for name, given in (("mask", mask), ("segment_ids", segment_ids)):
    if given is not None and given.shape != (batch, length):
      raise UserError(f"{name} {given.shape} must be {(batch, length)}")
  if aligned:
    if segment_ids is None:
      raise UserError("aligned documents need segment_ids")
    if continues or mask is not None:
      raise UserError(
        "aligned documents start afresh and mark padding by segment 0: give "
        "neither a state nor a mask"
      )
    am.layout.check_aligned(segment_ids, math.lcm(*counts))
    return Arrangement(
      segment_ids=segment_ids,
      history=_history(segment_ids),
      valid=segment_ids > 0,
    )
  valid = am.layout.valid_mask(mask, segment_ids)
  if valid is None and not (continues and counts):
    return Arrangement()
  compaction = lengths = None
  if valid is not None:
    compaction = am.layout.compact(valid)
    lengths = compaction.lengths
    index = jnp.arange(length, dtype=jnp.int32)[None]
    valid = index < lengths[:, None]
    if segment_ids is not None:
      segment_ids = compaction.gather(segment_ids)
  layouts = {
    chunk: am.layout.plan(
      length,
      chunk,
      batch,
      count=count,
      lengths=lengths,
      segment_ids=segment_ids,
      max_segments=max_segments,
    )
    for chunk, count in counts.items()
  }
  return Arrangement(
    compaction=compaction,
    layouts=layouts or None,
    history=_continued(batch, length, segment_ids, continues),
    valid=valid,
    lengths=lengths,
  )


def _zeroed(valid: Bool[Array, "B T"], x: Array) -> Array:
  valid = valid.reshape(*valid.shape, *[1] * (x.ndim - 2))
  return jnp.where(valid, x, jnp.zeros((), x.dtype))


def _history(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """How many tokens stand before each since its document began."""
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  begins = segment_ids != jnp.roll(segment_ids, 1, axis=1)
  start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
  return index - start


def _continued(
  batch: int,
  length: int,
  segment_ids: Int[Array, "B T"] | None,
  continues: bool,
) -> Int[Array, "B T"]:
  """The history of compact tokens where no chunks matter."""
  index = jnp.arange(length, dtype=jnp.int32)[None]
  history = jnp.broadcast_to(index, (batch, length))
  if segment_ids is not None:
    history = _history(segment_ids)
  if not continues:
    return history
  first = history == index
  return jnp.where(first, history + am.layout.LONG_AGO, history)
