"""Chunks as affine maps: all that a linear recurrence does with its state.

Between the start of a chunk and its end a matrix memory becomes
`M' = Diag(d) M - E M + U`, and its tokens read `y = Q M + Y`, where M is the
memory before the chunk, transposed, [K, V]. None of d, E, U, Q and Y depends on
it: they are worked out for many chunks side by side, and what chunks have to
wait for is one product of matrices each.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory.numerics import matmul


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
