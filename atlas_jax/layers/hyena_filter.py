"""The filters of Hyena: a small network of the distance, under a window."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers.initial import Source, normal
from atlas_jax.layers.linear import Linear

# The window falls to this share of its start ...
_TARGET = 1e-2
# ... after these shares of the longest distance, in the slowest and the fastest
# channel.
_SLOWEST, _FASTEST = 1.5, 0.3
_HIDDEN_LAYERS = 3


class HyenaFilter(nnx.Module):
  """`h_t = MLP(z_t) exp(-t |delta|)`, t a distance over the longest one.

  arXiv 2302.10866, section 3.3: z_t holds t, and cosines and sines of t at
  frequencies up to `features / 2`; the network has three hidden layers with
  `sin(frequency * x)` as activation; delta differs by channel and is fixed.

  Args:
    length: Distances that there are, 0 to length - 1.
    dim: Channels.
    features: Size of z, odd.
    width: Of the network.
    frequency: Start of the activation's, one for each hidden channel; 1 as in
      the public code of the layer's authors. Rounding errors grow with about
      its cube: at 10 float32 filters are known to 1e-5 only.
    param_dtype: Type of the parameters. Filters are at least float32.
    rngs: Source of the starting weights.

  Raises:
    UserError: Sizes that cannot be.
  """

  def __init__(
    self,
    length: int,
    dim: int,
    *,
    features: int = 33,
    width: int = 64,
    frequency: float = 1.0,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    if min(length, dim, width) < 1:
      raise UserError(
        f"filters of length {length} for {dim} channels by a network of width "
        f"{width}: use 1 or more"
      )
    if features < 3 or features % 2 == 0:
      raise UserError(f"{features} features of a distance: use 3, 5, 7, ...")
    self.length = length
    self.dim = dim
    self.features = features
    self.dtype = am.state_dtype(jnp.dtype(param_dtype))

    linear = functools.partial(
      Linear,
      scale=3**-0.5,
      dtype=self.dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    sizes = (features,) + (width,) * _HIDDEN_LAYERS
    self.hidden = nnx.List([linear(n, width) for n in sizes[:-1]])
    self.bias = nnx.List(
      [
        nnx.Param(normal(rngs, (width,), (3 * n) ** -0.5, param_dtype))
        for n in sizes[:-1]
      ]
    )
    self.frequency = nnx.Param(jnp.full((width,), frequency, param_dtype))
    self.out = linear(width, dim)

  def __call__(self, taps: int) -> Float[Array, "L D"]:
    """The filters at distances below `taps`, as far as there are any."""
    place = jnp.arange(min(taps, self.length), dtype=self.dtype)[:, None]
    bands = (self.features - 1) // 2
    tone = jnp.linspace(1e-4, max(bands - 1, 1e-4), bands, dtype=self.dtype)
    angle = (2 * math.pi / self.length) * place * tone[None]
    distance = place / max(1, self.length - 1)
    h = jnp.concatenate([distance, jnp.cos(angle), -jnp.sin(angle)], axis=-1)
    frequency = self.frequency[...].astype(self.dtype)[None]
    # The activations are steep: rounded products would be other filters.
    with jax.default_matmul_precision("highest"):
      for layer, bias in zip(self.hidden, self.bias, strict=True):
        h = layer(h) + bias[...].astype(self.dtype)[None]
        h = jnp.sin(frequency * h)
      h = self.out(h)
    fall = -math.log(_TARGET)
    delta = jnp.linspace(
      fall / _SLOWEST, fall / _FASTEST, self.dim, dtype=self.dtype
    )
    return h * jnp.exp(-distance * delta[None])
