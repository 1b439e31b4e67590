"""Where every token goes: padding, documents and carried tokens as indices.

A memory works on whole chunks. This module turns what callers have (rows of
unequal length, padding anywhere, documents that start anywhere, an unfinished
chunk from an earlier call) into slots of whole chunks, and back. It is
computed once at the top of a model and shared by all its layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.errors import UserError

# History of the first document of a call that continues a state: longer than
# any convolution looks back.
LONG_AGO = 2**20


class Compaction(NamedTuple):
  """Valid tokens of each row moved to its front, in order.

  Attributes:
    order: [B, T] source of each place.
    inverse: [B, T] place of each source.
    lengths: [B] number of valid tokens.
  """

  order: Int[Array, "B T"]
  inverse: Int[Array, "B T"]
  lengths: Int[Array, "B"]

  def gather(self, x: Array) -> Array:
    """Moves x [B, T, ...] to compact places; what is behind them is 0."""
    moved = _take(x, self.order)
    places = (
      jnp.arange(x.shape[1], dtype=jnp.int32)[None] < self.lengths[:, None]
    )
    return jnp.where(_expand(places, moved), moved, jnp.zeros((), x.dtype))

  def scatter(self, y: Array) -> Array:
    """Moves y [B, T, ...] back; 0 at masked places."""
    valid = self.inverse < self.lengths[:, None]
    moved = _take(y, self.inverse)
    return jnp.where(_expand(valid, moved), moved, jnp.zeros((), y.dtype))


class Layout(NamedTuple):
  """Slots of whole chunks for the compact tokens of one call.

  Attributes:
    source: [B, S] for each slot the index of its token in the unfinished
      chunk (chunk - 1 places) followed by the call's tokens, or -1.
    position: [B, T] slot of each token; S where there is none.
    restart: [B, N] chunks that start a new document, or None.
    commit: [B, N] chunks whose end is handed on (full and not beyond the end).
    pending: [B, chunk - 1] slots of the tokens left for the next call.
    count: [B] how many of them are filled.
    history: [B, T] earlier tokens of the same document; those of the state
      count as `LONG_AGO`.
    lengths: [B] valid tokens per row.
    fits: [B] rows whose documents have a place; None: known to be all.
  """

  source: Int[Array, "B S"]
  position: Int[Array, "B T"]
  restart: Bool[Array, "B N"] | None
  commit: Bool[Array, "B N"]
  pending: Int[Array, "B C-1"]
  count: Int[Array, "B"]
  history: Int[Array, "B T"]
  lengths: Int[Array, "B"]
  fits: Bool[Array, "B"] | None = None


def compact(mask: Bool[Array, "B T"]) -> Compaction:
  """The compaction of rows whose valid tokens are marked True."""
  order = jnp.argsort(~mask, axis=1, stable=True)
  inverse = jnp.argsort(order, axis=1)
  lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
  return Compaction(order.astype(jnp.int32), inverse.astype(jnp.int32), lengths)


def valid_mask(
  mask: Bool[Array, "B T"] | None, segment_ids: Int[Array, "B T"] | None
) -> Bool[Array, "B T"] | None:
  """Tokens that count: not masked, and not of segment 0.

  Raises:
    UserError: outside jit, where the mask keeps tokens of segment 0.
  """
  if segment_ids is None:
    return mask
  in_document = segment_ids > 0
  if mask is None:
    return in_document
  if not isinstance(mask, Tracer) and not isinstance(segment_ids, Tracer):
    if np.any(np.asarray(mask) & ~np.asarray(in_document)):
      raise UserError(
        "the mask keeps tokens whose segment id is 0 (padding): give them the "
        "id of their document or mask them"
      )
  return mask & in_document


def plan(
  length: int,
  chunk: int,
  batch: int,
  *,
  count: Int[Array, "B"] | None = None,
  lengths: Int[Array, "B"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  max_segments: int | None = None,
) -> Layout:
  """Slots for compact tokens [B, T].

  The first document of a row continues the unfinished chunk of its state;
  every further one starts at a chunk border with a fresh memory.

  Args:
    length: T.
    chunk: tokens per chunk.
    batch: B.
    count: tokens of the unfinished chunk per row; None is a fresh state.
    lengths: valid tokens per row; None is all.
    segment_ids: document of each compact token; a change starts a new one.
    max_segments: largest number of documents in a row. Needed inside jit;
      outside, the default is what the ids hold.

  Raises:
    UserError: more documents than `max_segments` (outside jit; inside, `fits`
      tells, and a checkify debug check), or no `max_segments` inside jit.
  """
  carried = count is not None
  if count is None:
    count = jnp.zeros((batch,), jnp.int32)
  if lengths is None:
    lengths = jnp.full((batch,), length, jnp.int32)
  index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  valid = index < lengths[:, None]
  most = chunk - 1 if carried else 0
  if segment_ids is None:
    start = jnp.zeros_like(index)
    position = count[:, None] + index
    total = most + length
    end = count + lengths
    restart_at = None
    first = jnp.ones_like(valid)
    fits = None
  else:
    begins = valid & (index > 0)
    begins &= segment_ids != jnp.roll(segment_ids, 1, axis=1)
    segment = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    max_segments = _check_segments(segment, max_segments)
    total = most + length + max_segments * (chunk - 1)
    # Length of every document, and the slot at which it starts.
    ones = jax.nn.one_hot(segment, max_segments, dtype=jnp.int32)
    sizes = jnp.sum(
      ones * valid[..., None].astype(jnp.int32), axis=1, dtype=jnp.int32
    )
    filled = sizes.at[:, 0].add(count)
    whole = -(-filled // chunk) * chunk
    starts = jnp.cumsum(whole, axis=1, dtype=jnp.int32) - whole
    before = jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes
    start = jnp.take_along_axis(before, segment, axis=1)
    slot = jnp.take_along_axis(starts, segment, axis=1)
    first = segment == 0
    slot = slot + jnp.where(first, count[:, None], 0)
    position = slot + index - start
    last = jnp.max(segment, axis=1)
    end = jnp.take_along_axis(starts, last[:, None], 1)[:, 0]
    end = end + jnp.take_along_axis(filled, last[:, None], 1)[:, 0]
    restart_at = jnp.where(begins, position, -1)
    # Outside jit `_check_segments` has seen to it.
    fits = last < max_segments if isinstance(last, Tracer) else None
  chunks = max(1, -(-total // chunk))
  slots = chunks * chunk
  position = jnp.where(valid, position, slots)
  rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
  source = jnp.full((batch, slots), -1, jnp.int32)
  place = jnp.arange(chunk - 1, dtype=jnp.int32)
  if carried:
    kept = jnp.where(place[None] < count[:, None], place[None], slots)
    source = source.at[rows, kept].set(place[None], mode="drop")
  source = source.at[rows, position].set(index + chunk - 1, mode="drop")
  borders = jnp.arange(chunks, dtype=jnp.int32)[None]
  restart = None
  if restart_at is not None:
    restart = jnp.any(
      restart_at[:, :, None] == borders[:, None] * chunk, axis=1
    )
  history = index - start
  if carried:
    history = jnp.where(first, history + LONG_AGO, history)
  left = end // chunk * chunk
  return Layout(
    source=source,
    position=position,
    restart=restart,
    commit=(borders + 1) * chunk <= end[:, None],
    pending=left[:, None] + place[None],
    count=end - left,
    history=history,
    lengths=lengths,
    fits=fits,
  )


def to_slots(layout: Layout, pending: Array, tokens: Array) -> Array:
  """Arranges pending [B, C-1, ...] and tokens [B, T, ...] as [B, S, ...]."""
  both = jnp.concatenate([pending, tokens], axis=1)
  moved = _take(both, jnp.maximum(layout.source, 0))
  filled = _expand(layout.source >= 0, moved)
  return jnp.where(filled, moved, jnp.zeros((), moved.dtype))


def from_slots(layout: Layout, slots: Array) -> Array:
  """Picks each token's slot: [B, S, ...] to [B, T, ...], 0 if it has none."""
  last = slots.shape[1] - 1
  moved = _take(slots, jnp.minimum(layout.position, last))
  return jnp.where(
    _expand(layout.position <= last, moved), moved, jnp.zeros((), moved.dtype)
  )


