"""What mixers around a matrix memory have in common."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.mixer import Mixer
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.memory import dispatch, state_dtype


class MatrixState(NamedTuple):
  """The memory after the last token; rows are independent."""

  memory: Float[Array, "B H V K"]


class MatrixMixer(Mixer):
  """Projections to and from heads that each own a matrix memory [V, K].

  A subclass sets the norm of its read-outs and implements `init_state` and
  `mix`. Documents may start anywhere.

  Args:
    dim: Width of x.
    heads: Memories side by side.
    key_width: Width K of queries and keys.
    value_width: Width V of values and read-outs.
    key_heads: Queries and keys per token; each serves heads / key_heads
      memories. 0: one for every memory.
    gated: Whether read-outs are multiplied by a gate.
    scale: Factor on the starting weights of the projections.
    output_scale: Further factor on those of the output projection.
    dtype: Type of activations. Memories, decays and norms are at least float32.
    param_dtype: Type of the parameters.
    implementation: "auto", "xla", or "reference": token by token.
    rngs: Source of the starting weights.

  Raises:
    UserError: An unknown implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    key_width: int,
    value_width: int,
    key_heads: int = 0,
    gated: bool = True,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    dispatch.resolve(implementation)
    self.dim = dim
    self.heads = heads
    self.key_width = key_width
    self.value_width = value_width
    self.dtype = jnp.dtype(dtype)
    self.implementation = implementation

    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    keys = (key_heads or heads) * key_width
    values = heads * value_width
    self.query = linear(dim, keys, scale=scale)
    self.key = linear(dim, keys, scale=scale)
    self.value = linear(dim, values, scale=scale)
    self.output_gate = linear(dim, values, scale=scale) if gated else None
    self.output = linear(values, dim, scale=scale * output_scale)

  def empty(self, batch: int) -> Float[Array, "B H V K"]:
    """The memories of rows before their first token."""
    shape = (batch, self.heads, self.value_width, self.key_width)
    return jnp.zeros(shape, state_dtype(self.dtype))

  def projected(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
    """Queries and keys [B, T, H, K], and values [B, T, H, V]."""
    return (
      split_heads(self.query(x), self.key_width),
      split_heads(self.key(x), self.key_width),
      split_heads(self.value(x), self.value_width),
    )

  def read_out(
    self, y: Float[Array, "B T H V"], x: Float[Array, "B T D"], norm: RMSNorm
  ) -> Float[Array, "B T D"]:
    """`(norm(y) * SiLU(x W_g)) W_o`, in x's type."""
    y = norm(y).reshape(*x.shape[:2], -1).astype(self.dtype)
    if self.output_gate is not None:
      y = y * jax.nn.silu(self.output_gate(x))
    return self.output(y).astype(x.dtype)


def split_heads(
  x: Float[Array, "B T H*K"], width: int
) -> Float[Array, "B T H K"]:
  """The last axis as heads of this width."""
  return x.reshape(*x.shape[:-1], -1, width)


def width_of(dim: int, heads: int, expand: float, what: str) -> int:
  """The width of one of the heads that together have `expand * dim` channels.

  Raises:
    UserError: There is no such whole number.
  """
  width = expand * dim / heads if heads > 0 else 0
  if width < 1 or width != int(width):
    raise UserError(
      f"{heads} heads do not divide the {expand * dim:g} channels of {what}: "
      f"the model's width {dim} times {expand:g}"
    )
  return int(width)
