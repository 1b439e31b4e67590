"""Chunks as affine maps: all that a linear recurrence does with its state.

Between the start of a chunk and its end a matrix memory becomes
`M' = Diag(d) M - E M + U`, and its tokens read `y = Q M + Y`, where M is the
memory before the chunk, transposed, [K, V]. None of d, E, U, Q and Y depends on
it: they are worked out for many chunks side by side, and what chunks have to
wait for is one product of matrices each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory.numerics import matmul
from atlas_jax.recurrences.chunks import scan_chunks


class AffineChunk(NamedTuple):
  """One chunk of one row.

  Attributes:
    reads: Q, what each token reads of the memory before the chunk. Below it E,
      K more rows, if the recurrence erases.
    own: Y, what each token reads of its chunk's tokens.
    decay: d, the product of the chunk's decays; n is K, or 1 for all channels.
    write: U, what the chunk's tokens add up to.
  """

  reads: Float[Array, "rows K"]
  own: Float[Array, "C V"]
  decay: Float[Array, "n"]
  write: Float[Array, "K V"]


def apply_chunk(
  memory: Float[Array, "K V"], chunk: AffineChunk
) -> tuple[Float[Array, "K V"], Float[Array, "C V"]]:
  """The memory after a chunk, and what its tokens read."""
  size = chunk.own.shape[0]
  found = matmul(chunk.reads, memory)
  after = chunk.decay[:, None] * memory + chunk.write
  if found.shape[0] > size:
    after = after - found[size:]
  return after, found[:size] + chunk.own


def scan_affine(
  state: Float[Array, "B H ... V K"],
  tokens: Any,
  chunk: int,
  prepare: Callable[..., Any],
  body: Callable[[Any, Any], tuple[Any, Array]] = apply_chunk,
) -> tuple[Float[Array, "B T H ..."], Float[Array, "B H ... V K"]]:
  """`scan_chunks` for states that are kept as [V, K].

  Args:
    state: Before the first token.
    tokens: Leaves [B, T, H, ...].
    chunk: Largest number of tokens in a chunk.
    prepare: Takes tokens of a chunk and the state's type, by its name `dtype`,
      to what `body` wants.
    body: Takes the transposed state of one row past a prepared chunk.

  Returns:
    What is read, in the state's type, and the state after the last token.
  """
  memory, y = scan_chunks(
    body,
    jnp.swapaxes(state, -1, -2),
    tokens,
    chunk,
    prepare=partial(prepare, dtype=state.dtype),
  )
  return y, jnp.swapaxes(memory, -1, -2)


def affine_delta_chunk(
  query: Float[Array, "C K"],
  scores: Float[Array, "C C"],
  lookup: Float[Array, "C K"],
  inserted: Float[Array, "C V"],
  key: Float[Array, "C K"],
  decay: Float[Array, "n"],
) -> AffineChunk:
  """The chunk whose token t writes `u_t = inserted_t - M lookup_t` at its key.

  (The WY form: all writes of a chunk as they depend on the memory before it.)

  Args:
    query: Q without what the chunk erases.
    scores: What each token reads of the writes of each.
    lookup: What each write takes away, as a query to the memory.
    inserted: Each write into a memory of zeros.
    key: Where each write stands at the end of the chunk.
    decay: Of the memory, over the whole chunk.
  """
  written = jnp.concatenate([inserted, lookup], axis=1)
  width = inserted.shape[1]
  reads = matmul(scores, written)
  rows = matmul(key.T, written)
  return AffineChunk(
    reads=jnp.concatenate([query - reads[:, width:], rows[:, width:]]),
    own=reads[:, :width],
    decay=decay,
    write=rows[:, :width],
  )
