"""Logits of gates from a layer's input."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.layers.initial import Source, normal
from atlas_jax.memory import state_dtype
from atlas_jax.memory.numerics import HIGHEST


class GateProjection(nnx.Module):
  """`z = x kernel + bias`, or `z = x down kernel + bias`, at least float32.

  Products are at the highest precision: a decay near 1 multiplies thousands of
  times, and its rounding error with it. Matrices start as normal variables of
  variance `scale^2 / inputs`.

  Args:
    dim: Width of x.
    outputs: Width of z.
    rank: Width between the two matrices; 0: there is only one.
    bias: What the bias starts at, the same for all outputs or one for each;
      None: there is none.
    scale: Factor on the starting weights.
    param_dtype: Type of the parameters.
    rngs: Source of the starting weights.
  """

  def __init__(
    self,
    dim: int,
    outputs: int,
    *,
    rank: int = 0,
    bias: float | Float[Array, "outputs"] | None = 0.0,
    scale: float = 1.0,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    def matrix(rows: int, columns: int) -> nnx.Param:
      start = normal(rngs, (rows, columns), scale / rows**0.5, param_dtype)
      return nnx.Param(start)

    self.down = matrix(dim, rank) if rank else None
    self.kernel = matrix(rank or dim, outputs)
    start = None
    if bias is not None:
      start = jnp.broadcast_to(jnp.asarray(bias, param_dtype), (outputs,))
    self.bias = None if start is None else nnx.Param(start)

  def __call__(
    self, x: Float[Array, "*batch dim"]
  ) -> Float[Array, "*batch outputs"]:
    """The logits, at least float32."""
    x = x.astype(state_dtype(x.dtype))
    if self.down is not None:
      x = jnp.dot(x, self.down[...].astype(x.dtype), precision=HIGHEST)
    z = jnp.dot(x, self.kernel[...].astype(x.dtype), precision=HIGHEST)
    if self.bias is None:
      return z
    bias = self.bias[...].astype(x.dtype)
    return z + bias.reshape(*[1] * (z.ndim - 1), -1)
