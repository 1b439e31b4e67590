"""Memory as a gate: attention and a memory side by side (Titans, MAG)."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.gated_product import GatedProduct
from atlas_jax.layers.hybrid import Hybrid, HybridState, parts_of
from atlas_jax.layers.initial import Source
from atlas_jax.layers.mixer import Mixer, MixerOutput


class MemoryAsGate(Hybrid):
  """`o = output(RMSNorm(y) * SiLU(RMSNorm(m)))`, `y, m` attention and memory.

  arXiv 2501.00663, Eq. 26-28 and the gating of section 4.2. Both branches see x
  and are whole layers with an output projection of their own; one more follows
  the gate. Metrics are those of both branches.

  Args:
    attention: Attention to a window, with persistent tokens.
    memory: Any mixer.
    norm_epsilon: Of the norms of both branches.
    scale: Factor on the starting weights of the last projection.
    output_scale: Further factor on them.
    dtype: Type of activations.
    param_dtype: Type of the parameters.
    rngs: Source of the starting weights.

  Raises:
    UserError: The branches have different widths.
  """

  def __init__(
    self,
    attention: Mixer,
    memory: Mixer,
    *,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    super().__init__(attention, memory)
    self.product = GatedProduct(
      self.dim,
      norm_epsilon=norm_epsilon,
      scale=scale * output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: HybridState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    before = parts_of(state)
    attended = self.attention.mix(x, before.attention, arrangement)
    remembered = self.memory.mix(x, before.memory, arrangement)
    y = self.product(attended.y, remembered.y)
    after = None
    if arrangement.segment_ids is None:
      after = HybridState(attended.state, remembered.state)
    return MixerOutput(y, after, {**attended.metrics, **remembered.metrics})

  def step(
    self,
    x: Float[Array, "B D"],
    state: HybridState,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], Any]:
    """Mixes one token per row, see `Mixer.step`."""
    self.check_state(state, x.shape[0])
    y, attention = self.attention.step(x, state.attention, valid=valid)
    m, memory = self.memory.step(x, state.memory, valid=valid)
    return self.product(y, m), HybridState(attention, memory)
