"""Causal softmax attention to everything read so far.

Scores exist for a few queries at a time: memory grows with T, not with its
square. Time is quadratic.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.cache import Cache, Entries, room
from atlas_jax.attention.core import PIECE, attend, in_pieces, widened
from atlas_jax.attention.documents import document_starts
from atlas_jax.attention.hashing import itself_if_alone, share_bucket

# A sequence is cut into up to so many parts, at least so long, that see the
# keys up to their own end only: of the square little more than half is left.
_PARTS, _PART = 8, 512

_Tree = TypeVar("_Tree")


class _Queries(NamedTuple):
  """What is known of some queries."""

  query: Float[Array, "B T H K"]
  index: Int[Array, "1 T"]
  start: Int[Array, "#B T"]
  bucket: Int[Array, "B T H R"] | None


def full_attention(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T N K"],
  value: Float[Array, "B T N K"],
  *,
  bucket: Int[Array, "B T H R"] | None = None,
  restart: Bool[Array, "B T"] | None = None,
  past: Cache | None = None,
  persistent: Entries | None = None,
  scale: float | None = None,
  piece: int = PIECE,
) -> Float[Array, "B T H K"]:
  """`y_t = sum_j softmax_j(scale q_t k_j) v_j` over the document up to t.

  With buckets (arXiv 2001.04451) only over keys before t that share a bucket
  with t in any round, or over t itself where there is none: the union of the
  rounds, in which no key counts twice.

  Args:
    query: Queries of H heads.
    key, value: Of N heads, N a divisor of H; finite at padding too.
    bucket: Buckets of the tokens, whose queries and keys are the same; then
      N is H.
    restart: Tokens that begin a document and see nothing before them. The
      tokens of a document are consecutive: padding lies between documents or
      behind all tokens, and what it gets has no meaning.
    past: What went before; the first document of a row continues it.
    persistent: Keys and values [1, P, N, K] that every token sees.
    scale: Factor on q k; None: `K ** -0.5`.
    piece: Queries whose scores exist at the same time.

  Returns:
    Means of values in their type; NaN where `past` had no room for its tokens.
  """
  length = query.shape[1]
  if length == 0:
    return query
  start = document_starts(length, restart, None if past is None else past.count)
  index = jnp.arange(length, dtype=jnp.int32)[None]
  queries = _Queries(query, index, start, bucket)
  entries = Entries(key, value, bucket)
  parts = max(1, min(_PARTS, length // _PART))
  size = -(-length // parts)
  y = []
  for first in range(0, length, size):
    end = min(first + size, length)
    some, seen = _cut(queries, first, end), _cut(entries, 0, end)
    y.append(_part(some, seen, past, persistent, scale, piece))
  y = jnp.concatenate(y, axis=1)
  if past is None:
    return y
  lost = (past.count > room(past))[:, None] & (start < 0)
  return jnp.where(lost[..., None, None], jnp.asarray(jnp.nan, y.dtype), y)


def step_attention(
  query: Float[Array, "B 1 H K"],
  cache: Cache,
  *,
  bucket: Int[Array, "B 1 H R"] | None = None,
  persistent: Entries | None = None,
  scale: float | None = None,
) -> Float[Array, "B 1 H K"]:
  """As `full_attention`, for the token that is the last in the cache."""
  place = jnp.arange(room(cache), dtype=jnp.int32)[None, None]
  newest = (cache.count - 1)[:, None, None]
  mask = (place <= newest)[:, None]
  if bucket is not None and cache.entries.bucket is not None:
    shared = share_bucket(bucket, cache.entries.bucket)
    itself = place == newest
    mask = itself_if_alone(mask & shared & ~itself[:, None], itself[:, None])
  keys, values = with_persistent(
    persistent, cache.entries.key, cache.entries.value
  )
  mask = seeing_persistent(persistent, mask)
  y = attend(query, keys, values, mask, scale=scale)
  lost = (cache.count > room(cache))[:, None, None, None]
  return jnp.where(lost, jnp.asarray(jnp.nan, y.dtype), y)


def with_persistent(
  persistent: Entries | None, key: Array, value: Array
) -> tuple[Array, Array]:
  """Puts the keys and values that all queries see before the others."""
  if persistent is None:
    return key, value

  def put(first: Array, x: Array) -> Array:
    first = jnp.broadcast_to(first, (x.shape[0], *first.shape[1:]))
    return jnp.concatenate([first.astype(x.dtype), x], axis=1)

  return put(persistent.key, key), put(persistent.value, value)


def seeing_persistent(
  persistent: Entries | None, mask: Bool[Array, "B H T S"]
) -> Bool[Array, "B H T P+S"]:
  """The mask with True for the keys that all queries see, before the others."""
  if persistent is None:
    return mask
  width = [(0, 0)] * 3 + [(persistent.key.shape[1], 0)]
  return jnp.pad(mask, width, constant_values=True)


def _cut(tree: _Tree, first: int, end: int) -> _Tree:
  """The arrays between two indices of time."""
  return jax.tree.map(lambda x: x[:, first:end], tree)


def _part(
  queries: _Queries,
  entries: Entries,
  past: Cache | None,
  persistent: Entries | None,
  scale: float | None,
  piece: int,
) -> Float[Array, "B T H K"]:
  """Queries over the past and the entries given, from index 0 on."""
  before = 0 if past is None else room(past)
  joined = entries
  if past is not None:
    joined = jax.tree.map(
      lambda old, x: jnp.concatenate([old.astype(x.dtype), x], axis=1),
      past.entries,
      entries,
    )
  keys, values = with_persistent(
    persistent, widened(joined.key), widened(joined.value)
  )
  column = jnp.arange(-before, entries.key.shape[1], dtype=jnp.int32)
  column = column[None, None]

  def attend_to(some: _Queries) -> Array:
    index, start = some.index[..., None], some.start[..., None]
    mask = (column >= jnp.maximum(start, 0)) & (column <= index)
    if past is not None:
      filled = (column < past.count[:, None, None] - before) & (start < 0)
      mask = mask | ((column < 0) & filled)
    mask = mask[:, None]
    if some.bucket is not None and joined.bucket is not None:
      itself = (column == index)[:, None]
      shared = share_bucket(some.bucket, joined.bucket)
      mask = itself_if_alone(mask & shared & ~itself, itself)
    mask = seeing_persistent(persistent, mask)
    return attend(some.query, keys, values, mask, scale=scale)

  return in_pieces(attend_to, queries, piece)
