"""How the tokens of one call lie, worked out once and shared by all layers."""

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
    layout: The memory's slots for compact tokens, or None.
    segment_ids: Documents [B, T] that start at multiples of the chunk, 0 for
      padding; then there is neither compaction nor layout.
    history: How many tokens of its document precede each (arranged) token; at
      least `layout.LONG_AGO` in a document that a state continues.
    valid: Which arranged tokens are no padding.
    lengths: Valid tokens at the front of each row; None: all, or anywhere.
  """

  compaction: am.layout.Compaction | None = None
  layout: am.layout.Layout | None = None
  segment_ids: Int[Array, "B T"] | None = None
  history: Int[Array, "B T"] | None = None
  valid: Bool[Array, "B T"] | None = None
  lengths: Int[Array, "B"] | None = None

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
  chunk: int,
  *,
  continues: bool = False,
  count: Int[Array, "B"] | None = None,
  mask: Bool[Array, "B T"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  max_segments: int | None = None,
  aligned: bool = False,
) -> Arrangement:
  """Works out the arrangement of a call.

  Args:
    batch: B.
    length: T.
    chunk: Tokens per chunk of the memory; 1 for mixers without.
    continues: The call goes on from a state.
    count: Tokens in the unfinished chunk of that state, if there are chunks.
    mask: False marks padding, anywhere.
    segment_ids: Documents of each row, 0 for padding. The first continues the
      state, each further one starts afresh.
    max_segments: Largest number of documents in a row; needed inside jit for
      documents that are not aligned. A row that holds more has NaN as outputs.
    aligned: Promises that documents start at multiples of the chunk (checked
      outside jit only).

  Raises:
    UserError: A shape is wrong, arguments contradict each other, or there are
      more documents than `max_segments`.
  """
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
    am.layout.check_aligned(segment_ids, chunk)
    return Arrangement(
      segment_ids=segment_ids,
      history=_history(segment_ids),
      valid=segment_ids > 0,
    )
  valid = am.layout.valid_mask(mask, segment_ids)
  if valid is None and (not continues or chunk == 1):
    return Arrangement()
  if valid is None:
    layout = am.layout.plan(length, chunk, batch, count=count)
    return Arrangement(
      layout=layout, history=layout.history, lengths=layout.lengths
    )
  compaction = am.layout.compact(valid)
  lengths = compaction.lengths
  if segment_ids is not None:
    segment_ids = compaction.gather(segment_ids)
  layout = None
  if chunk > 1:
    layout = am.layout.plan(
      length,
      chunk,
      batch,
      count=count,
      lengths=lengths,
      segment_ids=segment_ids,
      max_segments=max_segments,
    )
    history = layout.history
  else:
    history = _continued(batch, length, segment_ids, continues)
  index = jnp.arange(length, dtype=jnp.int32)[None]
  return Arrangement(
    compaction=compaction,
    layout=layout,
    history=history,
    valid=index < lengths[:, None],
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
