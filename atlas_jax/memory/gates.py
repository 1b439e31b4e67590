"""Gates of a memory, and the matrices that they form over one chunk."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.memory.numerics import matmul

# Stands for log 0: small enough that its exponential is exactly 0, large
# enough that a chunk's sum of it is still a finite float32.
LOWEST_LOG = -1e30


class Gates(NamedTuple):
  """Gates of every token, computed by the layer from x_t.

  Attributes:
    log_decay: log of the kept fraction alpha, <= 0, one per decay group; G is
      0 without retention. -inf (forget all) is allowed.
    log_momentum: log of the momentum factor theta, <= 0; ignored without
      momentum.
    rate: step size eta >= 0.
    window: gamma >= 0; entry j weighs the token j valid positions before t.
    threshold: of a `gated` objective, >= 0; None for all others.
    matrix_rate: factor >= 0 on the rate, one for each of the memory's matrices
      in their order, for `ChunkMuon`; None for all others.
  """

  log_decay: Float[Array, "B T H G"]
  log_momentum: Float[Array, "B T H"]
  rate: Float[Array, "B T H"]
  window: Float[Array, "B T H W"]
  threshold: Float[Array, "B T H"] | None = None
  matrix_rate: Float[Array, "B T H M"] | None = None


def lower_triangle(size: int, dtype, offset: int = 0) -> Float[Array, "b b"]:
  """1 where column <= row + offset, from iotas (a kernel has no constants)."""
  row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
  column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
  return (column <= row + offset).astype(dtype)


def decay_products(log_gate: Float[Array, "b"]) -> Float[Array, "b b"]:
  """`L[t, n]`: product of gates after n up to t; 0 above the diagonal."""
  lower = lower_triangle(log_gate.shape[0], log_gate.dtype)
  return jnp.exp(log_decay_products(log_gate)) * lower


def log_decay_products(log_gate: Float[Array, "b"]) -> Float[Array, "b b"]:
  """The exponents of `decay_products`; 0 above the diagonal.

  Each exponent is summed on its own, as a product of triangular matrices: the
  difference of two cumulative sums would be NaN at a gate of 0 and lose the
  small decays beside large ones.
  """
  size = log_gate.shape[0]
  dtype = log_gate.dtype
  lower = lower_triangle(size, dtype)
  after = 1.0 - lower  # [j, n] is 1 where j > n once transposed
  log_gate = jnp.maximum(log_gate, LOWEST_LOG)
  return matmul(lower, log_gate[:, None] * after.T) * lower


def decay_from_start(log_gate: Float[Array, "b"]) -> Float[Array, "b"]:
  """`l[t]`: product of all gates of the chunk up to and including t."""
  size = log_gate.shape[0]
  log_gate = jnp.maximum(log_gate, LOWEST_LOG)
  lower = lower_triangle(size, log_gate.dtype)
  return jnp.exp(matmul(lower, log_gate[:, None])[:, 0])


def window_matrix(
  window: Float[Array, "b W"], seen: Int[Array, ""]
) -> Float[Array, "b t"]:
  """Banded `Gamma[t, i]` over the chunk and the W - 1 tokens before it.

  Column i stands for the token `t + W - 1 - i` positions before row t. Columns
  of the tail that no token has filled yet (`seen` counts the filled ones from
  the right) are zero.
  """
  rows, width = window.shape
  columns = rows + width - 1
  place = jax.lax.broadcasted_iota(jnp.int32, (width, columns), 0)
  column = jax.lax.broadcasted_iota(jnp.int32, (width, columns), 1)
  # Row 0's place for every row, oldest gate first ...
  newest_last = (column == width - 1 - place).astype(window.dtype)
  band = matmul(window, newest_last)
  # ... then row t moves right by t, one power of two at a time. A kernel has no
  # reversal, and no reshape that would skew the rows at once.
  row = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
  shift = 1
  while shift < rows:
    gap = jnp.zeros((rows, shift), band.dtype)
    moved = jnp.concatenate([gap, band[:, :-shift]], axis=1)
    band = jnp.where((row & shift) != 0, moved, band)
    shift *= 2
  return band * filled_columns(columns, width, seen, window.dtype)[None]


def filled_columns(
  columns: int, width: int, seen: Int[Array, ""], dtype
) -> Float[Array, "t"]:
  """1 for the chunk's own columns and for the filled part of the tail."""
  column = jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)[0]
  return (column >= width - 1 - seen).astype(dtype)
