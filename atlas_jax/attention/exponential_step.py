"""One token at a time for a memory that is refreshed from chunk to chunk.

A call computes its unfinished chunk anew. A step keeps what that chunk has
written so far, so that it takes the slopes of its own token only, and those of
the W - 1 tokens before when a new chunk begins.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.cache import LOST
from atlas_jax.attention.exponential_chunked import (
  ChunkedState,
  Pending,
  filled_columns,
  seen_columns,
)
from atlas_jax.attention.exponential_config import ExponentialMemory
from atlas_jax.attention.exponential_read import (
  Columns,
  Factors,
  Fast,
  Tables,
  Vectors,
  advance,
  factors,
  read,
  tables,
)
from atlas_jax.attention.exponential_tokens import (
  Tokens,
  by_head,
  masked,
)
from atlas_jax.memory.gates import LOWEST_LOG


def with_cache(
  memory: ExponentialMemory, params: dict[str, Array], state: ChunkedState
) -> ChunkedState:
  """The state with what its unfinished chunk has written so far."""

  def one(params, chunks, count, columns, fast, before, pending):
    columns = seen_columns(memory, columns, chunks)
    all_of_them = jax.tree.map(_joined, before, pending.vectors)
    # The last slot of the chunk is not pending.
    all_of_them = jax.tree.map(
      lambda x: jnp.pad(x, ((0, 1), (0, 0))), all_of_them
    )
    own = factors(
      memory,
      params,
      all_of_them,
      [columns],
      fast,
    )
    place = jnp.arange(memory.columns, dtype=jnp.int32)
    filled = place < memory.window - 1 + count
    return jax.tree.map(lambda x: masked(filled, x), own)

  cache = by_head(one, shared=0, row=2)(
    params,
    state.chunks,
    state.count,
    state.columns,
    state.fast,
    state.before,
    state.pending,
  )
  return state._replace(cache=cache)


def step(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  tokens: Tokens,
  state: ChunkedState,
  valid: Bool[Array, "B"],
) -> tuple[Float[Array, "B N 1 G V"], ChunkedState]:
  """Outputs of one token per row, at least float32, and the state after.

  Args:
    memory: which memory.
    params: starting weights.
    lam: with `attends`, the share of the deep part.
    tokens: one per row.
    state: what stands before, with a cache, and room for the token's chunk.
    valid: rows that have a token; the others stay as they are.
  """
  room = state.columns.log.shape[-1] // memory.columns
  arguments = (state.columns, state.fast, state.before, state.pending)
  y, pending, last, cache = by_head(
    lambda *x: _one(memory, *x), shared=1, row=3
  )(
    params,
    lam,
    state.chunks,
    state.count,
    valid,
    tokens,
    *arguments,
    state.cache,
  )
  count = state.count + valid.astype(jnp.int32)
  full = count == memory.refresh

  def finish(cache):
    return by_head(lambda *x: _finish(memory, *x), shared=0, row=3)(
      params,
      state.chunks,
      full,
      jnp.where(full, state.chunks, room),
      *arguments,
      last,
      cache,
    )

  def keep(cache):
    return state.columns, state.fast, state.before, pending, cache

  # Most steps fill no row's chunk.
  columns, fast, before, pending, cache = jax.lax.cond(
    jnp.any(full), finish, keep, cache
  )
  chunks = state.chunks + full.astype(jnp.int32)
  chunks = jnp.where(chunks > room, LOST, chunks)
  y = jnp.where((chunks > room)[:, None, None, None, None], jnp.nan, y)
  count = jnp.where(full, 0, count)
  return y, ChunkedState(columns, fast, before, pending, chunks, count, cache)


def _one(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  chunks: Int[Array, ""],
  count: Int[Array, ""],
  valid: Bool[Array, ""],
  tokens: Tokens,
  columns: Columns,
  fast: Fast,
  before: Vectors,
  pending: Pending,
  cache: Factors,
) -> tuple[Float[Array, "1 G V"], Pending, Pending, Factors]:
  """One row and head: the output, and the chunk with the token in it.

  Returns:
    y; the pending tokens, without and with the chunk's last place; the cache.
  """
  reach = memory.window - 1
  seen = [seen_columns(memory, columns, chunks)]
  own = factors(memory, params, tokens.vectors, seen, fast)

  def put(place: Array, x: Array, new: Array) -> Array:
    return x.at[jnp.where(valid, place, x.shape[0])].set(new[0], mode="drop")

  cache = jax.tree.map(lambda x, new: put(reach + count, x, new), cache, own)
  new = Pending(tokens.vectors, tokens.log_decay, tokens.rate, tokens.window)
  longer = jax.tree.map(
    lambda x: jnp.pad(x, ((0, 1), *[(0, 0)] * (x.ndim - 1))), pending
  )
  longer = jax.tree.map(lambda x, new: put(count, x, new), longer, new)
  table = _tables(memory, chunks, longer)
  row = Tables(*(x[count][None] for x in table))
  keys = _joined(before.score_key, longer.vectors.score_key)
  y = read(
    memory,
    params,
    lam,
    tokens.query,
    tokens.score_query,
    seen,
    keys,
    cache,
    row,
    fast,
    fast.log_kept + row.head if memory.forgets_start else fast.log_kept[None],
  )
  return y, jax.tree.map(lambda x: x[:-1], longer), longer, cache


def _finish(
  memory: ExponentialMemory,
  params: dict[str, Array],
  chunks: Int[Array, ""],
  full: Bool[Array, ""],
  place: Int[Array, ""],
  columns: Columns,
  fast: Fast,
  before: Vectors,
  pending: Pending,
  last: Pending,
  cache: Factors,
) -> tuple[Columns, Fast, Vectors, Pending, Factors]:
  """One row and head: the state after the chunk, if it is full.

  Args:
    memory, params, columns, fast, before: as of the chunk's start.
    chunks: finished chunks before it.
    full: whether it is finished now.
    place: where its columns go; beyond the end if it is not full.
    pending: its tokens before the last one.
    last: all its tokens.
    cache: what they wrote.
  """
  size, reach = memory.refresh, memory.window - 1
  table = _tables(memory, chunks, last)
  head = table.head[-1]
  keys = _joined(before.score_key, last.vectors.score_key)
  own = Columns(keys, cache.payload, table.log[-1], table.amount[-1])
  log = jnp.maximum(columns.log + jnp.where(full, head, 0.0), LOWEST_LOG)
  room = columns.log.shape[0] // memory.columns
  filled = filled_columns(memory, room, chunks + full.astype(jnp.int32))

  def write(x: Array, new: Array) -> Array:
    rows = x.reshape(-1, memory.columns, *x.shape[1:])
    rows = rows.at[place].set(new, mode="drop")
    return masked(filled, rows.reshape(x.shape))

  own = own._replace(log=jnp.maximum(own.log, LOWEST_LOG))
  columns = jax.tree.map(write, columns._replace(log=log), own)
  kept = fast.log_kept
  if memory.forgets_start:
    kept = jnp.maximum(kept + head, LOWEST_LOG)
  after = advance(fast, cache, table.share[-1], head, kept)
  tail = jax.tree.map(
    lambda old, new: _joined(old, new)[size:], before, last.vectors
  )
  tail = jax.tree.map(
    lambda x: masked(
      reach - jnp.arange(reach, dtype=jnp.int32) <= (chunks + 1) * size, x
    ),
    tail,
  )
  seen = [seen_columns(memory, columns, chunks + 1)]
  again = factors(memory, params, tail, seen, after)
  again = jax.tree.map(lambda x: jnp.pad(x, ((0, size), (0, 0))), again)
  empty = jax.tree.map(jnp.zeros_like, pending)
  rest = jax.tree.map(lambda x: x[:-1], last)
  return (
    columns,
    *jax.tree.map(
      lambda new, old: jnp.where(full, new, old),
      (after, tail, empty, again),
      (fast, before, rest, cache),
    ),
  )


def _tables(
  memory: ExponentialMemory, chunks: Int[Array, ""], tokens: Pending
) -> Tables:
  """The shares of the chunk's writes; places not filled yet write nothing."""
  row = jnp.arange(memory.refresh, dtype=jnp.int32)
  place = chunks * memory.refresh + row
  age = jnp.arange(memory.window, dtype=jnp.int32)[None]
  window = jnp.where(age <= place[:, None], tokens.window, 0.0)
  return tables(tokens.log_decay, tokens.rate, window)


def _joined(old: Array, new: Array) -> Array:
  return jnp.concatenate([old, new])
