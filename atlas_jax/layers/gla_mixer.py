"""Gated linear attention: every key channel decays by itself."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.gate_projection import GateProjection
from atlas_jax.layers.initial import Source
from atlas_jax.layers.matrix_mixer import (
  MatrixMixer,
  MatrixState,
  split_heads,
  width_of,
)
from atlas_jax.layers.mixer import MixerOutput, mean_over_valid
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.recurrences import channel_decay


class GLAMixer(MatrixMixer):
  """`M_t = M_{t-1} Diag(a_t) + v_t k_t^T` (arXiv 2312.06635, Eq. 3).

  `log a_t = log_sigmoid(x W_1 W_2 + b) / gate_divisor`. Queries have a factor
  `K ** -0.5` and, like keys, half the width of values; what is read goes
  through an RMSNorm per head and is multiplied by `SiLU(x W_g)`. There is no
  convolution, as in the paper and in layer `GatedLinearAttention` of
  flash-linear-attention by default. Its metric `gate_decay` is the mean a.

  Args:
    dim: Width of x.
    heads: Memories side by side.
    expand_key: Width of all keys together, as a multiple of dim.
    expand_value: The same for values.
    gate_rank: Width between W_1 and W_2.
    gate_divisor: Divides log decays, so that they start near 0.
    norm_epsilon: Of the RMSNorm.
    scale, output_scale, dtype, param_dtype, implementation, rngs: See
      `MatrixMixer`.

  Raises:
    UserError: Heads that do not divide a width, a rank or divisor that is not
      positive, or an unknown implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    expand_key: float = 0.5,
    expand_value: float = 1.0,
    gate_rank: int = 16,
    gate_divisor: float = 16.0,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    if gate_rank < 1 or gate_divisor <= 0:
      raise UserError(
        f"gate_rank {gate_rank}, gate_divisor {gate_divisor}: use numbers "
        "above 0"
      )
    key_width = width_of(dim, heads, expand_key, "keys")
    value_width = width_of(dim, heads, expand_value, "values")
    super().__init__(
      dim,
      heads,
      key_width=key_width,
      value_width=value_width,
      scale=scale,
      output_scale=output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      implementation=implementation,
      rngs=rngs,
    )
    self.gate_divisor = gate_divisor
    self.gates = GateProjection(
      dim,
      heads * key_width,
      rank=gate_rank,
      scale=scale,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.norm = RMSNorm(
      (heads, value_width), epsilon=norm_epsilon, param_dtype=param_dtype
    )

  def init_state(self, batch: int) -> MatrixState:
    """The state of `batch` rows before their first token."""
    return MatrixState(self.empty(batch))

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: MatrixState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    query, key, value = self.projected(x)
    log_decay = split_heads(
      jax.nn.log_sigmoid(self.gates(x)) / self.gate_divisor, self.key_width
    )
    y, memory = channel_decay(
      query * self.key_width**-0.5,
      key,
      value,
      log_decay,
      None if state is None else state.memory,
      restart=arrangement.restart,
      valid=arrangement.valid,
      implementation=self.implementation,
    )
    after = None if arrangement.segment_ids is not None else MatrixState(memory)
    metrics = {
      "gate_decay": mean_over_valid(jnp.exp(log_decay), arrangement.valid)
    }
    return MixerOutput(self.read_out(y, x, self.norm), after, metrics)
