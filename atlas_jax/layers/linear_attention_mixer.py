"""Linear attention: a matrix memory that only adds (arXiv 2006.16236)."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.initial import Source
from atlas_jax.layers.matrix_mixer import MatrixMixer, MatrixState, width_of
from atlas_jax.layers.mixer import MixerOutput
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.memory import state_dtype
from atlas_jax.recurrences import scalar_decay

# Keeps the original's quotient finite where all features are 0.
_EPSILON = 1e-6


class LinearAttentionMixer(MatrixMixer):
  """`M_t = M_{t-1} + v_t f(k_t)^T`, in one of two forms.

  - By default as it is built today: f is the identity, queries have a factor
    `K ** -0.5`, and what is read goes through an RMSNorm per head, as in layer
    `LinearAttention` of flash-linear-attention (feature map "identity").
  - `normalised`, the original (Eq. 18-20): `f(x) = elu(x) + 1`, and
    `y_t = M_t f(q_t) / (z_t . f(q_t))` with `z_t = z_{t-1} + f(k_t)`. z is kept
    as one more row of M.

  There is neither a convolution nor an output gate in either.

  Args:
    dim: Width of x; `heads` must divide it.
    heads: Memories side by side.
    normalised: Which form.
    norm_epsilon: Of the RMSNorm.
    scale, output_scale, dtype, param_dtype, implementation, rngs: See
      `MatrixMixer`.

  Raises:
    UserError: Heads that do not divide dim, or an unknown implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    normalised: bool = False,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    width = width_of(dim, heads, 1, "queries")
    super().__init__(
      dim,
      heads,
      key_width=width,
      value_width=width,
      gated=False,
      scale=scale,
      output_scale=output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      implementation=implementation,
      rngs=rngs,
    )
    self.norm = (
      None
      if normalised
      else RMSNorm(
        (heads, width), epsilon=norm_epsilon, param_dtype=param_dtype
      )
    )

  def init_state(self, batch: int) -> MatrixState:
    """The state of `batch` rows before their first token."""
    memory = self.empty(batch)
    if self.norm is None:
      memory = jnp.pad(memory, ((0, 0), (0, 0), (0, 1), (0, 0)))
    return MatrixState(memory)

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: MatrixState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    query, key, value = self.projected(x)
    if self.norm is None:
      wide = state_dtype(x.dtype)
      query, key = (positive(a.astype(wide)) for a in (query, key))
      ones = jnp.ones((*value.shape[:3], 1), wide)
      value = jnp.concatenate([value.astype(wide), ones], axis=-1)
    else:
      query = query * self.key_width**-0.5
    y, memory = scalar_decay(
      query,
      key,
      value,
      state=None if state is None else state.memory,
      restart=arrangement.restart,
      valid=arrangement.valid,
      implementation=self.implementation,
    )
    after = None if arrangement.segment_ids is not None else MatrixState(memory)
    if self.norm is None:
      y = y[..., :-1] / (y[..., -1:] + _EPSILON)
      y = self.output(y.reshape(x.shape)).astype(x.dtype)
    else:
      y = self.read_out(y, x, self.norm)
    return MixerOutput(y, after, {})


def positive(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """`elu(x) + 1`, without the rounding of `(exp(x) - 1) + 1`."""
  return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))
