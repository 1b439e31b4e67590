"""Softmax attention over a mask, whole or a few queries at a time.

The kernel is `jax.nn.dot_product_attention`. What it does, as read and tested:
- scores and softmax are float32 for any type, so float64 has a form of its own;
- for narrow types the backward pass does not compile under strict promotion, so
  they are widened: as fast where float32 products are of bfloat16 by default;
- a masked score becomes a large finite number: nothing is lost, but the value
  of a masked key is still multiplied, by 0, and has to be finite;
- a query that sees nothing gets the mean of all values;
- scores of all queries against all keys exist at once, so long sequences go in
  pieces.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlas_jax.memory.config import state_dtype
from atlas_jax.memory.numerics import HIGHEST

# Queries whose scores exist at the same time.
PIECE = 128

Queries = TypeVar("Queries")


def attend(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B S N K"],
  value: Float[Array, "B S N K"],
  mask: Bool[Array, "#B #H T S"] | None = None,
  *,
  scale: float | None = None,
) -> Float[Array, "B T H K"]:
  """`softmax(scale q k) v` over the keys that the mask leaves.

  Products of float32 are of full precision on every device; those of narrower
  types are of the precision that is set for float32.

  Args:
    query: Queries of H heads.
    key, value: Keys and values of N heads; N divides H, and H / N queries in
      a row share one of them.
    mask: True where a query sees a key; None: everywhere. A query that sees no
      key at all gets a finite number without meaning.
    scale: Factor on q k; None: `K ** -0.5`.

  Returns:
    Means of values, in the queries' type; softmax in float32, float64 for
    float64.
  """
  kind = query.dtype
  query, key, value = widened(query), widened(key), widened(value)
  if kind == jnp.float64:
    return _attend_float64(query, key, value, mask, scale)
  precision = jax.config.jax_default_matmul_precision
  if kind == jnp.float32:
    precision = "float32"
  with jax.default_matmul_precision(precision):
    y = jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale)
  return y.astype(kind)


def in_pieces(
  function: Callable[[Queries], Float[Array, "B T H K"]],
  queries: Queries,
  piece: int = PIECE,
) -> Float[Array, "B T H K"]:
  """Applies a function of queries to a few of them at a time.

  More than one piece are computed one after the other, and each again in the
  backward pass: nothing of the size of T times keys is ever kept. What the
  function closes over should be `widened`, since gradients add up in its type.

  Args:
    function: Attends for queries independently of each other.
    queries: A tree of arrays [B or 1, T, ...]; zeros are added to it where
      `piece` does not divide T.
    piece: Queries at a time.
  """
  length = jax.tree.leaves(queries)[0].shape[1]
  if length <= piece:
    return function(queries)
  one = jax.checkpoint(function, prevent_cse=False)
  y = jax.lax.map(one, jax.tree.map(lambda x: split_time(x, piece), queries))
  return join_time(y, length)


def widened(x: Array) -> Array:
  """x in at least float32, for what the gradients of many pieces add up in."""
  return x.astype(state_dtype(x.dtype))


def split_time(x: Array, size: int) -> Array:
  """[B, T, ...] to [N, B, size, ...], with zeros at the end of time."""
  count = -(-x.shape[1] // size)
  width = [(0, 0)] * x.ndim
  width[1] = (0, count * size - x.shape[1])
  x = jnp.pad(x, width).reshape(x.shape[0], count, size, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def join_time(x: Array, length: int) -> Array:
  """Undoes `split_time`: [N, B, size, ...] to [B, length, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _attend_float64(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B S N K"],
  value: Float[Array, "B S N K"],
  mask: Bool[Array, "#B #H T S"] | None,
  scale: float | None,
) -> Float[Array, "B T H K"]:
  """As `attend`: the kept kernel would round scores to float32."""
  batch, length, heads, width = query.shape
  groups = key.shape[2]
  query = query.reshape(batch, length, groups, heads // groups, width)
  scores = jnp.einsum("btngk,bsnk->bngts", query, key, precision=HIGHEST)
  scores = scores * (width**-0.5 if scale is None else scale)
  if mask is not None:
    if mask.shape[1] == heads:
      mask = mask.reshape(-1, groups, heads // groups, *mask.shape[2:])
    else:
      mask = mask[:, :, None]
    scores = jnp.where(mask, scores, float(jnp.finfo(jnp.float32).min))
  shares = jax.nn.softmax(scores, axis=-1)
  y = jnp.einsum("bngts,bsnk->btngk", shares, value, precision=HIGHEST)
  return y.reshape(batch, length, heads, width)
