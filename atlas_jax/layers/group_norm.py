"""Normalisation of every head by its own mean and variance."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.memory import state_dtype
from atlas_jax.memory.numerics import unit


class GroupNorm(nnx.Module):
  """`y = scale (x - mean) / sqrt(variance + epsilon) + bias`, in float32.

  Mean and variance run over the last axis, a group (arXiv 1803.08494). Squares
  of numbers of any size fit: the largest is divided out first.

  Args:
    shape: Groups and their width, which scale and bias cover; bias starts at 0.
    epsilon: Added to the variance.
    start: Of the scale.
    param_dtype: Type of scale and bias.
  """

  def __init__(
    self,
    shape: tuple[int, int],
    *,
    epsilon: float,
    start: float = 1.0,
    param_dtype: DTypeLike = jnp.float32,
  ):
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.full(shape, start, param_dtype))
    self.bias = nnx.Param(jnp.zeros(shape, param_dtype))

  def __call__(self, x: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
    """Normalises x and returns it at least in float32."""
    x = x.astype(state_dtype(x.dtype))
    length = x.shape[-1] ** 0.5
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = length * unit(x, epsilon=length * self.epsilon**0.5)
    scale, bias = (
      parameter[...].astype(x.dtype)[None, None]
      for parameter in (self.scale, self.bias)
    )
    return scale * x + bias
