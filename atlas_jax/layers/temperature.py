"""A learned factor on the products of unit vectors."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.memory.numerics import unit

# A share of exp(8) = 2981 times another is as far apart as a float32 sum over
# many thousand tokens should bring them.
LARGEST_TEMPERATURE = 8.0


class Temperature(nnx.Module):
  """`tau = most sigmoid(z)`, one per head, half of the most at the start.

  Queries and keys are both multiplied by its root, so that keys meet keys as
  queries do.

  Args:
    heads: Number of factors.
    most: What tau stays below.
    epsilon: Length below which a vector is not stretched to length 1.
    param_dtype: Type of z.

  Raises:
    UserError: A temperature that is not positive.
  """

  def __init__(
    self,
    heads: int,
    most: float,
    *,
    epsilon: float = 1e-6,
    param_dtype: DTypeLike = jnp.float32,
  ):
    if not 0 < most < float("inf"):
      raise UserError(f"temperature {most}: use a positive number")
    self.most = most
    self.epsilon = epsilon
    self.logit = nnx.Param(jnp.zeros((heads,), param_dtype))

  def unit(self, x: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
    """x with every vector of length 1."""
    wide = x.astype(am.state_dtype(x.dtype))
    return unit(wide, epsilon=self.epsilon).astype(x.dtype)

  def __call__(self, x: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
    """`sqrt(tau) x`; H is a multiple of the number of heads."""
    dtype = am.state_dtype(x.dtype)
    tau = self.most * jax.nn.sigmoid(self.logit[...].astype(dtype))
    root = jnp.repeat(jnp.sqrt(tau), x.shape[2] // tau.shape[0])
    return (x.astype(dtype) * root[None, None, :, None]).astype(x.dtype)
