"""The Mesa layer: a read-out that is optimal for all tokens so far."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
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
from atlas_jax.layers.gates import logit
from atlas_jax.layers.initial import Source
from atlas_jax.layers.matrix_mixer import (
  MatrixMixer,
  split_heads,
  width_of,
)
from atlas_jax.layers.mixer import MixerOutput, mean_over_valid
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.memory import state_dtype
from atlas_jax.recurrences import MesaState, mesa

# The regularisation of every key channel: its least, and before training.
_LEAST_RIDGE = 0.25
_FIRST_RIDGE = 1.0


class MesaMixerState(NamedTuple):
  """What later tokens need, at constant size; rows are independent.

  Attributes:
    memory: G and H after the last token.
    tails: The last inputs of the convolutions.
  """

  memory: MesaState
  tails: Tails


class MesaMixer(MatrixMixer):
  """`y_t = H_t (G_t + Diag(l))^{-1} q_t`: least squares over all tokens.

  arXiv 2506.05233, Eq. 7 and 8: queries and keys are
  `SiLU(convolution(x W))` of length 1 per head, values a plain projection.
  Each token has a weight `b = sigmoid(x W_b + c)` and a decay
  `a = sigmoid(x W_a + d)` per head; `l = 0.25 + softplus(p)`, one per head and
  key channel, is 1 before training. What is read goes through an RMSNorm per
  head; there is no output gate by default, as in layer `MesaNet` of
  flash-linear-attention. Metrics: `gate_rate` and `gate_decay`, the means of b
  and a.

  Args:
    dim: Width of x.
    heads: Memories side by side, each of width dim / heads.
    gated: Whether read-outs are multiplied by `SiLU(x W_g)`.
    conv_width: Taps of the convolutions, the current token included.
    decay_start: a before training; 0.5 is the source's bias of 0.
    qk_epsilon: Length below which q and k are not stretched to length 1.
    norm_epsilon: Of the RMSNorm.
    scale, output_scale, dtype, param_dtype, implementation, rngs: See
      `MatrixMixer`; scale is also that of convolutions and gates.

  Raises:
    UserError: Heads that do not divide dim, no taps, a decay outside (0, 1), or
      an unknown implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    gated: bool = False,
    conv_width: int = 4,
    decay_start: float = 0.5,
    qk_epsilon: float = 1e-6,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    if not 0 < decay_start < 1:
      raise UserError(
        f"decay_start {decay_start}: use a number between 0 and 1"
      )
    width = width_of(dim, heads, 1.0, "keys")
    super().__init__(
      dim,
      heads,
      key_width=width,
      value_width=width,
      gated=gated,
      scale=scale,
      output_scale=output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      implementation=implementation,
      rngs=rngs,
    )
    self.qk_epsilon = qk_epsilon
    self.convolutions = ConvolvedProjections(
      {"query": dim, "key": dim},
      conv_width,
      scale=scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

    def gate(start: float) -> GateProjection:
      return GateProjection(
        dim,
        heads,
        bias=logit(start),
        scale=scale,
        param_dtype=param_dtype,
        rngs=rngs,
      )

    self.rate, self.decay = gate(0.5), gate(decay_start)
    # The inverse of softplus.
    ridge = math.log(math.expm1(_FIRST_RIDGE - _LEAST_RIDGE))
    self.ridge = nnx.Param(jnp.full((heads, width), ridge, param_dtype))
    self.norm = RMSNorm(
      (heads, width), epsilon=norm_epsilon, param_dtype=param_dtype
    )

  def init_state(self, batch: int) -> MesaMixerState:
    """The state of `batch` rows before their first token."""
    memory = MesaState(self.empty(batch), self.empty(batch))
    return MesaMixerState(memory, self.convolutions.init_tails(batch))

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: MesaMixerState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    arrays, tails = self.convolutions(
      {"query": self.query(x), "key": self.key(x)},
      None if state is None else state.tails,
      arrangement,
    )
    rate = jax.nn.sigmoid(self.rate(x))
    log_decay = jax.nn.log_sigmoid(self.decay(x))
    ridge = self.ridge[...].astype(state_dtype(self.dtype))
    y, memory = mesa(
      unit_heads(arrays["query"], self.key_width, self.qk_epsilon),
      unit_heads(arrays["key"], self.key_width, self.qk_epsilon),
      split_heads(self.value(x), self.value_width),
      rate,
      log_decay,
      _LEAST_RIDGE + jax.nn.softplus(ridge),
      None if state is None else state.memory,
      restart=arrangement.restart,
      valid=arrangement.valid,
      implementation=self.implementation,
    )
    after = None
    if arrangement.segment_ids is None:
      after = MesaMixerState(memory, tails)
    metrics = {
      "gate_rate": mean_over_valid(rate, arrangement.valid),
      "gate_decay": mean_over_valid(jnp.exp(log_decay), arrangement.valid),
    }
    return MixerOutput(self.read_out(y, x, self.norm), after, metrics)
