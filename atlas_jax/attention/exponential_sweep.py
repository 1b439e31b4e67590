"""Blocks of tokens in order, each with all that stands before it.

Works on one row and one head of keys. A memory that is refreshed takes the
slopes of a block's tokens at the weights of the block's start, so the blocks
are its chunks; for any other they are as many queries as is convenient.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.attention.exponential_config import ExponentialMemory
from atlas_jax.attention.exponential_read import (
  Columns,
  Fast,
  Vectors,
  advance,
  factors,
  read,
  tables,
)
from atlas_jax.attention.exponential_scan import append_scan
from atlas_jax.memory import gates

# The blocks of one of these parts see rows for their own part and all before,
# whatever their place in it: with 2, 3/4 of the full square is computed. Every
# part is compiled by itself, so few blocks are one part.
PARTS = 2
FEW = 8


class Block(NamedTuple):
  """The tokens of one block, and the W - 1 before it.

  Flags are 0 or 1, so that everything has a slope.

  Attributes:
    query, score_query: of the block's tokens.
    vectors: of the tokens before and the block's own.
    log_decay, rate, window: gates of the block's tokens, as `tables` takes
      them.
    log_kept: log of what is left of the starting weights at each token.
    fresh: a document begins with the block.
    commit: the block's writes count for what follows.
  """

  query: Float[Array, "n G K"]
  score_query: Float[Array, "n G K"]
  vectors: Vectors
  log_decay: Float[Array, "n"]
  rate: Float[Array, "n"]
  window: Float[Array, "n W"]
  log_kept: Float[Array, "n"]
  fresh: Float[Array, ""]
  commit: Float[Array, ""]


class Swept(NamedTuple):
  """What a sweep leaves.

  Attributes:
    y: outputs, at least float32.
    written: the columns of every block, [blocks, E, ...], as of its own end.
    totals: log of all decays of every block.
    fast: sums after the last block that commits.
  """

  y: Float[Array, "N n G V"]
  written: Columns
  totals: Float[Array, "N"]
  fast: Fast


def sweep(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  blocks: Block,
  past: Columns,
  fast: Fast,
) -> Swept:
  """Writes and reads all blocks.

  Args:
    memory: which memory.
    params: starting weights of the head.
    lam: with `attends`, the share of the deep part.
    blocks: [N, ...] each.
    past: what stands before all of them.
    fast: sums before all of them.
  """
  count = blocks.rate.shape[0]
  table = jax.vmap(tables)(blocks.log_decay, blocks.rate, blocks.window)
  log, amount, totals = (
    x[:, -1] for x in (table.log, table.amount, table.head)
  )
  part = -(-count // (PARTS if count > FEW else 1))
  outputs, rows = [], []
  for first in range(0, count, part):
    end = min(first + part, count)
    some = jax.tree.map(lambda x, f=first, e=end: x[f:e], blocks)
    number = jnp.arange(first, end, dtype=totals.dtype)
    own = (some.vectors.score_key, log[first:end], amount[first:end])
    shape = (blocks.vectors.key.shape[1], past.payload.shape[-1])
    earlier = jax.tree.map(
      lambda x, *more: jnp.concatenate([x, *map(_flat, more)]), past, *rows
    )
    fast, payload, y = append_scan(
      functools.partial(_block, memory, past.log.shape[0], first),
      jax.ShapeDtypeStruct(shape, past.payload.dtype),
      (params, lam, totals, earlier, own),
      fast,
      (number, some),
    )
    outputs.append(y)
    rows.append(Columns(own[0], payload, *own[1:]))
  written = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
  return Swept(jnp.concatenate(outputs), written, totals, fast)


def decays_since(
  totals: Float[Array, "N"], number: Float[Array, ""]
) -> Float[Array, "N+1"]:
  """Log decays from the end of each block to the start of block `number`.

  The first entry counts from before the first block. Every entry is a sum of
  its own: differences would lose what a decay of 0 leaves. Those of later
  blocks, and of the block itself, are below `GONE`.
  """
  place = jnp.arange(totals.shape[0], dtype=totals.dtype)
  before = jnp.where(place < number, totals, 0.0)
  since = jnp.cumsum(before[::-1])[::-1]
  since = jnp.concatenate([since, jnp.zeros((1,), totals.dtype)])
  place = jnp.arange(-1, totals.shape[0], dtype=totals.dtype)
  return jnp.where(place < number, since, gates.LOWEST_LOG)


def _block(
  memory: ExponentialMemory,
  before: int,
  first: int,
  shared: Any,
  payload: Float[Array, "N E D"],
  fast: Fast,
  numbered: tuple[Float[Array, ""], Block],
) -> tuple[Fast, Float[Array, "E D"], Float[Array, "n G V"]]:
  """One block, as the body of the scan.

  Args:
    memory: which memory.
    before: columns from before all blocks.
    first: number of the part's first block.
    shared: what all blocks of the part see: `params`, `lam`, the decays of all
      blocks, columns of earlier parts, and of this one all but the payload.
    payload: of this part's earlier blocks.
    fast: sums before the block.
    numbered: the block and its number.
  """
  params, lam, totals, earlier, (keys, logs, amounts) = shared
  number, block = numbered
  table = tables(block.log_decay, block.rate, block.window)
  since = decays_since(totals, number)
  fresh = block.fresh > 0
  width = keys.shape[1]
  each = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], width))
  start = jnp.broadcast_to(since[:1], (before,))
  since_earlier = jnp.concatenate([start, _flat(each(since[1 : first + 1]))])
  own_part = slice(first + 1, first + 1 + keys.shape[0])
  past = [
    earlier._replace(log=earlier.log + since_earlier),
    jax.tree.map(
      _flat, Columns(keys, payload, logs + each(since[own_part]), amounts)
    ),
  ]
  past = [
    some._replace(log=jnp.where(fresh, gates.LOWEST_LOG, some.log))
    for some in past
    if some.log.shape[0]
  ]
  fast = jax.tree.map(lambda x: jnp.where(fresh, jnp.zeros_like(x), x), fast)
  refreshed = memory.chunk is not None
  own = factors(
    memory,
    params,
    block.vectors,
    past if refreshed else (),
    fast if refreshed else None,
  )
  y = read(
    memory,
    params,
    lam,
    block.query,
    block.score_query,
    past,
    block.vectors.score_key,
    own,
    table,
    fast,
    block.log_kept,
  )
  after = advance(
    fast, own, table.share[-1], table.head[-1], block.log_kept[-1]
  )
  after = jax.tree.map(
    lambda new, old: jnp.where(block.commit > 0, new, old), after, fast
  )
  return after, own.payload, y


def _flat(x: Array) -> Array:
  """The first two axes as one."""
  return x.reshape(-1, *x.shape[2:])
