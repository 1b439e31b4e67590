"""Causal softmax attention, the yardstick that grows with the context."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def whole_attention(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
) -> Float[Array, "B T H V"]:
  """`softmax(q k / sqrt(K)) v` over the past, all scores formed at once."""
  query, key, value = _heads_first(query, key, value)
  return _tokens_first(_attend(query, key, value, jnp.int32(0)))


def blocked_attention(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  *,
  parts: int = 8,
  block: int = 128,
) -> Float[Array, "B T H V"]:
  """As `whole_attention`, a block of queries at a time.

  The queries of one of `parts` equal parts of the sequence see the keys up to
  the part's end only, so that 9/16 of the full square is computed; each block's
  scores are recomputed in the backward pass.

  Args:
    query, key, value: per-head vectors; `parts` must divide T.
    parts: parts of the sequence with a range of keys of their own.
    block: queries whose scores exist at the same time, at most a part.
  """
  length = query.shape[1]
  part = length // parts
  block = math.gcd(part, block)
  query, key, value = _heads_first(query, key, value)

  def some(first: int) -> Array:
    end = first + part
    blocks = query[:, :, first:end].reshape(
      *query.shape[:2], part // block, block, -1
    )
    seen_keys, seen_values = key[:, :, :end], value[:, :, :end]

    @jax.checkpoint
    def one(inputs):
      index, queries = inputs
      return _attend(queries, seen_keys, seen_values, first + index * block)

    index = jnp.arange(part // block, dtype=jnp.int32)
    y = jax.lax.map(one, (index, jnp.moveaxis(blocks, 2, 0)))
    return jnp.moveaxis(y, 0, 2).reshape(*query.shape[:2], part, -1)

  y = [some(first) for first in range(0, length, part)]
  return _tokens_first(jnp.concatenate(y, axis=2))


def _heads_first(*arrays: Array) -> list[Array]:
  return [jnp.moveaxis(x, 1, 2) for x in arrays]


def _tokens_first(x: Array) -> Array:
  return jnp.moveaxis(x, 2, 1)


def _attend(
  query: Float[Array, "B H n K"],
  key: Float[Array, "B H T K"],
  value: Float[Array, "B H T V"],
  first: Array,
) -> Float[Array, "B H n V"]:
  """Queries `first`, `first + 1`, ... over the keys up to their own."""
  scores = jnp.einsum("bhnk,bhtk->bhnt", query, key, precision="highest")
  row = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2) + first
  column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3)
  scores = jnp.where(column <= row, scores * key.shape[-1] ** -0.5, -jnp.inf)
  shares = jax.nn.softmax(scores, axis=-1)
  return jnp.einsum("bhnt,bhtv->bhnv", shares, value, precision="highest")
