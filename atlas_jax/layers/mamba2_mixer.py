"""Mamba-2: a matrix memory that decays with the step it writes by."""

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
from atlas_jax.layers.initial import Source, normal
from atlas_jax.layers.matrix_mixer import (
  MatrixMixer,
  split_heads,
)
from atlas_jax.layers.mixer import MixerOutput, mean_over_valid
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.memory.numerics import unit
from atlas_jax.recurrences import scalar_decay

# The step of a token before training, log-uniform over heads.
_STEPS = (1e-3, 0.1)


class Mamba2State(NamedTuple):
  """What later tokens need, at constant size; rows are independent.

  Attributes:
    memory: M after the last token.
    query, key, value: The last inputs of the convolutions, oldest first.
  """

  memory: Float[Array, "B H V K"]
  query: Float[Array, "B N K"]
  key: Float[Array, "B N K"]
  value: Float[Array, "B N H*V"]


class Mamba2Gates(nnx.Module):
  """The step of every token and head, and the decay that goes with it.

  `step = softplus(x W + b)` and `log a = -step exp(log_rate)`. b starts so that
  the step without x is log-uniform in [0.001, 0.1] over heads, and
  `exp(log_rate)` uniform in `decays`.

  Args:
    dim: Width of x.
    heads: Number of steps.
    decays: Least and most decay per unit of step before training.
    scale, param_dtype, rngs: As of the mixer.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    decays: tuple[float, float] = (1.0, 16.0),
    scale: float,
    param_dtype: DTypeLike,
    rngs: Source,
  ):
    least, most = (math.log(step) for step in _STEPS)
    step = jnp.exp(least + (most - least) * _uniform(rngs, heads))
    self.step = GateProjection(
      dim,
      heads,
      # The inverse of softplus.
      bias=step + jnp.log(-jnp.expm1(-step)),
      scale=scale,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    slowest, fastest = decays
    rate = slowest + (fastest - slowest) * _uniform(rngs, heads)
    self.log_rate = nnx.Param(jnp.log(rate).astype(param_dtype))

  def __call__(
    self, x: Float[Array, "B T D"]
  ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Steps and log decays, at least float32."""
    step = jax.nn.softplus(self.step(x))
    rate = jnp.exp(self.log_rate[...].astype(step.dtype))
    return step, -step * rate[None, None]


