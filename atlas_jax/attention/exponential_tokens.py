"""Tokens as the sweep takes them: by row and head, masked, with all gates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.exponential_config import ExponentialMemory, Inputs
from atlas_jax.attention.exponential_read import Vectors
from atlas_jax.attention.exponential_sweep import Block
from atlas_jax.memory.config import state_dtype
from atlas_jax.memory.gates import LOWEST_LOG, Gates


class Tokens(NamedTuple):
  """All of some tokens, heads before time; G queries share a head of keys.

  Attributes:
    query, score_query, vectors: see `Inputs`.
    log_decay, rate, window: gates, at least float32; padding decays nothing
      and writes nothing.
  """

  query: Float[Array, "B N T G K"]
  score_query: Float[Array, "B N T G K"]
  vectors: Vectors
  log_decay: Float[Array, "B N T"]
  rate: Float[Array, "B N T"]
  window: Float[Array, "B N T W"]


def tokens_of(
  inputs: Inputs, gates: Gates, valid: Bool[Array, "B T"] | None
) -> Tokens:
  """Puts heads first and makes padding invisible."""
  dtype = state_dtype(inputs.value.dtype)
  heads = inputs.key.shape[2]

  def query(x: Array) -> Array:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads, x.shape[-1])

  tokens = Tokens(
    query(inputs.query),
    query(inputs.score_query),
    Vectors(inputs.key, inputs.score_key, inputs.value),
    jnp.maximum(gates.log_decay[..., 0].astype(dtype), LOWEST_LOG),
    gates.rate.astype(dtype),
    gates.window.astype(dtype),
  )
  if valid is not None:

    def masked(x: Array) -> Array:
      kept = valid.reshape(*valid.shape, *[1] * (x.ndim - 2))
      return jnp.where(kept, x, jnp.zeros((), x.dtype))

    tokens = jax.tree.map(masked, tokens)
  return jax.tree.map(lambda x: x.swapaxes(1, 2), tokens)


def outputs_of(y: Float[Array, "B N T G V"], dtype) -> Float[Array, "B T H V"]:
  """Outputs by token, with the heads of queries side by side."""
  y = jnp.moveaxis(y, 2, 1)
  return y.reshape(*y.shape[:2], -1, y.shape[-1]).astype(dtype)


def by_head(function: Callable[..., Any], shared: int = 1, row: int = 0):
  """Maps a function of one row and one head over rows [B] and heads [N].

  Its arguments are, in order: `params` (by head), `shared` ones that are the
  same for all, `row` ones that are the same for the heads of a row, and those
  by row and head.
  """

  def mapped(*arguments):
    more = len(arguments) - 1 - shared - row
    heads = jax.vmap(
      function, in_axes=(0, *[None] * (shared + row), *[0] * more)
    )
    rows = jax.vmap(
      heads, in_axes=(*[None] * (1 + shared), *[0] * (row + more))
    )
    return rows(*arguments)

  return mapped


def blocks_of(
  memory: ExponentialMemory,
  size: int,
  tokens: Tokens,
  before: Vectors,
  place: Int[Array, "T"],
  restart: Bool[Array, "T"],
  log_kept: Float[Array, ""],
  fresh: Bool[Array, "n"] | None = None,
  commit: Bool[Array, "n"] | None = None,
) -> Block:
  """The blocks of one row and head.

  Args:
    memory: which memory.
    size: tokens per block; divides T.
    tokens: of the row and head.
    before: the window - 1 tokens before them.
    place: of each token in its document, from 0.
    restart: tokens that begin a document: they see nothing before them.
    log_kept: log of all decays of the document before the call, if the
      starting weights decay.
    fresh, commit: see `Block`; None: no and yes.
  """
  dtype = tokens.rate.dtype
  length, reach = tokens.rate.shape[0], memory.window - 1
  count = length // size
  column = jnp.arange(count, dtype=jnp.int32)[:, None] * size
  column = column + jnp.arange(size + reach, dtype=jnp.int32)[None]
  # What is computed of a token depends on the columns of its own block only.
  vectors = jax.tree.map(
    lambda old, new: jnp.concatenate([old, new])[column], before, tokens.vectors
  )
  age = jnp.arange(memory.window, dtype=jnp.int32)[None]
  window = jnp.where(age <= place[:, None], tokens.window, 0.0)
  log_decay = jnp.where(restart, LOWEST_LOG, tokens.log_decay)
  kept = jnp.zeros_like(log_decay)
  if memory.forgets_start:
    kept = _kept(tokens.log_decay, restart, log_kept)
  if fresh is None:
    fresh = jnp.zeros((count,), bool)
  if commit is None:
    commit = jnp.ones((count,), bool)
  split = lambda x: x.reshape(count, size, *x.shape[1:])
  return Block(
    split(tokens.query),
    split(tokens.score_query),
    vectors,
    split(log_decay),
    split(tokens.rate),
    split(window),
    split(kept),
    fresh.astype(dtype),
    commit.astype(dtype),
  )


def masked(keep: Bool[Array, "S"], x: Any) -> Array:
  """x [S, ...] where it is to be kept, 0 elsewhere."""
  keep = keep.reshape(-1, *[1] * (x.ndim - 1))
  return jnp.where(keep, x, jnp.zeros((), x.dtype))


def _kept(
  log_decay: Float[Array, "T"],
  restart: Bool[Array, "T"],
  before: Float[Array, ""],
) -> Float[Array, "T"]:
  """Log of all decays of its document up to each token."""

  def join(one, two):
    begins, sums = two
    return one[0] | begins, jnp.where(begins, sums, one[1] + sums)

  first = jnp.where(restart[0], log_decay[0], before + log_decay[0])
  start = (restart, log_decay.at[0].set(first))
  return jax.lax.associative_scan(join, start)[1]
