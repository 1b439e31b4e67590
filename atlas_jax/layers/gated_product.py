"""Where two branches meet: one gates the other."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.rms_norm import RMSNorm


class GatedProduct(nnx.Module):
  """`output(RMSNorm(y) * SiLU(RMSNorm(m)))`.

  The non-linear gating of arXiv 2501.00663, section 4.2: both branches are
  normalised with learned weights, then a non-linearity.

  Args:
    dim: Width of both branches and of the output.
    norm_epsilon: Of the norms.
    scale: Factor on the starting weights of the output projection.
    dtype: Type of activations.
    param_dtype: Type of the parameters.
    rngs: Source of the starting weights.
  """

  def __init__(
    self,
    dim: int,
    *,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    norm = lambda: RMSNorm(dim, epsilon=norm_epsilon, param_dtype=param_dtype)
    self.branch_norm = norm()
    self.gate_norm = norm()
    self.output = Linear(
      dim, dim, scale=scale, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )

  def __call__(
    self, y: Float[Array, "*batch D"], m: Float[Array, "*batch D"]
  ) -> Float[Array, "*batch D"]:
    """Gates y by m; the output has y's type."""
    gate = jax.nn.silu(self.gate_norm(m)).astype(y.dtype)
    return self.output(self.branch_norm(y) * gate).astype(y.dtype)
