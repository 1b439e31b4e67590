"""DeltaNet and Gated DeltaNet: matrix memories that write what they lack."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.convolved_projections import (
  ConvolvedProjections,
  Tails,
  unit_heads,
)
from atlas_jax.layers.gate_projection import GateProjection
from atlas_jax.layers.initial import Source
from atlas_jax.layers.mamba2_mixer import Mamba2Gates
from atlas_jax.layers.matrix_mixer import (
  MatrixMixer,
  split_heads,
  width_of,
)
from atlas_jax.layers.mixer import MixerOutput, mean_over_valid
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.recurrences import delta_rule

# Decay per unit of step before training, uniform over heads.
_DECAYS = (0.0, 16.0)


class DeltaState(NamedTuple):
  """What later tokens need, at constant size; rows are independent.

  Attributes:
    memory: M after the last token.
    tails: The last inputs of the convolutions.
  """

  memory: Float[Array, "B H V K"]
  tails: Tails


class DeltaNetMixer(MatrixMixer):
  """`M_t = M_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T`, `y_t = M_t q_t`.

  arXiv 2406.06484, Eq. 3 and section 3.3: queries and keys are
  `SiLU(convolution(x W))` of length 1 per head, values the same at their own
  length, `b = sigmoid(x W_b)` one number per head without a bias; what is read
  goes through an RMSNorm per head. There is no output gate by default, as in
  layer `DeltaNet` of flash-linear-attention. (That layer also divides queries
  by `sqrt(K)`, which the norm undoes.) Metric: `gate_rate`, the mean of b.

  Args:
    dim: Width of x.
    heads: Memories side by side.
    expand_key: Width of all keys together, as a multiple of dim.
    expand_value: The same for values.
    gated: Whether read-outs are multiplied by `SiLU(x W_g)`.
    largest_rate: b is this times the sigmoid. 2 also lets the memory turn a
      key's value around (arXiv 2411.12537).
    conv_width: Taps of the convolutions, the current token included.
    qk_epsilon: Length below which q and k are not stretched to length 1.
    norm_epsilon: Of the RMSNorm.
    scale, output_scale, dtype, param_dtype, implementation, rngs: See
      `MatrixMixer`; scale is also that of convolutions and gates.

  Raises:
    UserError: Heads that do not divide a width, no taps, a rate outside (0, 2],
      or an unknown implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    expand_key: float = 1.0,
    expand_value: float = 1.0,
    gated: bool = False,
    largest_rate: float = 1.0,
    conv_width: int = 4,
    qk_epsilon: float = 1e-6,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    if not 0 < largest_rate <= 2:
      raise UserError(
        f"largest_rate {largest_rate}: use a number above 0, up to 2"
      )
    key_width = width_of(dim, heads, expand_key, "keys")
    value_width = width_of(dim, heads, expand_value, "values")
    super().__init__(
      dim,
      heads,
      key_width=key_width,
      value_width=value_width,
      gated=gated,
      scale=scale,
      output_scale=output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      implementation=implementation,
      rngs=rngs,
    )
    self.largest_rate = largest_rate
    self.qk_epsilon = qk_epsilon
    keys, values = heads * key_width, heads * value_width
    self.convolutions = ConvolvedProjections(
      {"query": keys, "key": keys, "value": values},
      conv_width,
      scale=scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.rate = GateProjection(
      dim, heads, bias=None, scale=scale, param_dtype=param_dtype, rngs=rngs
    )
    self.norm = RMSNorm(
      (heads, value_width), epsilon=norm_epsilon, param_dtype=param_dtype
    )

  def init_state(self, batch: int) -> DeltaState:
    """The state of `batch` rows before their first token."""
    return DeltaState(self.empty(batch), self.convolutions.init_tails(batch))

  def log_decay(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H"] | None:
    """Logs of the decays of all heads; None: nothing decays."""
    del x

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: DeltaState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    arrays, tails = self.convolutions(
      {
        "query": self.query(x),
        "key": self.key(x),
        "value": self.value(x),
      },
      None if state is None else state.tails,
      arrangement,
    )
    rate = self.largest_rate * jax.nn.sigmoid(self.rate(x))
    log_decay = self.log_decay(x)
    y, memory = delta_rule(
      unit_heads(arrays["query"], self.key_width, self.qk_epsilon),
      unit_heads(arrays["key"], self.key_width, self.qk_epsilon),
      split_heads(arrays["value"], self.value_width),
      rate,
      log_decay,
      None if state is None else state.memory,
      restart=arrangement.restart,
      valid=arrangement.valid,
      implementation=self.implementation,
    )
    after = None
    if arrangement.segment_ids is None:
      after = DeltaState(memory, tails)
    metrics = {"gate_rate": mean_over_valid(rate, arrangement.valid)}
    if log_decay is not None:
      decay = mean_over_valid(jnp.exp(log_decay), arrangement.valid)
      metrics["gate_decay"] = decay
    return MixerOutput(self.read_out(y, x, self.norm), after, metrics)


class GatedDeltaNetMixer(DeltaNetMixer):
  """`M_t = a_t M_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T`, `y_t = M_t q_t`.

  arXiv 2412.06464, Eq. 10: DeltaNet with a decay per head,
  `log a_t = -exp(A) softplus(x W_a + c)`, values twice as wide as keys, and an
  output gate `SiLU(x W_g)` after the norm. Before training `softplus(c)` is
  log-uniform in [0.001, 0.1] over heads and `exp(A)` uniform in [0, 16], as in
  layer `GatedDeltaNet` of flash-linear-attention, whose widths these are: keys
  of 0.75 dim and values of 1.5 dim. Metrics: `gate_rate`, the mean of b, and
  `gate_decay`, that of a.

  Args:
    dim, heads: As of `DeltaNetMixer`.
    expand_key: Width of all keys together, as a multiple of dim.
    expand_value: The same for values.
    gated: Whether read-outs are multiplied by `SiLU(x W_g)`.
    largest_rate, conv_width, qk_epsilon, norm_epsilon: As of `DeltaNetMixer`.
    scale, output_scale, dtype, param_dtype, implementation, rngs: See
      `MatrixMixer`; scale is also that of convolutions and gates.

  Raises:
    UserError: As of `DeltaNetMixer`.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    expand_key: float = 0.75,
    expand_value: float = 1.5,
    gated: bool = True,
    largest_rate: float = 1.0,
    conv_width: int = 4,
    qk_epsilon: float = 1e-6,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    super().__init__(
      dim,
      heads,
      expand_key=expand_key,
      expand_value=expand_value,
      gated=gated,
      largest_rate=largest_rate,
      conv_width=conv_width,
      qk_epsilon=qk_epsilon,
      norm_epsilon=norm_epsilon,
      scale=scale,
      output_scale=output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      implementation=implementation,
      rngs=rngs,
    )
    self.decay = Mamba2Gates(
      dim,
      heads,
      decays=_DECAYS,
      scale=scale,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def log_decay(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H"]:
    """Logs of the decays of all heads, at least float32."""
    return self.decay(x)[1]
