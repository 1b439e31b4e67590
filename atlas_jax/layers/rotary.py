"""Rotary position embedding (arXiv 2104.09864, section 3.2.2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.memory.config import state_dtype


def rotate(
  x: Float[Array, "B T H K"], position: Int[Array, "#B T"], base: float
) -> Float[Array, "B T H K"]:
  """Turns pairs of channels by angles that grow with the position.

  Channels i and i + K / 2 are a pair (the "rotate half" layout of Llama), which
  turns by `position * base ** (-2 i / K)`. The product of a query and a key
  then depends on their distance only; lengths stay.

  Args:
    x: Queries or keys, K even.
    position: Of each token in its document. Angles are float32 for narrower
      types: at position 2^20 the fastest pair is off by up to 0.03 radian.
    base: Sets the slowest pair's speed.

  Returns:
    The turned vectors in x's type.
  """
  dtype = state_dtype(x.dtype)
  half = x.shape[-1] // 2
  speed = base ** (-jnp.arange(half, dtype=dtype) / half)
  angle = position.astype(dtype)[..., None] * speed[None, None]
  cosine, sine = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
  first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
  turned = jnp.concatenate(
    [first * cosine - second * sine, second * cosine + first * sine], axis=-1
  )
  return turned.astype(x.dtype)
