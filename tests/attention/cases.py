"""Small inputs for every kind of attention, and both ways to compute it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax import attention as aa
from tests.layers.helpers import jit

BATCH, LENGTH, HEADS, WIDTH = 2, 23, 4, 4
# So few queries at a time that a sequence has several pieces and blocks.
PIECE = 4


class Case(NamedTuple):
  """A kind of attention."""

  kv_heads: int = 2
  window: int = 0
  global_tokens: int = 0
  persistent: int = 0
  rounds: int = 0


CASES = {
  "full": Case(persistent=2),
  # Blocks as long as a piece, and longer ones.
  "window": Case(window=3),
  "wide_window": Case(window=7, kv_heads=1, persistent=1),
  "global": Case(window=3, global_tokens=2),
  "wide_global": Case(window=6, global_tokens=9, persistent=1),
  "hashed": Case(kv_heads=HEADS, rounds=2),
}


class Inputs(NamedTuple):
  """Arguments of attention that have a gradient, and buckets."""

  query: Any
  key: Any
  value: Any
  persistent: aa.Entries | None
  bucket: Any = None

  def part(self, first: int, end: int) -> "Inputs":
    """Those of the tokens between two indices."""
    cut = lambda x: None if x is None else x[:, first:end]
    return Inputs(
      *(cut(x) for x in self[:3]), self.persistent, cut(self.bucket)
    )


def inputs(case: Case, seed: int = 0, dtype=jnp.float32, length=LENGTH):
  random = np.random.default_rng(seed)

  def draw(tokens, heads, rows=BATCH):
    drawn = random.standard_normal((rows, tokens, heads, WIDTH))
    return jnp.asarray(1.5 * drawn, dtype)

  query = draw(length, HEADS)
  key, value = (draw(length, case.kv_heads) for _ in range(2))
  persistent = bucket = None
  if case.persistent:
    persistent = aa.Entries(
      *(draw(case.persistent, case.kv_heads, 1) for _ in range(2))
    )
  if case.rounds:
    drawn = random.integers(0, 4, (BATCH, length, HEADS, case.rounds))
    bucket = jnp.asarray(drawn, jnp.int32)
  return Inputs(query, key, value, persistent, bucket)


def empty(case: Case, dtype=jnp.float32):
  """The cache before any token."""
  none = jnp.zeros((BATCH, 0, case.kv_heads, WIDTH), dtype)
  if case.window:
    like = aa.Entries(none, none)
    return aa.empty_window(like, case.window, case.global_tokens)
  bucket = None
  if case.rounds:
    bucket = jnp.zeros((BATCH, 0, HEADS, case.rounds), jnp.int32)
  return aa.Cache(
    aa.Entries(none, none, bucket), jnp.zeros((BATCH,), jnp.int32)
  )


@functools.partial(jit, static_argnames=("case", "piece"))
def fast(case, given, past=None, restart=None, lengths=None, *, piece=PIECE):
  """Outputs and the cache after, as a model computes them."""
  options: dict[str, Any] = {
    "restart": restart,
    "past": past,
    "persistent": given.persistent,
    "piece": piece,
  }
  entries = aa.Entries(given.key, given.value, given.bucket)
  if case.window:
    y = aa.window_attention(
      *given[:3],
      window=case.window,
      global_tokens=case.global_tokens,
      **options,
    )
    before = empty(case, given.key.dtype) if past is None else past
    extend: Any = aa.extend_window
  else:
    y = aa.full_attention(*given[:3], bucket=given.bucket, **options)
    before, extend = past, aa.extend
  return y, extend(before, entries, restart=restart, lengths=lengths)


@functools.partial(jit, static_argnames=("case",))
def slow(case, given, past, restart=None, lengths=None):
  """The same by definition."""
  index = jnp.arange(given.query.shape[1], dtype=jnp.int32)[None]
  return aa.recurrent(
    *given[:3],
    past=past,
    window=case.window,
    global_tokens=case.global_tokens,
    bucket=given.bucket,
    restart=restart,
    valid=None if lengths is None else index < lengths[:, None],
    persistent=given.persistent,
  )


@jit
def step(given, cache, lengths=None):
  """One more token, of all tokens into the room that a cache has."""
  entries = aa.Entries(given.key, given.value, given.bucket)
  if isinstance(cache, aa.WindowCache):
    cache = aa.append(cache, entries, lengths=lengths)
    y = aa.step_window(given.query, cache, persistent=given.persistent)
    return y, cache
  cache = aa.extend(cache, entries, lengths=lengths, grow=False)
  y = aa.step_attention(
    given.query, cache, bucket=given.bucket, persistent=given.persistent
  )
  return y, cache


def differentiated(function, case, given, past, *more, weight):
  """Outputs, the cache after, and gradients by inputs and the past."""

  def split(tree):
    leaves, structure = jax.tree.flatten(tree)
    real = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    return leaves, structure, real

  leaves, structure, real = split((given, past))
  floats = [x for x, one in zip(leaves, real, strict=True) if one]

  def total(floats):
    parts = iter(floats)
    whole = [
      next(parts) if one else x for x, one in zip(leaves, real, strict=True)
    ]
    given, past = structure.unflatten(whole)
    out = function.__wrapped__(case, given, past, *more)
    return jnp.sum(weight[..., None, None] * jnp.sin(out[0])), out

  slopes, out = jit(jax.grad(total, has_aux=True))(floats)
  return out, slopes
