"""A memory whose slopes are always those at its starting weights.

Then every token's write is its own matter, all tokens are read at once as in
attention, and documents may start anywhere.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.cache import LOST
from atlas_jax.attention.documents import last_start, positions
from atlas_jax.attention.exponential_config import ExponentialMemory
from atlas_jax.attention.exponential_read import Columns, Fast, Vectors
from atlas_jax.attention.exponential_sweep import sweep
from atlas_jax.attention.exponential_tokens import (
  Tokens,
  blocks_of,
  by_head,
  masked,
)
from atlas_jax.memory.gates import LOWEST_LOG

# Tokens whose queries meet all keys at the same time.
BLOCK = 128


class OnceState(NamedTuple):
  """All tokens of the document at hand.

  Attributes:
    columns: what each of them wrote, [B, N, S, ...], in order, at the front
      of S places; 0 behind them. A token's log is 0 until its last write.
    fast: sums over all of them, [B, N, ...].
    before: the last window - 1 of them, [B, N, W - 1, ...].
    count: [B] how many there are; more than S in a row whose tokens had no
      room: its outputs are NaN.
  """

  columns: Columns
  fast: Fast
  before: Vectors
  count: Int[Array, "B"]


def run(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  tokens: Tokens,
  state: OnceState,
  restart: Bool[Array, "B T"],
  lengths: Int[Array, "B"],
  *,
  grow: bool,
) -> tuple[Float[Array, "B N T G V"], OnceState]:
  """Outputs, at least float32, and the state after.

  Args:
    memory: which memory; its chunk is None.
    params: starting weights.
    lam: with `attends`, the share of the deep part.
    tokens: compact: what counts stands at the front of each row.
    state: what stands before.
    restart: tokens that begin a document.
    lengths: tokens of each row that count. (Where padding stands between
      documents the state after is of no use.)
    grow: adds room for T tokens.
  """
  length = restart.shape[1]
  place = positions(length, restart, state.count)
  begin = last_start(restart, state.count)
  index = jnp.arange(length, dtype=jnp.int32)[None]
  last = (index >= begin[:, None]) & (index < lengths[:, None])
  capacity = state.columns.log.shape[-1] + (length if grow else 0)
  written = jnp.where(last, place, capacity)
  count = lengths - begin
  y, columns, fast, before = by_head(
    lambda *arguments: _one(memory, capacity, *arguments), shared=1, row=6
  )(
    params,
    lam,
    place,
    restart,
    written,
    lengths,
    state.count,
    count,
    tokens,
    state.columns,
    state.fast,
    state.before,
  )
  count = jnp.where(count > capacity, LOST, count)
  y = jnp.where((count > capacity)[:, None, None, None, None], jnp.nan, y)
  return y, OnceState(columns, fast, before, count)


def _one(
  memory: ExponentialMemory,
  capacity: int,
  params: dict[str, Array],
  lam: Float[Array, ""],
  place: Int[Array, "T"],
  restart: Bool[Array, "T"],
  written: Int[Array, "T"],
  length: Int[Array, ""],
  had: Int[Array, ""],
  has: Int[Array, ""],
  tokens: Tokens,
  columns: Columns,
  fast: Fast,
  before: Vectors,
) -> tuple[Float[Array, "T G V"], Columns, Fast, Vectors]:
  """One row and head.

  Args:
    memory, params, lam, tokens: as of `run`.
    capacity: places of the columns after.
    place: of each token in its document.
    restart: tokens that begin a document.
    written: place of each token in the columns; `capacity` for none.
    length: tokens that count.
    had, has: tokens of the document before and after.
    columns, fast, before: the state before.
  """
  count, reach = place.shape[0], memory.window - 1
  size = min(count, BLOCK)
  missing = -count % size
  pad = lambda x: jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
  blocks = blocks_of(
    memory,
    size,
    jax.tree.map(pad, tokens),
    before,
    pad(place),
    pad(restart),
    fast.log_kept,
  )
  there = jnp.arange(columns.log.shape[0], dtype=jnp.int32) < had
  seen = columns._replace(log=jnp.where(there, columns.log, LOWEST_LOG))
  swept = sweep(memory, params, lam, blocks, seen, fast)
  flat = lambda x: x.reshape(-1, *x.shape[2:])[:count]
  log_decay = flat(blocks.log_decay)
  write = flat(blocks.rate)[:, None] * flat(blocks.window)

  # The tokens before that later ones may still write, then the new ones.
  goes_on = has > length
  tail = had - reach + jnp.arange(reach, dtype=jnp.int32)
  kept = goes_on & (tail >= 0)
  # One more place, since an empty array has none to gather from.
  amount = jnp.pad(columns.amount, (0, 1))
  amount = amount[jnp.clip(tail, 0, columns.amount.shape[0])]
  amount = jnp.where(kept, amount, 0.0)
  amount, log = _settle(
    log_decay, write, jnp.concatenate([amount, jnp.zeros_like(log_decay)])
  )
  total = jnp.sum(log_decay)
  room = capacity - columns.log.shape[0]
  longer = jax.tree.map(
    lambda x: jnp.pad(x, ((0, room), *[(0, 0)] * (x.ndim - 1))), columns
  )
  longer = longer._replace(log=jnp.maximum(longer.log + total, LOWEST_LOG))
  place = jnp.concatenate([jnp.where(kept, tail, capacity), written])
  own = jax.tree.map(lambda x: flat(x[:, reach:]), swept.written)
  after = Columns(
    longer.key.at[written].set(own.key, mode="drop"),
    longer.payload.at[written].set(own.payload, mode="drop"),
    longer.log.at[place].set(log, mode="drop"),
    longer.amount.at[place].set(amount, mode="drop"),
  )
  filled = jnp.arange(capacity, dtype=jnp.int32) < has
  after = jax.tree.map(lambda x: masked(filled, x), after)
  newest = reach - jnp.arange(reach, dtype=jnp.int32)
  index = length + reach - newest
  before = jax.tree.map(
    lambda old, new: masked(newest <= has, jnp.concatenate([old, new])[index]),
    before,
    tokens.vectors,
  )
  fast = swept.fast._replace(
    log_kept=jnp.maximum(swept.fast.log_kept, LOWEST_LOG)
  )
  return flat(swept.y), after, fast, before


def _settle(
  log_decay: Float[Array, "T"],
  write: Float[Array, "T W"],
  amount: Float[Array, "T+W-1"],
) -> tuple[Float[Array, "T+W-1"], Float[Array, "T+W-1"]]:
  """Amounts and logs, after T tokens, of these and the W - 1 before them.

  Args:
    log_decay: of the T tokens.
    write: what each writes of the token j places before it.
    amount: of all tokens before the first of the T.
  """
  width = write.shape[1]
  columns = amount.shape[0]
  around = ((width - 1, width - 1),)
  decay = jnp.exp(jnp.pad(log_decay, around))
  write = jnp.pad(write, (*around, (0, 0)))
  for j in range(width):
    now = slice(j, j + columns)
    amount = decay[now] * amount + write[now, j]
  # A token of column c has its last write at the new token c, if there is one.
  since = jnp.cumsum(log_decay[::-1])[::-1]
  log = jnp.concatenate([since[1:], jnp.zeros((width,), since.dtype)])
  return amount, jnp.maximum(log, LOWEST_LOG)
