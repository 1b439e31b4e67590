"""Unit lower triangular systems: what tokens of a chunk erase of each other.

A delta rule writes what the memory lacks, so that a token's write depends on
all earlier ones of its chunk: `u_t = b_t (r_t - sum_{n<t} L[t, n] u_n)`. Both
solvers here work for repeated keys, where a series in powers of L would first
grow to astronomic sizes and then cancel.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory.gates import lower_triangle
from atlas_jax.memory.numerics import matmul

# Smaller matrices are multiplied element by element: a call of a matrix
# product for each costs a CPU more than the numbers in it.
_SMALLEST_MATMUL = 8


@jax.custom_jvp
def unit_lower_inverse(lower: Float[Array, "C C"]) -> Float[Array, "C C"]:
  """Inverse of `I + lower` by doubling blocks.

  With the inverses of two neighbouring blocks A and D on the diagonal, that of
  `[[A, 0], [B, D]]` has `-D^-1 B A^-1` in its corner. Each of the log2 C rounds
  is one batch of small products; all of them together cost 2/3 C^3
  multiplications.

  Args:
    lower: Strictly lower triangular; what stands elsewhere must be 0, as must
      its tangents.
  """
  size = lower.shape[-1]
  full = 1 << (size - 1).bit_length()
  lower = jnp.pad(lower, ((0, full - size), (0, full - size)))
  inverse = jnp.ones((full, 1, 1), lower.dtype)
  block = 1
  while block < full:
    pairs = full // (2 * block)
    corners = lower.reshape(pairs, 2, block, pairs, 2, block)[:, 1, :, :, 0]
    corners = jnp.moveaxis(jnp.diagonal(corners, axis1=0, axis2=2), -1, 0)
    above, below = inverse[0::2], inverse[1::2]
    corner = -_product(below, _product(corners, above))
    inverse = jnp.concatenate(
      [
        jnp.concatenate([above, jnp.zeros_like(above)], axis=2),
        jnp.concatenate([corner, below], axis=2),
      ],
      axis=1,
    )
    block *= 2
  return inverse[0, :size, :size]


@unit_lower_inverse.defjvp
def _inverse_slope(
  lowers: tuple[Array], slopes: tuple[Array]
) -> tuple[Array, Array]:
  """`dX = -X dL X`, in place of the slopes of every round."""
  inverse = unit_lower_inverse(*lowers)
  return inverse, -matmul(inverse, matmul(*slopes, inverse))


def _product(a: Float[Array, "N C C"], b: Float[Array, "N C C"]) -> Array:
  """`a @ b` of every pair."""
  size = a.shape[-1]
  if size >= _SMALLEST_MATMUL:
    return matmul(a, b)
  # Term by term: in one array of all products, under several vmaps, there are
  # more axes than XLA's kernels for CPUs take.
  terms = (a[:, :, j, None] * b[:, None, j] for j in range(size))
  return functools.reduce(jnp.add, terms)


@jax.custom_vjp
def solve_columns(
  lower: Float[Array, "C C"],
  rate: Float[Array, "C V"],
  right: Float[Array, "C V"],
) -> Float[Array, "C V"]:
  """u with `u_t = rate_t * (right_t - sum_{n<t} lower[t, n] u_n)`.

  Each column has rates, and so a triangular matrix, of its own. They are
  solved side by side, token by token: an inverse of each would cost more than
  the recurrence itself. The backward pass is the transposed substitution.

  Args:
    lower: Strictly lower triangular; what stands elsewhere must be 0.
    rate: One per token and column.
    right: Right-hand sides.
  """

  def token(
    solved: Float[Array, "C V"], inputs: tuple[Array, Array, Array, Array]
  ) -> tuple[Float[Array, "C V"], None]:
    index, row, rate, right = inputs
    known = matmul(row[None], solved)
    return _with_row(solved, rate[None] * (right[None] - known), index), None

  index = jnp.arange(right.shape[0], dtype=jnp.int32)
  start = jnp.zeros_like(right)
  return jax.lax.scan(token, start, (index, lower, rate, right))[0]


def _forward(
  lower: Array, rate: Array, right: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
  solved = solve_columns(lower, rate, right)
  return solved, (lower, rate, right, solved)


def _backward(
  kept: tuple[Array, Array, Array, Array], slope: Float[Array, "C V"]
) -> tuple[Array, Array, Array]:
  """Slopes by lower, rate and right, from those by the solution."""
  lower, rate, right, solved = kept

  # by_u_n = slope_n - sum_{t>n} lower[t, n] rate_t by_u_t, from the last on.
  def token(
    by_right: Float[Array, "C V"], inputs: tuple[Array, Array, Array, Array]
  ) -> tuple[Float[Array, "C V"], Float[Array, "1 V"]]:
    index, column, rate, slope = inputs
    by_solved = slope[None] - matmul(column[None], by_right)
    return _with_row(by_right, rate[None] * by_solved, index), by_solved[0]

  index = jnp.arange(right.shape[0], dtype=jnp.int32)
  by_right, by_solved = jax.lax.scan(
    token,
    jnp.zeros_like(right),
    (index, lower.T, rate, slope),
    reverse=True,
  )
  by_rate = by_solved * (right - matmul(lower, solved))
  strict = lower_triangle(lower.shape[0], lower.dtype, offset=-1)
  by_lower = -matmul(by_right, solved.T) * strict
  return by_lower, by_rate, by_right


solve_columns.defvjp(_forward, _backward)


def _with_row(
  rows: Float[Array, "C V"], row: Float[Array, "1 V"], index: Array
) -> Float[Array, "C V"]:
  return cast(Array, jax.lax.dynamic_update_slice_in_dim(rows, row, index, 0))
