"""Looking back over time: the last inputs of a sequence, and those before each.

A layer that sees a few tokens before the current one keeps them as its tail, so
that a sequence can go on, in packed documents or token by token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def init_tail(taps: int, x: Array) -> Float[Array, "B N D"]:
  """The tail [B, taps - 1, D] of a sequence that begins, for inputs like x."""
  return jnp.zeros((x.shape[0], taps - 1, x.shape[-1]), x.dtype)


def look_back(
  x: Float[Array, "B T N"], tail: Float[Array, "B W-1 N"] | None, width: int
) -> Float[Array, "B T N W"]:
  """Each token's x and those of the `width - 1` tokens before it, newest first.

  Args:
    x: Values of every token.
    tail: Those of the last `width - 1` tokens before x, oldest first; None:
      zeros, the beginning of a sequence.
    width: Tokens to look at, the current one included.
  """
  return jnp.stack([shift(x, tail, j) for j in range(width)], axis=-1)


def shift(
  x: Float[Array, "B T D"], tail: Float[Array, "B N D"] | None, j: int
) -> Float[Array, "B T D"]:
  """x moved j places later, with the tail's newest entries moving in."""
  length = x.shape[1]
  if tail is None:
    # Slower by half as a slice of a concatenation, in the backward pass.
    return jax.lax.pad(
      x, jnp.zeros((), x.dtype), ((0, 0, 0), (j, -j, 0), (0, 0, 0))
    )
  before = tail[:, tail.shape[1] - j :].astype(x.dtype)
  return jnp.concatenate([before, x], axis=1)[:, :length]


def next_tail(
  x: Float[Array, "B T D"],
  tail: Float[Array, "B N D"],
  history: Int[Array, "B T"] | None,
  lengths: Int[Array, "B"] | None,
) -> Float[Array, "B N D"]:
  """The last N inputs up to the last valid token, of its document only."""
  size, length = tail.shape[1], x.shape[1]
  joined = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
  if lengths is None:
    last = joined[:, length:]
    newest = None if history is None else history[:, -1:]
  else:
    index = lengths[:, None] + jnp.arange(size, dtype=lengths.dtype)[None]
    last = jnp.take_along_axis(joined, index[..., None], axis=1)
    newest = None
    if history is not None:
      at = jnp.maximum(lengths - 1, 0)[:, None]
      newest = jnp.take_along_axis(history, at, axis=1)
      # A row without a new token keeps its tail.
      newest = jnp.where(lengths[:, None] > 0, newest, size)
  if newest is not None:
    age = jnp.arange(size - 1, -1, -1, dtype=jnp.int32)[None]
    last = jnp.where(
      (newest >= age)[..., None], last, jnp.zeros((), last.dtype)
    )
  return last.astype(tail.dtype)
