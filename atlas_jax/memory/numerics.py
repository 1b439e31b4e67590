"""Norms and matmuls that stay finite and say their precision."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# A TPU rounds float32 matmul operands to bfloat16 unless told otherwise, and no
# test on another machine would see it. Products over gates, masks and decays
# therefore always run at the highest precision.
HIGHEST = jax.lax.Precision.HIGHEST

# Relative error that the safe norm below adds so that its slope exists at zero.
_NORM_SLACK = 1e-12


def matmul(a: Array, b: Array, precision=HIGHEST) -> Array:
  """`a @ b` over the last two axes at a named precision."""
  return jnp.matmul(a, b, precision=precision)


def safe_norm(x: Array, axis, floor: float = 1e-12) -> Array:
  """Euclidean norm over `axis`, kept as size one, with a slope at zero.

  The largest magnitude is divided out first, so neither huge nor tiny entries
  overflow or vanish when squared. At `x = 0` the value is `1e-6 * floor`.

  Args:
    x: any float array.
    axis: axis or axes to reduce.
    floor: smallest scale that is divided out.
  """
  largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
  scale = jax.lax.stop_gradient(jnp.maximum(largest, floor))
  square = jnp.sum(jnp.square(x / scale), axis=axis, keepdims=True)
  return scale * jnp.sqrt(square + _NORM_SLACK)


def unit(
  x: Float[Array, "*shape"],
  axis: int | tuple[int, ...] = -1,
  epsilon: float = 1e-6,
) -> Float[Array, "*shape"]:
  """`x / sqrt(|x|^2 + epsilon^2)` over `axis`, without overflow.

  Zero stays zero with a finite slope of `1 / epsilon`.

  Args:
    x: any float array.
    axis: axis or axes that form one vector.
    epsilon: length below which a vector is no longer stretched to one.
  """
  largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
  scale = jax.lax.stop_gradient(jnp.maximum(largest, epsilon))
  scaled = x / scale
  square = jnp.sum(jnp.square(scaled), axis=axis, keepdims=True)
  return scaled * jax.lax.rsqrt(square + jnp.square(epsilon / scale))


def cap_norm(x: Array, radius: float, axis) -> Array:
  """Shrinks `x` so that its norm over `axis` is at most `radius`.

  Written as `radius / max(norm, radius)`: the form `min(1, radius / norm)` has
  no finite slope at zero.
  """
  return x * (radius / jnp.maximum(safe_norm(x, axis), radius))
