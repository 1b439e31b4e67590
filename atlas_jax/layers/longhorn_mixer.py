"""Longhorn: a matrix memory that takes the implicit step of the delta rule."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.convolution import Convolution
from atlas_jax.layers.gate_projection import GateProjection
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.matrix_mixer import (
  split_heads,
  width_of,
)
from atlas_jax.layers.mixer import Mixer, MixerOutput, mean_over_valid
from atlas_jax.memory import dispatch, state_dtype
from atlas_jax.recurrences import longhorn

# Inputs per channel of the rates' low-rank map, as in Mamba.
_RANK_DIVISOR = 16


class LonghornState(NamedTuple):
  """What later tokens need, at constant size; rows are independent.

  Attributes:
    memory: M after the last token.
    tail: The last inputs of the convolution, oldest first.
  """

  memory: Float[Array, "B H V K"]
  tail: Float[Array, "B N H*V"]


class LonghornMixer(Mixer):
  """`M_t = M_{t-1} - d_t * (M_{t-1} k_t - v_t) k_t^T`, `d = b / (1 + b |k|^2)`.

  arXiv 2407.14207, Eq. 6: every row of M takes the step that minimises
  `|m - m_{t-1}|^2 + b_i (m k_t - v_i)^2`, with a rate b of its own. This is the
  exact rank-one form; the authors' code keeps only the diagonal of `k k^T`.

  All else is as in the authors' code, a Mamba block: `v =
  SiLU(convolution(x W_v) + c)`; queries, keys and rates are functions of v,
  `q = v W_q`, `k = v W_k`, not normalised, and `b = sigmoid(v W_1 W_2 + e)`;
  `y = M_t q_t + D v`, multiplied by `SiLU(x W_z)`, without a norm. Each head
  has queries and keys of its own; 1 head is the paper's layer. Metric:
  `gate_rate`, the mean of d |k|^2, the share of a value that is overwritten.

  Args:
    dim: Width of x.
    heads: Memories side by side.
    expand: Width of all heads' values together, as a multiple of dim.
    state_width: Width K of queries and keys.
    conv_width: Taps of the convolution, the current token included.
    norm_epsilon: Taken for the sake of one signature; there is no norm.
    scale: Factor on the starting weights of projections and convolution.
    output_scale: Further factor on those of the output projection.
    dtype: Type of activations. Memories and rates are at least float32.
    param_dtype: Type of the parameters.
    implementation: "auto", "xla", or "reference": token by token.
    rngs: Source of the starting weights.

  Raises:
    UserError: Heads that do not divide the width of values, no taps or state,
      or an unknown implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    expand: int = 2,
    state_width: int = 16,
    conv_width: int = 4,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    del norm_epsilon
    dispatch.resolve(implementation)
    if state_width < 1 or conv_width < 1:
      raise UserError(
        f"state_width {state_width}, conv_width {conv_width}: use 1 or more"
      )
    self.dim = dim
    self.heads = heads
    self.key_width = state_width
    self.value_width = width_of(dim, heads, expand, "values")
    self.dtype = jnp.dtype(dtype)
    self.implementation = implementation
    inner = heads * self.value_width

    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.value = linear(dim, inner, scale=scale)
    self.convolution = Convolution(
      conv_width, inner, scale=scale, param_dtype=param_dtype, rngs=rngs
    )
    self.convolution_bias = nnx.Param(jnp.zeros((inner,), param_dtype))
    self.query = linear(inner, heads * state_width, scale=scale)
    self.key = linear(inner, heads * state_width, scale=scale)
    self.rate = GateProjection(
      inner,
      inner,
      rank=math.ceil(dim / _RANK_DIVISOR),
      scale=scale,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.skip = nnx.Param(jnp.ones((inner,), param_dtype))
    self.output_gate = linear(dim, inner, scale=scale)
    self.output = linear(inner, dim, scale=scale * output_scale)

  def init_state(self, batch: int) -> LonghornState:
    """The state of `batch` rows before their first token."""
    taps, inner = self.convolution.kernel.shape
    shape = (batch, self.heads, self.value_width, self.key_width)
    return LonghornState(
      jnp.zeros(shape, state_dtype(self.dtype)),
      jnp.zeros((batch, taps - 1, inner), self.dtype),
    )

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: LonghornState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    value, tail = self.convolution(
      self.value(x),
      None if state is None else state.tail,
      history=arrangement.history,
      lengths=arrangement.lengths,
    )
    bias = self.convolution_bias[...].astype(value.dtype)
    value = jax.nn.silu(value + bias[None, None])
    key = split_heads(self.key(value), self.key_width)
    rate = split_heads(jax.nn.sigmoid(self.rate(value)), self.value_width)
    y, memory = longhorn(
      split_heads(self.query(value), self.key_width),
      key,
      split_heads(value, self.value_width),
      rate,
      None if state is None else state.memory,
      restart=arrangement.restart,
      valid=arrangement.valid,
      implementation=self.implementation,
    )
    skip = self.skip[...].astype(value.dtype)
    y = y.reshape(value.shape) + skip[None, None] * value
    y = self.output(y * jax.nn.silu(self.output_gate(x))).astype(x.dtype)
    after = None
    if arrangement.segment_ids is None:
      after = LonghornState(memory, tail)
    pull = rate * jnp.sum(
      jnp.square(key.astype(rate.dtype)), axis=-1, keepdims=True
    )
    metrics = {
      "gate_rate": mean_over_valid(pull / (1 + pull), arrangement.valid)
    }
    return MixerOutput(y, after, metrics)
