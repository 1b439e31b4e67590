"""Root-mean-square normalisation (arXiv 1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax import memory as am


class RMSNorm(nnx.Module):
  """`y = scale * x / sqrt(mean(x^2) + epsilon)`, computed in float32.

  The mean runs over the last axis; the scale has the whole shape given, so
  that `(heads, width)` normalises every head by itself with a scale of its
  own. Zero stays zero.

  Args:
    shape: Trailing axes of x, which the scale covers; starts at 1.
    epsilon: Added to the mean square.
    param_dtype: Type of the scale.
  """

  def __init__(
    self,
    shape: int | tuple[int, ...],
    *,
    epsilon: float = 1e-6,
    param_dtype: DTypeLike = jnp.float32,
  ):
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones(shape, param_dtype))

  def __call__(
    self, x: Float[Array, "*batch width"]
  ) -> Float[Array, "*batch width"]:
    """Normalises x and returns it in its own type."""
    wide = x.astype(am.state_dtype(x.dtype))
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = self.scale[...].astype(wide.dtype)
    normal = wide * jax.lax.rsqrt(square + self.epsilon)
    return (normal * jnp.broadcast_to(scale, normal.shape)).astype(x.dtype)
