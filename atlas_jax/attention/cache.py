"""What attention keeps of the tokens that it has read.

Full attention keeps every token of the document at hand, in a cache that has
room for so many. A window keeps the last ones, in a ring of which a step writes
one slot, and the first ones of the document if it sees those as well.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.documents import last_start
from atlas_jax.errors import UserError

# The count of a row whose tokens had no room: no cache is as large.
LOST = 2**30


class Entries(NamedTuple):
  """What attention needs of some tokens; zeros where there is none.

  Attributes:
    key: As queries meet them, rotated.
    value: What is averaged.
    bucket: Where locality-sensitive hashing put the keys, int32, by round;
      None without hashing.
  """

  key: Float[Array, "B S N K"]
  value: Float[Array, "B S N K"]
  bucket: Int[Array, "B S N R"] | None = None


class Cache(NamedTuple):
  """All tokens of the document at hand.

  Attributes:
    entries: The tokens in order, at the front of S places.
    count: How many there are; more than S in a row whose tokens had no room:
      its outputs are NaN.
  """

  entries: Entries
  count: Int[Array, "B"]


class WindowCache(NamedTuple):
  """The last tokens of the document at hand, and its first.

  Attributes:
    recent: The last W tokens as a ring: token n of the document, from 0, in
      slot n modulo W. Slots of no token are 0.
    first: The first G tokens, in order; recent ones too.
    count: How many tokens there have been.
  """

  recent: Entries
  first: Entries
  count: Int[Array, "B"]


def empty_window(like: Entries, window: int, first: int) -> WindowCache:
  """A cache of nothing with room for so many entries like those given."""

  def zeros(size: int) -> Entries:
    return jax.tree.map(
      lambda x: jnp.zeros((x.shape[0], size, *x.shape[2:]), x.dtype), like
    )

  count = jnp.zeros((like.key.shape[0],), jnp.int32)
  return WindowCache(zeros(window), zeros(first), count)


def room(cache: Cache) -> int:
  """For how many tokens there is room; also of stacked caches."""
  return cache.entries.key.shape[-3]


def resize(cache: Cache, capacity: int) -> Cache:
  """The cache with this room; rows that held more are lost.

  Args:
    cache: One cache, or caches stacked along axes before the batch.
    capacity: Tokens, 0 or more.
  """
  if capacity < 0:
    raise UserError(f"a capacity of {capacity} tokens: use 0 or more")
  ahead = cache.count.ndim

  def change(x: Array) -> Array:
    x = x[(slice(None),) * ahead + (slice(capacity),)]
    width = [(0, 0)] * x.ndim
    width[ahead] = (0, capacity - x.shape[ahead])
    return jnp.pad(x, width)

  return Cache(
    jax.tree.map(change, cache.entries), _within(cache.count, capacity)
  )


def check_room(cache: Cache, valid: Bool[Array, "B"] | None) -> None:
  """Refuses a step for which there is no room; inside jit nothing is known.

  Raises:
    UserError: Names the remedy.
  """
  if isinstance(cache.count, Tracer) or isinstance(valid, Tracer):
    return
  full = np.asarray(cache.count) >= room(cache)
  if valid is not None:
    full &= np.asarray(valid)
  if full.any():
    raise UserError(
      f"row {int(np.argmax(full))} of the state is full, there is room for "
      f"{room(cache)} tokens: make more with `resize`"
    )


def extend(
  cache: Cache | None,
  entries: Entries,
  *,
  restart: Bool[Array, "B T"] | None = None,
  lengths: Int[Array, "B"] | None = None,
  grow: bool = True,
) -> Cache:
  """The cache after some tokens: those of the last document of each row.

  Args:
    cache: The one before; None: empty, without room.
    entries: Of T new tokens.
    restart: Tokens that begin a document.
    lengths: Tokens at the front of each row that count; None: all.
    grow: Adds room for T tokens. Otherwise rows without room are lost.
  """
  batch, length = entries.key.shape[:2]
  if cache is None:
    cache = Cache(
      jax.tree.map(lambda x: x[:, :0], entries), jnp.zeros((batch,), jnp.int32)
    )
    if restart is None and lengths is None and grow:
      return Cache(entries, cache.count + length)
  capacity = room(cache) + (length if grow else 0)
  begin = last_start(restart, cache.count)
  index = jnp.arange(length, dtype=jnp.int32)[None]
  last = index >= begin[:, None]
  if lengths is None:
    lengths = jnp.full((batch,), length, jnp.int32)
  last &= index < lengths[:, None]
  place = jnp.where(last, index - begin[:, None], capacity)
  rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
  goes_on = (begin == -cache.count)[:, None]

  def write(new: Array, old: Array) -> Array:
    old = jnp.where(_like(goes_on, old), old, jnp.zeros((), old.dtype))
    return old.at[rows, place].set(new.astype(old.dtype), mode="drop")

  longer = resize(cache, capacity) if grow else cache
  return Cache(
    jax.tree.map(write, entries, longer.entries),
    _within(lengths - begin, capacity),
  )


def extend_window(
  cache: WindowCache,
  entries: Entries,
  *,
  restart: Bool[Array, "B T"] | None = None,
  lengths: Int[Array, "B"] | None = None,
) -> WindowCache:
  """The cache of a window after some tokens.

  Args:
    cache: The one before.
    entries: Of T new tokens.
    restart: Tokens that begin a document.
    lengths: Tokens at the front of each row that count; None: all.
  """
  batch, length = entries.key.shape[:2]
  if length == 0:
    return cache
  if lengths is None:
    lengths = jnp.full((batch,), length, jnp.int32)
  begin = last_start(restart, cache.count)[:, None]
  count = lengths[:, None] - begin

  def change(old: Entries, number: Int[Array, "#B S"]) -> Entries:
    """Puts new tokens of these numbers where they belong."""
    index = begin + number
    filled = (number >= 0) & (number < count)
    new = take(entries, jnp.clip(index, 0, length - 1))

    def choose(new: Array, old: Array) -> Array:
      # What is not new stands in the same slot as before.
      x = jnp.where(_like(index >= 0, old), new.astype(old.dtype), old)
      return jnp.where(_like(filled, old), x, jnp.zeros((), old.dtype))

    return jax.tree.map(choose, new, old)

  size, firsts = (x.key.shape[1] for x in (cache.recent, cache.first))
  slot = jnp.arange(size, dtype=jnp.int32)[None]
  newest = count - 1
  return WindowCache(
    change(cache.recent, newest - (newest - slot) % size),
    change(cache.first, jnp.arange(firsts, dtype=jnp.int32)[None]),
    count[:, 0],
  )


def append(
  cache: WindowCache,
  entries: Entries,
  *,
  lengths: Int[Array, "B"] | None = None,
) -> WindowCache:
  """As `extend_window`, for one token of the document at hand.

  A single slot of each row is written.

  Args:
    cache: The one before.
    entries: Of T = 1 new token.
    lengths: 1 in rows that have a token, 0 in others; None: 1.
  """
  if lengths is None:
    lengths = jnp.ones_like(cache.count)
  size, firsts = (x.key.shape[1] for x in (cache.recent, cache.first))
  rows = jnp.arange(cache.count.shape[0], dtype=jnp.int32)
  there = lengths > 0

  def write(old: Entries, place: Int[Array, "B"]) -> Entries:
    return jax.tree.map(
      lambda new, x: x.at[rows, place].set(
        new[:, 0].astype(x.dtype), mode="drop"
      ),
      entries,
      old,
    )

  recent = write(cache.recent, jnp.where(there, cache.count % size, size))
  first = cache.first
  if firsts:
    # The later tokens have no place there.
    first = write(first, jnp.where(there, cache.count, firsts))
  return WindowCache(recent, first, cache.count + lengths)


def in_order(cache: WindowCache) -> Entries:
  """The last W tokens, the newest at the end; zeros for what is missing."""
  size = cache.recent.key.shape[1]
  slot = jnp.arange(size, dtype=jnp.int32)[None]
  return take(cache.recent, (cache.count[:, None] + slot) % size)


def take(entries: Entries, index: Int[Array, "B S"]) -> Entries:
  """Entries by their index, which is within bounds."""
  return jax.tree.map(
    lambda x: jnp.take_along_axis(x, _like(index, x), axis=1), entries
  )


def _within(count: Array, capacity: int) -> Array:
  return jnp.where(count > capacity, LOST, count)


def _like(x: Any, other: Array) -> Array:
  """x [B, S] with axes of length 1 up to the rank of another array."""
  return x.reshape(*x.shape, *[1] * (other.ndim - x.ndim))
