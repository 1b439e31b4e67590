"""One block of a model: a mixer and a feed-forward layer, each residual."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.memory_mixer import (
  MemoryMixer,
  MixerOutput,
  MixerState,
)
from atlas_jax.layers.rms_norm import RMSNorm


class Block(nnx.Module):
  """`x <- x + mixer(norm(x))`, then `x <- x + mlp(norm(x))`.

  Args:
    dim: Width of x.
    mixer: Mixes tokens.
    mlp: Changes each token by itself and leaves zero at zero.
    norm_epsilon: Of the two norms.
    param_dtype: Type of the norms' scales.
  """

  def __init__(
    self,
    dim: int,
    mixer: MemoryMixer,
    mlp: Callable[[Array], Array],
    *,
    norm_epsilon: float = 1e-6,
    param_dtype: DTypeLike = jnp.float32,
  ):
    self.mixer_norm = RMSNorm(
      dim, epsilon=norm_epsilon, param_dtype=param_dtype
    )
    self.mixer = mixer
    self.mlp_norm = RMSNorm(dim, epsilon=norm_epsilon, param_dtype=param_dtype)
    self.mlp = mlp

  def __call__(
    self,
    x: Float[Array, "B T D"],
    *,
    state: MixerState | None = None,
    arrangement: Arrangement | None = None,
  ) -> MixerOutput:
    """Applies the block to a sequence, or the next part of one.

    Args:
      x: Inputs, arranged; 0 at padding, and so is the output.
      state: Where to go on; None is a fresh memory.
      arrangement: Padding and documents (`atlas_jax.layers.arrange`). None is
        neither, for a call that goes on from `state` as well.

    Returns:
      As the mixer, with the block's output.
    """
    out = self.mixer(self.mixer_norm(x), state=state, arrangement=arrangement)
    x = x + out.y
    return out._replace(y=x + self.mlp(self.mlp_norm(x)))

  def step(
    self,
    x: Float[Array, "B D"],
    state: MixerState,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], MixerState]:
    """Applies the block to one token per row; arguments as of the mixer."""
    y, state = self.mixer.step(self.mixer_norm(x), state, valid=valid)
    x = x + y
    return x + self.mlp(self.mlp_norm(x)), state
