"""Asking a memory layer without writing to it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers.delta_mixer import DeltaNetMixer
from atlas_jax.layers.gla_mixer import GLAMixer
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.linear_attention_mixer import LinearAttentionMixer
from atlas_jax.layers.mamba2_mixer import Mamba2Mixer
from atlas_jax.layers.memory_mixer import MemoryMixer
from atlas_jax.layers.mixer import Mixer
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.memory.numerics import HIGHEST, unit
from atlas_jax.memory.read import read

# Those whose read-out is M q, whatever the place of the token.
_Matrix = DeltaNetMixer | GLAMixer | LinearAttentionMixer | Mamba2Mixer


class Widths(NamedTuple):
  """Heads of a memory, and widths of their queries and answers."""

  heads: int
  key: int
  value: int


class Recall(nnx.Module):
  """`h = RMSNorm(M(q))`, `q = SiLU(x W)` at length 1 per head.

  M stands as the state has it. The norm is per head, as that of the memory's
  own read-outs. If the answers of all heads are not D wide, a projection
  follows.

  Args:
    memory: The layer to be asked; the module keeps its widths only.
    scale: Factor on the starting weights.
    norm_epsilon: Of the norm.
    dtype: Type of activations.
    param_dtype: Type of the parameters.
    rngs: Source of the starting weights.

  Raises:
    UserError: The memory cannot be asked without writing to it, as its answers
      depend on more than one state of weights and a query.
  """

  def __init__(
    self,
    memory: Mixer,
    *,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    self.widths = _widths(memory)
    heads, key, value = self.widths

    linear = functools.partial(
      Linear, scale=scale, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.query = linear(memory.dim, heads * key)
    self.norm = RMSNorm(
      (heads, value), epsilon=norm_epsilon, param_dtype=param_dtype
    )
    wide = heads * value
    self.output = None if wide == memory.dim else linear(wide, memory.dim)

  def __call__(
    self, memory: Mixer, state: Any, x: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """What the memory answers to each token.

    Args:
      memory: The layer that was given at the start.
      state: Its state between two of its chunks.
      x: The tokens that ask.

    Returns:
      Rows in x's type.
    """
    heads, key, _ = self.widths
    query = jax.nn.silu(self.query(x)).reshape(*x.shape[:2], heads, key)
    query = unit(query.astype(am.state_dtype(query.dtype)))
    if isinstance(memory, MemoryMixer):
      answer = read(
        memory.definition,
        memory.memory_params(),
        memory.qk_length * query,
        state.memory.weights,
      )
    else:
      answer = jnp.einsum(
        "bhvk,bthk->bthv", state.memory, query, precision=HIGHEST
      )
    h = self.norm(answer).reshape(*x.shape[:2], -1).astype(x.dtype)
    return h if self.output is None else self.output(h).astype(x.dtype)


def _widths(memory: Mixer) -> Widths:
  """The widths of a memory that can be asked."""
  if isinstance(memory, MemoryMixer):
    width = memory.dim // memory.heads
    return Widths(memory.heads, width, width)
  # A normalised read-out is a quotient: its norm is None.
  if isinstance(memory, _Matrix) and memory.norm is not None:
    return Widths(memory.heads, memory.key_width, memory.value_width)
  raise UserError(
    f"{type(memory).__name__} cannot be asked without writing to it: choose "
    "a deep memory, say titans, or linear_attention, gla, mamba2, deltanet or "
    "gated_deltanet"
  )
