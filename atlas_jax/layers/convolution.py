"""Short causal convolution over time, one filter per channel.

A filter of few taps is a sum of shifted products: it needs no convolution
primitive, and the same code serves a whole sequence, a continued one, packed
documents and a single token.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from atlas_jax import memory as am
from atlas_jax.layers import tails
from atlas_jax.layers.initial import Source, normal


class Convolution(nnx.Module):
  """Depthwise causal convolution with a tail that continues a sequence.

  `y_t = sum_j kernel[j] x_{t - j}`, where tap j is left out if its token
  belongs to another document. The kernel starts as normal variables of
  variance `scale^2 / taps`.

  Args:
    taps: Length of every filter, the current token included.
    width: Number of channels.
    scale: Factor on the starting weights.
    param_dtype: Type of the kernel [taps, width].
    rngs: Source of the starting weights.
  """

  def __init__(
    self,
    taps: int,
    width: int,
    *,
    scale: float = 1.0,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    self.kernel = nnx.Param(
      normal(rngs, (taps, width), scale / taps**0.5, param_dtype)
    )

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tail: Float[Array, "B N D"] | None = None,
    *,
    history: Int[Array, "B T"] | None = None,
    lengths: Int[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B T D"], Float[Array, "B N D"]]:
    """Convolves and says what the next call has to know.

    Args:
      x: Inputs; rows may be shorter than T, see `lengths`.
      tail: The last N = taps - 1 inputs before x, oldest first; None: zeros,
        the beginning of a sequence.
      history: For each token how many tokens of its document stand before it,
        the tail's included; None: all that there are.
      lengths: Valid tokens at the front of each row; None: all T.

    Returns:
      Outputs in x's type (sums in float32), and the tail after the last valid
      token: the last inputs of its document, zeros where there are none.
    """
    kernel = self.kernel[...]
    y = _convolve(x, tail, kernel, history)
    if tail is None:
      tail = tails.init_tail(kernel.shape[0], x)
    return y.astype(x.dtype), tails.next_tail(x, tail, history, lengths)


def _convolve(
  x: Float[Array, "B T D"],
  tail: Float[Array, "B N D"] | None,
  kernel: Float[Array, "W D"],
  history: Int[Array, "B T"] | None,
) -> Array:
  """The outputs for x, at least float32."""
  dtype = am.state_dtype(x.dtype)
  wide = x.astype(dtype)
  y = wide * kernel[0].astype(dtype)[None, None]
  for j in range(1, kernel.shape[0]):
    shifted = tails.shift(wide, tail, j)
    if history is not None:
      near = (history >= j)[..., None]
      shifted = jnp.where(near, shifted, jnp.zeros((), dtype))
    y = y + shifted * kernel[j].astype(dtype)[None, None]
  return y
