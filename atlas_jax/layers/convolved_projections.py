"""Projections that pass through a short causal convolution and SiLU."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.convolution import Convolution
from atlas_jax.layers.initial import Source
from atlas_jax.layers.matrix_mixer import split_heads
from atlas_jax.memory import state_dtype
from atlas_jax.memory.numerics import unit

# The last inputs of every convolution, oldest first, by name [B, N, width].
Tails = dict[str, Float[Array, "B N width"]]


class ConvolvedProjections(nnx.Module):
  """`SiLU(convolution(projection))`, for some projections of a layer by name.

  Args:
    widths: Channels of every projection.
    taps: Length of the convolutions, the current token included.
    scale: Factor on their starting weights.
    dtype: Type of activations.
    param_dtype: Type of the parameters.
    rngs: Source of the starting weights.

  Raises:
    UserError: There are no taps.
  """

  def __init__(
    self,
    widths: dict[str, int],
    taps: int,
    *,
    scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    if taps < 1:
      raise UserError(f"conv_width {taps}: use 1 or more taps")
    self.dtype = jnp.dtype(dtype)
    self.by_name = nnx.Dict(
      {
        name: Convolution(
          taps, width, scale=scale, param_dtype=param_dtype, rngs=rngs
        )
        for name, width in widths.items()
      }
    )

  def init_tails(self, batch: int) -> Tails:
    """The tails of `batch` rows before their first token."""
    shapes = {name: x.kernel.shape for name, x in self.by_name.items()}
    return {
      name: jnp.zeros((batch, taps - 1, width), self.dtype)
      for name, (taps, width) in shapes.items()
    }

  def __call__(
    self,
    projected: dict[str, Float[Array, "B T width"]],
    tails: Tails | None,
    arrangement: Arrangement,
  ) -> tuple[dict[str, Float[Array, "B T width"]], Tails]:
    """Convolves projections of arranged tokens.

    Args:
      projected: Every projection by name.
      tails: Where to go on; None: a beginning.
      arrangement: Where padding and documents are.

    Returns:
      What comes out by name, and the tails after the last token.
    """
    arrays, after = {}, {}
    for name, convolution in self.by_name.items():
      y, after[name] = convolution(
        projected[name],
        None if tails is None else tails[name],
        history=arrangement.history,
        lengths=arrangement.lengths,
      )
      arrays[name] = jax.nn.silu(y)
    return arrays, after


def unit_heads(
  x: Float[Array, "B T H*K"], width: int, epsilon: float
) -> Float[Array, "B T H K"]:
  """Heads of this width, each of length 1, in x's type.

  Args:
    x: Queries or keys of all heads.
    width: K.
    epsilon: Length below which a head is not stretched to length 1.
  """
  wide = split_heads(x, width).astype(state_dtype(x.dtype))
  return unit(wide, epsilon=epsilon).astype(x.dtype)
