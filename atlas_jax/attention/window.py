"""Causal softmax attention to the last tokens, and to the first if asked.

The sequence is cut into blocks at least as long as the window; the queries of a
block meet its keys and those of the last `window` tokens before it. Time and
memory are linear in T. A step reads the ring of a cache as it lies.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.cache import (
  Entries,
  WindowCache,
  in_order,
  take,
)
from atlas_jax.attention.core import (
  PIECE,
  attend,
  in_pieces,
  join_time,
  split_time,
  widened,
)
from atlas_jax.attention.documents import document_starts
from atlas_jax.attention.full import seeing_persistent, with_persistent


class _Queries(NamedTuple):
  """What is known of some queries."""

  query: Float[Array, "B T H K"]
  index: Int[Array, "1 T"]
  start: Int[Array, "#B T"]


class _Past(NamedTuple):
  """What went before a call, in the type of what is new.

  Attributes:
    recent: The last tokens, the newest at the end; none where a single block
      holds all that there is to see.
    first: The first ones of the document.
  """

  recent: Entries
  first: Entries


class _Block(NamedTuple):
  """The queries of a block and what they may see.

  Attributes:
    queries: Of the block.
    band: Keys and values from `window` tokens before the block to its end.
    first: The first tokens of the document to which the block's first token
      belongs.
    begin: Where that document begins.
    index: Of the block's first token.
  """

  queries: _Queries
  band: Entries
  first: Entries
  begin: Int[Array, "#B 1"]
  index: Int[Array, ""]


def window_attention(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T N K"],
  value: Float[Array, "B T N K"],
  *,
  window: int,
  global_tokens: int = 0,
  restart: Bool[Array, "B T"] | None = None,
  past: WindowCache | None = None,
  persistent: Entries | None = None,
  scale: float | None = None,
  piece: int = PIECE,
) -> Float[Array, "B T H K"]:
  """`y_t = sum_j softmax_j(scale q_t k_j) v_j`, t - window < j <= t.

  Of the document of t only; and, as in arXiv 2004.05150 (section 3), over the
  document's first `global_tokens` tokens too, each key counting once.

  Args:
    query: Queries of H heads.
    key, value: Of N heads, N a divisor of H; finite at padding too.
    window: Tokens that a query sees, itself included.
    global_tokens: First tokens of a document that all later ones see.
    restart, persistent, scale: As in `full_attention`.
    past: What went before, of as many tokens; the first document of a row
      continues it.
    piece: Queries whose scores exist at the same time.

  Returns:
    Means of values in their type.
  """
  length = query.shape[1]
  if length == 0:
    return query
  start = document_starts(length, restart, None if past is None else past.count)
  index = jnp.arange(length, dtype=jnp.int32)[None]
  queries = _Queries(query, index, start)
  entries = Entries(key, value)
  size = max(window, piece)
  before = _before(past, entries, window, global_tokens, length > size)
  reach, firsts = (x.key.shape[1] for x in before)
  if persistent is not None:
    persistent = jax.tree.map(widened, persistent)

  def attend_to(block: _Block) -> Float[Array, "B C H K"]:
    seen = jax.tree.map(
      lambda *x: widened(jnp.concatenate(x, axis=1)), block.first, block.band
    )
    keys, values = with_persistent(persistent, seen.key, seen.value)
    column = jnp.arange(-reach, block.band.key.shape[1] - reach)
    column = (block.index + column.astype(jnp.int32))[None, None]
    number = jnp.arange(firsts, dtype=jnp.int32)[None]
    # What the band holds is not taken again from the document's first tokens.
    far = block.begin + number < block.index - reach

    def some(queries: _Queries) -> Float[Array, "B T H K"]:
      index, start = queries.index[..., None], queries.start[..., None]
      near = index - column < window
      near |= column - start < global_tokens
      near &= (column >= start) & (column <= index)
      same = start == block.begin[..., None]
      mask = jnp.concatenate([far[:, None] & same, near], axis=-1)[:, None]
      mask = seeing_persistent(persistent, mask)
      return attend(queries.query, keys, values, mask, scale=scale)

    return in_pieces(some, block.queries, piece)

  if length <= size:
    joined = jax.tree.map(_join, before.recent, entries)
    only = _Block(queries, joined, before.first, start[:, :1], jnp.int32(0))
    return attend_to(only)
  one = attend_to
  if size <= piece:
    # Otherwise `in_pieces` sees to it that no scores are kept.
    one = jax.checkpoint(attend_to, prevent_cse=False)
  y = jax.lax.map(one, _blocks(queries, entries, before, size))
  return join_time(y, length)


def step_window(
  query: Float[Array, "B 1 H K"],
  cache: WindowCache,
  *,
  persistent: Entries | None = None,
  scale: float | None = None,
) -> Float[Array, "B 1 H K"]:
  """As `window_attention`, for the token that is the last in the cache.

  Args:
    query: Of that token.
    cache: From `append`.
    persistent, scale: As in `full_attention`.
  """
  # The ring is the window: softmax asks for no order.
  size, firsts = (x.key.shape[1] for x in (cache.recent, cache.first))
  count = cache.count[:, None]
  keys, values = cache.recent.key, cache.recent.value
  seen = jnp.arange(size, dtype=jnp.int32)[None] < count
  if firsts:
    keys, values = (
      jnp.concatenate(x, axis=1)
      for x in ((cache.first.key, keys), (cache.first.value, values))
    )
    # What the ring holds is not taken again from the first tokens.
    far = jnp.arange(firsts, dtype=jnp.int32)[None] < count - size
    seen = jnp.concatenate([far, seen], axis=1)
  keys, values = with_persistent(persistent, keys, values)
  mask = seeing_persistent(persistent, seen[:, None, None])
  return attend(query, keys, values, mask, scale=scale)


def _before(
  past: WindowCache | None,
  entries: Entries,
  window: int,
  global_tokens: int,
  far: bool,
) -> _Past:
  """What went before, in order; without a past zeros, and none if not `far`."""
  if past is not None:
    parts = _Past(in_order(past), past.first)
    return jax.tree.map(
      lambda x, like: x.astype(like.dtype), parts, _Past(entries, entries)
    )

  def zeros(size: int) -> Entries:
    size = size if far else 0
    return jax.tree.map(
      lambda x: jnp.zeros((x.shape[0], size, *x.shape[2:]), x.dtype), entries
    )

  return _Past(zeros(window), zeros(global_tokens))


def _blocks(
  queries: _Queries, entries: Entries, past: _Past, size: int
) -> _Block:
  """The blocks of a sequence along a new first axis."""

  def band(before: Array, x: Array) -> Array:
    x = split_time(x, size)
    reach = before.shape[1]
    tails = _join(before[None], x[:-1, :, size - reach :], axis=0)
    return _join(tails, x, axis=2)

  begin = queries.start[:, ::size]
  rows, count = entries.key.shape[0], begin.shape[1]
  reach, firsts = (x.key.shape[1] for x in past)
  number = jnp.arange(firsts, dtype=jnp.int32)[None, None]
  index = begin[..., None] + number
  # Where they are among the first, the last and the new tokens.
  source = jnp.where(index < -reach, number, index + (reach + firsts))
  # Those beyond the end are of documents that are shorter.
  last = reach + firsts + entries.key.shape[1] - 1
  source = jnp.broadcast_to(jnp.clip(source, 0, last), (rows, count, firsts))
  joined = jax.tree.map(
    lambda *x: jnp.concatenate(x, axis=1), past.first, past.recent, entries
  )
  first = take(joined, source.reshape(rows, count * firsts))
  return _Block(
    jax.tree.map(lambda x: split_time(x, size), queries),
    jax.tree.map(band, past.recent, entries),
    jax.tree.map(
      lambda x: jnp.moveaxis(
        x.reshape(rows, count, firsts, *x.shape[2:]), 1, 0
      ),
      first,
    ),
    jnp.moveaxis(begin, 1, 0)[..., None],
    jnp.arange(count, dtype=jnp.int32) * size,
  )


def _join(before: Array, x: Array, axis: int = 1) -> Array:
  return jnp.concatenate([before.astype(x.dtype), x], axis=axis)
