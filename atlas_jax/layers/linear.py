"""A linear layer without bias."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.layers.initial import Source, normal


class Linear(nnx.Module):
  """`y = x kernel` in the type of activations.

  The kernel starts as a normal variable of variance `scale^2 / inputs`, so
  that at scale 1 outputs are as large as inputs.

  Args:
    inputs: Width of x.
    outputs: Width of y.
    scale: Factor on the starting weights.
    dtype: Type in which the product is computed and returned.
    param_dtype: Type of the kernel.
    rngs: Source of the starting weights.
  """

  def __init__(
    self,
    inputs: int,
    outputs: int,
    *,
    scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    self.dtype = jnp.dtype(dtype)
    self.kernel = nnx.Param(
      normal(rngs, (inputs, outputs), scale / inputs**0.5, param_dtype)
    )

  def __call__(
    self, x: Float[Array, "*batch inputs"]
  ) -> Float[Array, "*batch outputs"]:
    """Multiplies the last axis of x by the kernel."""
    return jnp.dot(x.astype(self.dtype), self.kernel[...].astype(self.dtype))
