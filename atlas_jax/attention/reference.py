"""Attention token by token, from its definition.

All keys lie in one list with their place in the document. A token forgets the
list if it begins a document, adds itself, and takes the softmax over those that
it sees. Nothing here is shared with the fast forms.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.cache import LOST, Cache, Entries, WindowCache
from atlas_jax.memory.config import state_dtype
from atlas_jax.memory.numerics import HIGHEST


class _Memory(NamedTuple):
  """A list of tokens.

  Attributes:
    key, value, bucket: Of each, bucket [B, S, H, 0] without hashing.
    place: Of each in its document; -1 where there is none.
    count: Tokens of the document so far.
  """

  key: Float[Array, "B S N K"]
  value: Float[Array, "B S N K"]
  bucket: Int[Array, "B S N R"]
  place: Int[Array, "B S"]
  count: Int[Array, "B"]


def recurrent(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T N K"],
  value: Float[Array, "B T N K"],
  *,
  past: Cache | WindowCache,
  window: int = 0,
  global_tokens: int = 0,
  bucket: Int[Array, "B T H R"] | None = None,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  persistent: Entries | None = None,
  scale: float | None = None,
  grow: bool = True,
) -> tuple[Float[Array, "B T H K"], Cache | WindowCache]:
  """The outputs of `full_attention` or `window_attention`, and the cache after.

  Args:
    query, key, value, bucket, restart, persistent, scale: As there.
    past: What went before: a window's cache with a window.
    window: Tokens that a query sees; 0: all.
    global_tokens: First tokens of a document that all later ones see.
    valid: Tokens that count.
    grow: A cache of all tokens gets room for T more. A token without room, and
      all that follow in its document, give NaN.
  """
  batch, length, heads, width = query.shape
  if restart is None:
    restart = jnp.zeros((batch, length), bool)
  if valid is None:
    valid = jnp.ones((batch, length), bool)
  before = _load(past)
  offset = before.place.shape[1]
  hashed = bucket is not None
  if bucket is None:
    bucket = jnp.zeros((*key.shape[:3], 0), jnp.int32)

  def longer(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, length)) + ((0, 0),) * (x.ndim - 2))

  memory = _Memory(
    longer(before.key),
    longer(before.value),
    longer(before.bucket),
    jnp.pad(before.place, ((0, 0), (0, length)), constant_values=-1),
    before.count,
  )
  capacity = LOST
  if isinstance(past, Cache):
    capacity = offset + (length if grow else 0)
  factor = width**-0.5 if scale is None else scale

  def one(memory: _Memory, token):
    t, q, k, v, b, begins, counts = token
    count = jnp.where(begins, 0, memory.count)
    place = jnp.where(begins[:, None], -1, memory.place)
    place = place.at[:, offset + t].set(jnp.where(counts, count, -1))
    memory = _Memory(
      memory.key.at[:, offset + t].set(k.astype(memory.key.dtype)),
      memory.value.at[:, offset + t].set(v.astype(memory.value.dtype)),
      memory.bucket.at[:, offset + t].set(b),
      place,
      count + counts.astype(jnp.int32),
    )
    age = count[:, None] - place
    seen = place >= 0
    if window:
      seen &= (age < window) | (place < global_tokens)
    seen = jnp.broadcast_to(seen[:, None], (batch, heads, seen.shape[1]))
    if hashed:
      shared = jnp.any(memory.bucket == b[:, None], axis=-1)
      others = seen & (age > 0)[:, None] & jnp.moveaxis(shared, 1, 2)
      alone = jnp.sum(others, axis=-1, keepdims=True) == 0
      seen = jnp.where(alone, seen & (age == 0)[:, None], others)
    y = _softmax_mean(q, memory.key, memory.value, seen, persistent, factor)
    lost = memory.count > capacity
    return memory, jnp.where(lost[:, None, None], jnp.nan, y)

  tokens = (query, key, value, bucket, restart, valid)
  tokens = tuple(jnp.moveaxis(x, 1, 0) for x in tokens)
  index = jnp.arange(length, dtype=jnp.int32)
  memory, y = jax.lax.scan(one, memory, (index, *tokens))
  return jnp.moveaxis(y, 0, 1), _store(memory, past, length if grow else 0)


def _softmax_mean(
  query: Float[Array, "B H K"],
  key: Float[Array, "B S N K"],
  value: Float[Array, "B S N K"],
  seen: Bool[Array, "B H S"],
  persistent: Entries | None,
  scale: float,
) -> Float[Array, "B H K"]:
  """The softmax over what is seen and the persistent keys, of one token."""
  kind = query.dtype
  wide = state_dtype(kind)
  repeats = query.shape[1] // key.shape[2]
  query, key, value = (x.astype(wide) for x in (query, key, value))
  key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
  scores = jnp.einsum("bhk,bshk->bhs", query, key, precision=HIGHEST)
  scores = jnp.where(seen, scores * scale, -jnp.inf)
  if persistent is not None:
    more_keys, more_values = (
      jnp.repeat(x.astype(wide), repeats, axis=2)
      for x in (persistent.key, persistent.value)
    )
    more = jnp.einsum("bhk,shk->bhs", query, more_keys[0], precision=HIGHEST)
    scores = jnp.concatenate([scores, more * scale], axis=-1)
    more_values = jnp.broadcast_to(
      more_values, (value.shape[0], *more_values.shape[1:])
    )
    value = jnp.concatenate([value, more_values], axis=1)
  # A token of padding may see nothing.
  largest = jnp.maximum(
    jnp.max(scores, axis=-1, keepdims=True), float(jnp.finfo(wide).min)
  )
  weight = jnp.exp(scores - jax.lax.stop_gradient(largest))
  total = jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-30)
  share = weight / total
  return jnp.einsum("bhs,bshk->bhk", share, value, precision=HIGHEST).astype(
    kind
  )


def _load(past: Cache | WindowCache) -> _Memory:
  """The list that a cache stands for."""
  count = past.count[:, None]
  if isinstance(past, Cache):
    entries = past.entries
    index = jnp.arange(entries.key.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(index < count, index, -1)
  else:
    size, firsts = past.recent.key.shape[1], past.first.key.shape[1]
    slot = jnp.arange(size, dtype=jnp.int32)
    last = (count - size + slot[None])[:, None]
    recent = jnp.max(jnp.where(last % size == slot[None, :, None], last, -1), 2)
    first = jnp.arange(firsts, dtype=jnp.int32)[None]
    # The recent ones stand in the list once.
    first = jnp.where(first < count - size, first, -1)
    place = jnp.concatenate([recent, first], axis=1)
    entries = jax.tree.map(
      lambda *x: jnp.concatenate(x, axis=1), past.recent, past.first
    )
  bucket = entries.bucket
  if bucket is None:
    bucket = jnp.zeros((*entries.key.shape[:3], 0), jnp.int32)
  return _Memory(
    entries.key, entries.value, bucket, jnp.maximum(place, -1), past.count
  )


def _store(
  memory: _Memory, past: Cache | WindowCache, more: int
) -> Cache | WindowCache:
  """The cache that a list amounts to."""

  place = memory.place[:, None]

  def find(found: Bool[Array, "B P S"], hashed: bool) -> Entries:
    """What stands at the places found, zeros if nothing does."""
    found &= place >= 0

    def take(x: Array) -> Array:
      chosen = jnp.where(found[..., None, None], x[:, None], 0)
      return jnp.sum(chosen, axis=2, dtype=x.dtype)

    return Entries(
      take(memory.key),
      take(memory.value),
      take(memory.bucket) if hashed else None,
    )

  if isinstance(past, Cache):
    room = past.entries.key.shape[1] + more
    index = jnp.arange(room, dtype=jnp.int32)[None, :, None]
    count = jnp.where(memory.count > room, LOST, memory.count)
    return Cache(find(place == index, past.entries.bucket is not None), count)
  size, firsts = past.recent.key.shape[1], past.first.key.shape[1]
  slot = jnp.arange(size, dtype=jnp.int32)[None, :, None]
  recent = place >= memory.count[:, None, None] - size
  first = jnp.arange(firsts, dtype=jnp.int32)[None, :, None]
  return WindowCache(
    find(recent & (place % size == slot), False),
    find(place == first, False),
    memory.count,
  )