class Mamba2Mixer(MatrixMixer):
  """`M_t = exp(-d_t A) M_{t-1} + d_t x_t B_t^T`, `y_t = M_t C_t + D x_t`.

  arXiv 2405.21060, Eq. 2 and section 7 (figure 6), as in the authors' code: x,
  B and C come from one projection each, a causal convolution with a bias, and
  SiLU. All heads share B and C (one group). The step `d_t = softplus(x W + b)`
  and A > 0 are one number per head. What is read is multiplied by `SiLU(x W_z)`
  and only then goes through one RMSNorm over all heads.

  In the names of the other mixers x is the value, B the key, C the query and z
  the output gate. Metrics: `gate_decay`, the mean of `exp(-d_t A)`, and
  `gate_rate`, that of d_t.

  Args:
    dim: Width of the layer's input.
    heads: Memories side by side, where `head_width` is 0; else not looked at.
    expand: Width of all heads together, as a multiple of dim.
    head_width: Width V of a head; there are `expand * dim / head_width`. 0:
      as many as `heads`.
    state_width: Width K of B and C.
    conv_width: Taps of the convolutions, the current token included.
    norm_epsilon: Of the RMSNorm.
    scale, output_scale, dtype, param_dtype, implementation, rngs: See
      `MatrixMixer`; scale is also that of the convolutions.

  Raises:
    UserError: Widths that do not fit, or an unknown implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    expand: int = 2,
    head_width: int = 64,
    state_width: int = 128,
    conv_width: int = 4,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    if min(expand, state_width, conv_width) < 1:
      raise UserError(
        f"expand {expand}, state_width {state_width}, conv_width {conv_width}: "
        "use 1 or more"
      )
    inner = expand * dim
    if head_width:
      heads = inner // head_width if head_width > 0 else 0
    if heads < 1 or inner % (head_width or heads):
      raise UserError(
        f"{expand} x {dim} channels are no whole number of heads of width "
        f"{head_width}: choose head_width so that it divides them, or 0 for as "
        "many heads as the model's"
      )
    super().__init__(
      dim,
      heads,
      key_width=state_width,
      value_width=inner // heads,
      key_heads=1,
      scale=scale,
      output_scale=output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      implementation=implementation,
      rngs=rngs,
    )
    widths = {"query": state_width, "key": state_width, "value": inner}
    self.convolutions = nnx.Dict(
      {
        name: Convolution(
          conv_width, width, scale=scale, param_dtype=param_dtype, rngs=rngs
        )
        for name, width in widths.items()
      }
    )
    self.convolution_bias = nnx.Dict(
      {
        name: nnx.Param(jnp.zeros((width,), param_dtype))
        for name, width in widths.items()
      }
    )
    self.gates = Mamba2Gates(
      dim, heads, scale=scale, param_dtype=param_dtype, rngs=rngs
    )
    self.skip = nnx.Param(jnp.ones((heads,), param_dtype))
    self.norm = RMSNorm(inner, epsilon=norm_epsilon, param_dtype=param_dtype)

  def init_state(self, batch: int) -> Mamba2State:
    """The state of `batch` rows before their first token."""
    tails = {
      name: jnp.zeros((batch, taps - 1, width), self.dtype)
      for name, (taps, width) in (
        (name, convolution.kernel.shape)
        for name, convolution in self.convolutions.items()
      )
    }
    return Mamba2State(self.empty(batch), **tails)

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: Mamba2State | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    arrays, tails = self._convolved(x, state, arrangement)
    step, log_decay = self.gates(x)
    value = split_heads(arrays["value"], self.value_width).astype(step.dtype)
    y, memory = scalar_decay(
      arrays["query"][:, :, None],
      arrays["key"][:, :, None],
      value * step[..., None],
      log_decay,
      None if state is None else state.memory,
      restart=arrangement.restart,
      valid=arrangement.valid,
      implementation=self.implementation,
    )
    skip = self.skip[...].astype(step.dtype)
    y = self._read_out(y + skip[None, None, :, None] * value, x)
    after = None
    if arrangement.segment_ids is None:
      after = Mamba2State(memory, **tails)
    metrics = {
      "gate_decay": mean_over_valid(jnp.exp(log_decay), arrangement.valid),
      "gate_rate": mean_over_valid(step, arrangement.valid),
    }
    return MixerOutput(y, after, metrics)

  def _convolved(
    self,
    x: Float[Array, "B T D"],
    state: Mamba2State | None,
    arrangement: Arrangement,
  ) -> tuple[dict[str, Array], dict[str, Array]]:
    """C, B and x of the paper, and the tails of their convolutions."""
    arrays, tails = {}, {}
    for name, convolution in self.convolutions.items():
      y, tails[name] = convolution(
        getattr(self, name)(x),
        None if state is None else getattr(state, name),
        history=arrangement.history,
        lengths=arrangement.lengths,
      )
      bias = self.convolution_bias[name][...].astype(y.dtype)
      arrays[name] = jax.nn.silu(y + bias[None, None])
    return arrays, tails

  def _read_out(
    self, y: Float[Array, "B T H V"], x: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """`RMSNorm(y * SiLU(x W_z)) W_o`, in x's type.

    What is normalised is of the fifth power of x, whose square a float32 may
    not hold; x at padding is 0, and so is y.
    """
    assert self.output_gate is not None
    gate = jax.nn.silu(self.output_gate(x)).astype(y.dtype)
    y = y.reshape(gate.shape) * gate
    length = y.shape[-1] ** 0.5
    y = length * unit(y, epsilon=length * self.norm.epsilon**0.5)
    y = y * self.norm.scale[...].astype(y.dtype)[None, None]
    return self.output(y.astype(self.dtype)).astype(x.dtype)


def _uniform(rngs: Source, size: int) -> Float[Array, "size"]:
  """Uniform numbers in (0, 1), from the normal ones that all weights are of."""
  return jax.scipy.special.ndtr(normal(rngs, (size,), 1.0, jnp.float32))
