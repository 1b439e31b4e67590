"""Memory as a layer: attention over a memory's output (Titans, MAL)."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.hybrid import Hybrid, HybridState, parts_of
from atlas_jax.layers.mixer import Mixer, MixerOutput
from atlas_jax.layers.rms_norm import RMSNorm


class MemoryAsLayer(Hybrid):
  """`o = attention(RMSNorm(memory(x)))`.

  arXiv 2501.00663, Eq. 29-31. As before every attention of a model, its input
  is normalised first. Metrics are those of both.

  Args:
    attention: Attention to a window, with persistent tokens.
    memory: Any mixer.
    norm_epsilon: Of the norm between them.
    param_dtype: Type of its scale.

  Raises:
    UserError: The parts have different widths.
  """

  def __init__(
    self,
    attention: Mixer,
    memory: Mixer,
    *,
    norm_epsilon: float = 1e-6,
    param_dtype: DTypeLike = jnp.float32,
  ):
    super().__init__(attention, memory)
    self.norm = RMSNorm(self.dim, epsilon=norm_epsilon, param_dtype=param_dtype)

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: HybridState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    before = parts_of(state)
    remembered = self.memory.mix(x, before.memory, arrangement)
    m = remembered.y
    if arrangement.valid is not None:
      m = jnp.where(arrangement.valid[..., None], m, jnp.zeros((), m.dtype))
    out = self.attention.mix(self.norm(m), before.attention, arrangement)
    after = None
    if arrangement.segment_ids is None:
      after = HybridState(out.state, remembered.state)
    return MixerOutput(out.y, after, {**remembered.metrics, **out.metrics})

  def step(
    self,
    x: Float[Array, "B D"],
    state: HybridState,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], Any]:
    """Mixes one token per row, see `Mixer.step`."""
    self.check_state(state, x.shape[0])
    m, memory = self.memory.step(x, state.memory, valid=valid)
    y, attention = self.attention.step(
      self.norm(m), state.attention, valid=valid
    )
    return y, HybridState(attention, memory)
