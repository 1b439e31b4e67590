"""A memory whose slopes are taken at the weights of each chunk's start.

Chunks come one after the other. A token that a later chunk's window still sees
is written there with slopes at that chunk's weights, so that a chunk puts down
W - 1 + b columns (arXiv 2505.23735, Eq. 16). Documents start at chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.cache import LOST
from atlas_jax.attention.documents import last_start, positions
from atlas_jax.attention.exponential_config import ExponentialMemory
from atlas_jax.attention.exponential_read import Columns, Factors, Fast, Vectors
from atlas_jax.attention.exponential_sweep import decays_since, sweep
from atlas_jax.attention.exponential_tokens import (
  Tokens,
  blocks_of,
  by_head,
  masked,
)
from atlas_jax.memory import layout as layouts
from atlas_jax.memory.gates import LOWEST_LOG


class Pending(NamedTuple):
  """The tokens of the unfinished chunk, zeros behind them."""

  vectors: Vectors
  log_decay: Float[Array, "B N b-1"]
  rate: Float[Array, "B N b-1"]
  window: Float[Array, "B N b-1 W"]


class ChunkedState(NamedTuple):
  """All of the document at hand.

  Attributes:
    columns: what its finished chunks wrote, [B, N, S (W - 1 + b), ...] as of
      the last one's end, at the front of the places for S chunks.
    fast: sums over the finished chunks, [B, N, ...].
    before: the last window - 1 tokens of them, [B, N, W - 1, ...].
    pending: the tokens of the unfinished chunk.
    chunks: [B] finished chunks; more than S in a row whose tokens had no room:
      its outputs are NaN.
    count: [B] tokens of the unfinished chunk.
    cache: for steps, what the unfinished chunk has written so far
      [B, N, W - 1 + b, ...]; None in the canonical state.
  """

  columns: Columns
  fast: Fast
  before: Vectors
  pending: Pending
  chunks: Int[Array, "B"]
  count: Int[Array, "B"]
  cache: Factors | None = None


class _Slots(NamedTuple):
  """Where the tokens of a call stand, whole chunks of them.

  Attributes:
    valid: which slots hold a token.
    fresh: chunks that begin a document.
    commit: chunks that are finished.
  """

  valid: Bool[Array, "B S"]
  fresh: Bool[Array, "B n"]
  commit: Bool[Array, "B n"]


def run(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  tokens: Tokens,
  state: ChunkedState,
  layout: layouts.Layout,
) -> tuple[Float[Array, "B N T G V"], ChunkedState]:
  """Outputs, at least float32, and the state after.

  Args:
    memory: which memory.
    params: starting weights.
    lam: with `attends`, the share of the deep part.
    tokens: compact tokens.
    state: what stands before, without a cache.
    layout: their slots.
  """
  waiting = state.pending
  none = lambda x: jnp.zeros(
    (*x.shape[:2], memory.refresh - 1, *x.shape[3:]), x.dtype
  )
  waiting = Tokens(
    none(tokens.query),
    none(tokens.score_query),
    waiting.vectors,
    waiting.log_decay,
    waiting.rate,
    waiting.window,
  )

  def move(old: Array, new: Array) -> Array:
    old, new = old.swapaxes(1, 2), new.swapaxes(1, 2)
    return layouts.to_slots(layout, old, new).swapaxes(1, 2)

  placed = jax.tree.map(move, waiting, tokens)
  restart = layout.restart
  if restart is None:
    restart = jnp.zeros_like(layout.commit)
  slots = _Slots(layout.source >= 0, restart, layout.commit)
  y, after = _run(memory, params, lam, placed, state, slots)
  left = lambda x: layouts.left_over(layout, x.swapaxes(1, 2)).swapaxes(1, 2)
  pending = Pending(
    *jax.tree.map(
      left, (placed.vectors, placed.log_decay, placed.rate, placed.window)
    )
  )
  y = layouts.from_slots(layout, y.swapaxes(1, 2)).swapaxes(1, 2)
  lost = after.chunks > after.columns.log.shape[-1] // memory.columns
  if layout.fits is not None:
    # Too many documents, found inside jit: no number rather than a wrong one.
    lost |= ~layout.fits
  y = jnp.where(lost[:, None, None, None, None], jnp.nan, y)
  return y, after._replace(pending=pending, count=layout.count)


def run_aligned(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  tokens: Tokens,
  state: ChunkedState,
  segment_ids: Int[Array, "B T"],
) -> Float[Array, "B N T G V"]:
  """Outputs of documents that start at chunks, from a fresh state.

  Args:
    memory, params, lam, tokens: as of `run`.
    state: the state of no tokens.
    segment_ids: documents, 0 for padding.
  """
  length, chunk = segment_ids.shape[1], memory.refresh
  missing = -length % chunk
  pad = lambda x: jnp.pad(
    x, ((0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3))
  )
  segment_ids = jnp.pad(segment_ids, ((0, 0), (0, missing)))
  restart = layouts.aligned_restarts(segment_ids, chunk)
  slots = _Slots(segment_ids > 0, restart, jnp.ones_like(restart))
  y, _ = _run(memory, params, lam, jax.tree.map(pad, tokens), state, slots)
  return y[:, :, :length]


def filled_columns(
  memory: ExponentialMemory, capacity: int, chunks: Int[Array, ""]
) -> Bool[Array, "S"]:
  """Which columns of a document's chunks belong to a token.

  Not those before the document's first token, which the window of its first
  chunks reaches, nor those of chunks still to come.

  Args:
    memory: which memory.
    capacity: chunks that there is room for.
    chunks: finished chunks.
  """
  chunk = jnp.arange(capacity, dtype=jnp.int32)[:, None]
  place = chunk * memory.refresh - (memory.window - 1)
  place = place + jnp.arange(memory.columns, dtype=jnp.int32)[None]
  return ((chunk < chunks) & (place >= 0)).reshape(-1)


def seen_columns(
  memory: ExponentialMemory, columns: Columns, chunks: Int[Array, ""]
) -> Columns:
  """The columns with those that belong to no token out of sight."""
  room = columns.log.shape[0] // memory.columns
  filled = filled_columns(memory, room, chunks)
  return columns._replace(log=jnp.where(filled, columns.log, LOWEST_LOG))


def _run(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  tokens: Tokens,
  state: ChunkedState,
  slots: _Slots,
) -> tuple[Float[Array, "B N S G V"], ChunkedState]:
  """Outputs of all slots, and the state but for its unfinished chunk."""
  chunk = memory.refresh
  new = slots.fresh.shape[1]
  finished = jnp.sum(slots.commit, axis=1, dtype=jnp.int32)
  begin = last_start(slots.fresh, state.chunks)
  index = jnp.arange(new, dtype=jnp.int32)[None]
  last = slots.commit & (index >= begin[:, None])
  capacity = state.columns.log.shape[-1] // memory.columns + new
  written = jnp.where(last, index - begin[:, None], capacity)
  chunks = finished - begin
  row = jnp.arange(chunk, dtype=jnp.int32)
  place = positions(new, slots.fresh, state.chunks)[..., None] * chunk
  place = (place + row[None, None]).reshape(place.shape[0], -1)
  place = jnp.where(slots.valid, place, 0)
  y, columns, fast, before = by_head(
    lambda *arguments: _one(memory, capacity, *arguments), shared=1, row=7
  )(
    params,
    lam,
    place,
    slots.fresh,
    slots.commit,
    written,
    finished,
    state.chunks,
    chunks,
    tokens,
    state.columns,
    state.fast,
    state.before,
  )
  chunks = jnp.where(chunks > capacity, LOST, chunks)
  return y, state._replace(
    columns=columns, fast=fast, before=before, chunks=chunks
  )


def _one(
  memory: ExponentialMemory,
  capacity: int,
  params: dict[str, Array],
  lam: Float[Array, ""],
  place: Int[Array, "S"],
  fresh: Bool[Array, "n"],
  commit: Bool[Array, "n"],
  written: Int[Array, "n"],
  finished: Int[Array, ""],
  had: Int[Array, ""],
  chunks: Int[Array, ""],
  tokens: Tokens,
  columns: Columns,
  fast: Fast,
  before: Vectors,
) -> tuple[Float[Array, "S G V"], Columns, Fast, Vectors]:
  """One row and head.

  Args:
    memory, params, lam, tokens: as of `run`, by slot.
    capacity: chunks for which the columns after have room.
    place: of each token in its document.
    fresh, commit: see `_Slots`.
    written: place of each chunk in the columns; `capacity` for none.
    finished: chunks of the call that commit.
    had, chunks: finished chunks of the document before and after the call.
    columns, fast, before: the state before.
  """
  size, reach = memory.refresh, memory.window - 1
  restart = jnp.zeros((fresh.shape[0], size), bool).at[:, 0].set(fresh)
  blocks = blocks_of(
    memory,
    size,
    tokens,
    before,
    place,
    restart.reshape(-1),
    fast.log_kept,
    fresh,
    commit,
  )
  seen = seen_columns(memory, columns, had)
  swept = sweep(memory, params, lam, blocks, seen, fast)
  since = decays_since(swept.totals, finished.astype(swept.totals.dtype))
  old = columns._replace(log=columns.log + since[0])
  new = swept.written._replace(log=swept.written.log + since[1:, None])
  filled = filled_columns(memory, capacity, chunks)

  def arranged(old: Array, new: Array) -> Array:
    old = old.reshape(-1, memory.columns, *old.shape[1:])
    room = ((0, capacity - old.shape[0]), *[(0, 0)] * (old.ndim - 1))
    both = jnp.pad(old, room).at[written].set(new, mode="drop")
    return masked(filled, both.reshape(-1, *old.shape[2:]))

  columns = jax.tree.map(arranged, old, new)
  columns = columns._replace(log=jnp.maximum(columns.log, LOWEST_LOG))
  newest = reach - jnp.arange(reach, dtype=jnp.int32)
  index = finished * size + reach - newest
  before = jax.tree.map(
    lambda old, new: masked(
      newest <= chunks * size, jnp.concatenate([old, new])[index]
    ),
    before,
    tokens.vectors,
  )
  fast = swept.fast._replace(
    log_kept=jnp.maximum(swept.fast.log_kept, LOWEST_LOG)
  )
  y = swept.y.reshape(-1, *swept.y.shape[2:])
  return y, columns, fast, before
