"""Causal convolution over time with a filter as long as the sequence.

Plain sequences take one Fourier transform. Packed documents need a filter that
stops where a document begins, which no single transform has: there time is
halved again and again. What crosses the middle of a stretch belongs to the one
document that lies over it, so that two masks and a transform of the stretch
are exact, and all stretches together cost O(T log^2 T).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.memory.numerics import HIGHEST

# Up to this half of a stretch a product of matrices is faster.
_LONGEST_PRODUCT = 32


def long_convolution(
  u: Float[Array, "B T D"],
  kernel: Float[Array, "L D"],
  start: Int[Array, "#B T"] | None = None,
) -> Float[Array, "B T D"]:
  """`y_t = sum_j kernel[t - j] u_j` over the document up to t, by channel.

  Args:
    u: Inputs, float32 or float64, as y and the kernel are; what is large in u
      leaves a rounding error of about 1e-7 (float32) of its size anywhere in
      its row, before it too.
    kernel: Filters; taps from L on are zero.
    start: Where the document of each token begins; its tokens are consecutive.
      None: at 0.
  """
  length = u.shape[1]
  if start is None:
    # A longer kernel would reach around the end.
    kernel = kernel[:length]
    return _transformed(u, kernel, 2 * _power(length))[:, :length]
  size = _power(length)
  u = jnp.pad(u, ((0, 0), (0, size - length), (0, 0)))
  # Places behind the end belong to no document that has tokens.
  start = jnp.pad(start, ((0, 0), (0, size - length)), constant_values=2**30)
  kernel = jnp.pad(kernel[:size], ((0, max(0, size - len(kernel))), (0, 0)))
  y = u * kernel[0][None, None]
  half = 1
  while half < size:
    y = y + _crossing(u, kernel, start, half)
    half *= 2
  return y[:, :length]


def _crossing(
  u: Array, kernel: Array, start: Array, half: int
) -> Float[Array, "B T D"]:
  """What goes from first to second halves of stretches of length 2 half."""
  batch, size, width = u.shape
  whole = 2 * half
  u = u.reshape(batch, size // whole, whole, width)
  start = start.reshape(start.shape[0], size // whole, whole)
  index = jnp.arange(size, dtype=jnp.int32).reshape(1, size // whole, whole)
  # Of the first token after the middle.
  middle = start[..., half, None]
  left = (index[..., :half] >= middle)[..., None]
  left = jnp.where(left, u[..., :half, :], jnp.zeros((), u.dtype))
  if half <= _LONGEST_PRODUCT:
    right = _multiplied(left, kernel[:whole])
  else:
    # Nothing wraps around: from a first to a second half it is under `whole`.
    right = _transformed(left, kernel[:whole], whole)[..., half:, :]
  same = (start[..., half:] == middle)[..., None]
  right = jnp.where(same, right, jnp.zeros((), u.dtype))
  right = jnp.pad(right, ((0, 0), (0, 0), (half, 0), (0, 0)))
  return right.reshape(batch, size, width)


def _multiplied(
  left: Float[Array, "B n half D"], kernel: Float[Array, "2*half D"]
) -> Float[Array, "B n half D"]:
  """What first halves give to second halves, by a matrix for each channel."""
  place = jnp.arange(left.shape[2], dtype=jnp.int32)
  distance = left.shape[2] + place[:, None] - place[None]
  return jnp.einsum("bnjd,tjd->bntd", left, kernel[distance], precision=HIGHEST)


def _transformed(
  u: Float[Array, "*batch T D"], kernel: Float[Array, "L D"], size: int
) -> Float[Array, "*batch size D"]:
  """The circular convolution of this length."""
  u, kernel = jnp.swapaxes(u, -1, -2), kernel.T
  kernel = kernel.reshape(*[1] * (u.ndim - 2), *kernel.shape)
  product = jnp.fft.rfft(u, n=size) * jnp.fft.rfft(kernel, n=size)
  return jnp.swapaxes(jnp.fft.irfft(product, n=size), -1, -2)


def _power(length: int) -> int:
  """The power of two that is not below the length."""
  return 1 << (length - 1).bit_length()
