"""RetNet: a matrix memory per head with a fixed decay (arXiv 2307.08621)."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from atlas_jax.attention.documents import last_start, positions
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.initial import Source
from atlas_jax.layers.matrix_mixer import MatrixMixer, width_of
from atlas_jax.layers.mixer import MixerOutput
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.layers.rotary import rotate
from atlas_jax.memory import state_dtype
from atlas_jax.recurrences import scalar_decay


class RetNetState(NamedTuple):
  """What later tokens need; rows are independent.

  Attributes:
    memory: M after the last token.
    count: Tokens of the document so far, from which positions go on.
  """

  memory: Float[Array, "B H V K"]
  count: Int[Array, "B"]


class RetNetMixer(MatrixMixer):
  """`M_t = g_h M_{t-1} + v_t k_t^T` with `g_h = 1 - 2^(-5 - h)`, h = 0, 1, ...

  Queries and keys are turned by their positions, queries have a factor
  `K ** -0.5`, values are wider than keys; what is read goes through an RMSNorm
  per head and is multiplied by `SiLU(x W_g)` (Eq. 5-8; as layer
  `MultiScaleRetention` of flash-linear-attention). The paper divides scores by
  sums of decays besides, which the norm undoes, and has no convolution.

  Args:
    dim: Width of x; `heads` must divide it.
    heads: Memories side by side.
    expand_value: Width of all values together, as a multiple of dim.
    rope_base: Of the rotary embedding; 0: none.
    norm_epsilon: Of the RMSNorm.
    scale, output_scale, dtype, param_dtype, implementation, rngs: See
      `MatrixMixer`.

  Raises:
    UserError: Heads that do not divide a width, a rotary embedding of an odd
      width, or an unknown implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    expand_value: float = 2.0,
    rope_base: float = 10000.0,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    key_width = width_of(dim, heads, 1, "queries")
    value_width = width_of(dim, heads, expand_value, "values")
    if rope_base < 0 or (rope_base and key_width % 2):
      raise UserError(
        f"rope_base {rope_base} with heads of width {key_width}: rotary "
        "embedding needs a base above 0 and an even width; 0 leaves it away"
      )
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
    self.rope_base = rope_base
    self.norm = RMSNorm(
      (heads, value_width), epsilon=norm_epsilon, param_dtype=param_dtype
    )

  def init_state(self, batch: int) -> RetNetState:
    """The state of `batch` rows before their first token."""
    return RetNetState(self.empty(batch), jnp.zeros((batch,), jnp.int32))

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: RetNetState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    batch, length = x.shape[:2]
    restart = arrangement.restart
    before = self.init_state(batch) if state is None else state
    query, key, value = self.projected(x)
    if self.rope_base:
      position = positions(length, restart, before.count)
      query, key = (rotate(a, position, self.rope_base) for a in (query, key))
    log_decay = log_retention(self.heads, state_dtype(x.dtype))
    y, memory = scalar_decay(
      query * self.key_width**-0.5,
      key,
      value,
      jnp.broadcast_to(log_decay[None, None], (batch, length, self.heads)),
      before.memory,
      restart=restart,
      valid=arrangement.valid,
      implementation=self.implementation,
    )
    after = None
    if arrangement.segment_ids is None:
      read = jnp.full((batch,), length, jnp.int32)
      if arrangement.lengths is not None:
        read = arrangement.lengths
      after = RetNetState(memory, read - last_start(restart, before.count))
    return MixerOutput(self.read_out(y, x, self.norm), after, {})


def log_retention(heads: int, dtype: DTypeLike) -> Float[Array, "H"]:
  """`log(1 - 2^(-5 - h))` of every head h = 0, 1, ... (Eq. 8)."""
  return jnp.log1p(-jnp.exp2(-5 - jnp.arange(heads, dtype=dtype)))
