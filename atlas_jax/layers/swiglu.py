"""The gated feed-forward layer of Llama (arXiv 2002.05202)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear


class SwiGLU(nnx.Module):
  """`y = (silu(x gate) * (x up)) down`, token by token.

  Args:
    dim: Width of x and y.
    hidden: Width in between.
    scale: Factor on all starting weights.
    output_scale: Further factor on those of `down`.
    dtype: Type of activations.
    param_dtype: Type of the parameters.
    rngs: Source of the starting weights.
  """

  def __init__(
    self,
    dim: int,
    hidden: int,
    *,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.gate = linear(dim, hidden, scale=scale)
    self.up = linear(dim, hidden, scale=scale)
    self.down = linear(hidden, dim, scale=scale * output_scale)

  def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Applies the layer to the last axis."""
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
