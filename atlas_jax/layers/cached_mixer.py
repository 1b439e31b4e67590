"""What mixers have in common whose state may be a cache of all tokens."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlas_jax import attention as aa
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.mixer import Mixer, MixerOutput

_IMPLEMENTATIONS = ("auto", "reference", "xla")


class CachedMixer(Mixer):
  """A mixer that attends to the tokens it has read.

  A state of type `atlas_jax.attention.Cache` grows: a call adds room for its
  tokens, a step needs room made by `resize`, and a row whose tokens had no room
  gives NaN from then on. Others have constant size.

  A subclass implements `init_state` and `attend`.

  Attributes:
    heads: Queries per token, each of width dim / heads.
    implementation: "auto", "reference" or "xla".
  """

  heads: int
  implementation: str

  def attend(
    self,
    x: Float[Array, "B T D"],
    state: Any,
    arrangement: Arrangement,
    *,
    grow: bool,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """Outputs in x's type, anything at padding, and the state after.

    Args:
      x: Arranged inputs.
      state: Where to go on; None is a fresh start.
      arrangement: Where padding and documents are.
      grow: Whether a growing state gets room for T more tokens. If not, there
        is a state, and a single token in the document that it holds.
    """
    raise NotImplementedError

  def mix(
    self, x: Float[Array, "B T D"], state: Any, arrangement: Arrangement
  ) -> MixerOutput:
    """Mixes arranged tokens, x being 0 at padding."""
    y, state = self.attend(x, state, arrangement, grow=True)
    if arrangement.segment_ids is not None:
      state = None
    return MixerOutput(_zeroed(y, arrangement.valid), state, {})

  def step(
    self,
    x: Float[Array, "B D"],
    state: Any,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], Any]:
    """Mixes one token per row, within the room that a growing state has.

    Raises:
      UserError: Inputs or a state that do not belong to this layer, and,
        outside jit, a row that has no room.
    """
    self.check_step(x, state, valid)
    if isinstance(state, aa.Cache):
      aa.check_room(state, valid)
    x = x[:, None]
    arrangement = Arrangement()
    if valid is not None:
      arrangement = Arrangement(
        valid=valid[:, None], lengths=valid.astype(jnp.int32)
      )
      x = arrangement.gather(x)
    y, state = self.attend(x, state, arrangement, grow=False)
    return _zeroed(y, arrangement.valid)[:, 0], state

  def capacity(self, state: Any) -> int | None:
    """Tokens for which a growing state has room, those it holds included."""
    return aa.room(state) if isinstance(state, aa.Cache) else None

  def resize(self, state: Any, capacity: int) -> Any:
    """A growing state with room for this many tokens; others as they are."""
    return aa.resize(state, capacity) if isinstance(state, aa.Cache) else state


def check_attention(
  dim: int, heads: int, rope_base: float, implementation: str
) -> None:
  """Refuses what no attention can be made of.

  Raises:
    UserError: Says what to change.
  """
  if heads < 1 or dim < 1 or dim % heads:
    raise UserError(f"{heads} heads do not divide the width {dim}")
  if rope_base < 0 or (rope_base and dim // heads % 2):
    raise UserError(
      f"rope_base {rope_base} with heads of width {dim // heads}: rotary "
      "embedding needs a base above 0 and an even width; 0 leaves it away"
    )
  if implementation not in _IMPLEMENTATIONS:
    raise UserError(
      f"no attention is called {implementation!r}: choose one of "
      f"{', '.join(_IMPLEMENTATIONS)}"
    )


def _zeroed(
  y: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None
) -> Float[Array, "B T D"]:
  if valid is None:
    return y
  return jnp.where(valid[..., None], y, jnp.zeros((), y.dtype))