def left_over(layout: Layout, slots: Array) -> Array:
  """The tokens of the unfinished chunk: [B, S, ...] to [B, C-1, ...]."""
  last = slots.shape[1] - 1
  moved = _take(slots, jnp.minimum(layout.pending, last))
  place = jnp.arange(layout.pending.shape[1], dtype=jnp.int32)[None]
  return jnp.where(
    _expand(place < layout.count[:, None], moved),
    moved,
    jnp.zeros((), moved.dtype),
  )


def aligned_restarts(
  segment_ids: Int[Array, "B T"], chunk: int
) -> Bool[Array, "B N"]:
  """Chunks that start a document, for documents that start at chunk borders."""
  first = segment_ids[:, ::chunk]
  changed = first[:, 1:] != first[:, :-1]
  return jnp.pad(changed, ((0, 0), (1, 0)))


def check_aligned(segment_ids: Int[Array, "B T"], chunk: int) -> None:
  """Refuses documents that start inside a chunk; inside jit nothing is known.

  Raises:
    UserError: names the first such place.
  """
  if isinstance(segment_ids, Tracer):
    return
  ids = np.asarray(segment_ids)
  begins = (ids[:, 1:] != ids[:, :-1]) & (ids[:, 1:] != 0)
  begins[:, chunk - 1 :: chunk] = False
  if begins.any():
    row, token = np.argwhere(begins)[0]
    raise UserError(
      f"a document starts at token {token + 1} of row {row}, which is no "
      f"multiple of the chunk {chunk}: leave `aligned` away"
    )


def _check_segments(segment: Array, max_segments: int | None) -> int:
  if isinstance(segment, Tracer):
    if max_segments is None:
      raise UserError(
        "packed documents inside jit need `max_segments`: the largest number "
        "of documents in a row"
      )
    checkify.debug_check(
      jnp.all(segment < max_segments),
      "a row holds more documents than max_segments={most}",
      most=jnp.int32(max_segments),
    )
    return max_segments
  found = int(np.max(np.asarray(segment), initial=0)) + 1
  if max_segments is None:
    return found
  if found > max_segments:
    raise UserError(
      f"a row holds {found} documents, more than max_segments {max_segments}: "
      "raise it or split the row"
    )
  return max_segments


def _take(x: Float[Array, "B T *rest"], index: Int[Array, "B S"]) -> Array:
  return jnp.take_along_axis(
    x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1
  )


def _expand(flag: Bool[Array, "B T"], like: Array) -> Array:
  return flag.reshape(*flag.shape, *[1] * (like.ndim - 2))
