"""Sequences in segments that are read one after the other."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.memory import layout as layouts


class Segments(NamedTuple):
  """Segments along the first axis, each of tokens of one document.

  Attributes:
    x: Their inputs, zero where there is no token.
    lengths: Tokens at the front of each; None: all S.
    restart: Which begin a document; None: none does.
  """

  x: Float[Array, "n B S D"]
  lengths: Int[Array, "n B"] | None
  restart: Bool[Array, "n B"] | None


def cut(
  x: Float[Array, "B T D"],
  pending: Float[Array, "B S-1 D"],
  arrangement: Arrangement,
  size: int,
) -> tuple[Float[Array, "B n*S D"], Segments]:
  """Cuts the tokens of an unfinished segment and those of a call.

  Args:
    x: Arranged inputs of the call.
    pending: Tokens of the unfinished segment; used where the arrangement has a
      layout for segments, which counts them.
    arrangement: Where padding and documents are.
    size: S.

  Returns:
    The slots of all segments in a row, and the segments.
  """
  layout = arrangement.layout(size)
  batch, length = x.shape[:2]
  restart = None
  if layout is not None:
    x = layouts.to_slots(layout, pending.astype(x.dtype), x)
    valid, restart = layout.source >= 0, layout.restart
  else:
    hole = -length % size
    x = jnp.pad(x, ((0, 0), (0, hole), (0, 0)))
    valid = arrangement.valid
    if arrangement.segment_ids is not None:
      restart = layouts.aligned_restarts(arrangement.segment_ids, size)
    if valid is not None:
      valid = jnp.pad(valid, ((0, 0), (0, hole)))
    elif hole:
      valid = jnp.arange(length + hole, dtype=jnp.int32)[None] < length
      valid = jnp.broadcast_to(valid, x.shape[:2])
  lengths = None
  if valid is not None:
    lengths = valid.reshape(batch, -1, size).sum(axis=-1, dtype=jnp.int32).T
  segments = jnp.moveaxis(x.reshape(batch, -1, size, x.shape[-1]), 1, 0)
  restart = None if restart is None else restart.T
  return x, Segments(segments, lengths, restart)
