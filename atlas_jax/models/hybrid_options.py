"""Options of hybrids, flat so that each is one flag."""

import dataclasses

from atlas_jax.config import field


@dataclasses.dataclass(frozen=True)
class HybridOptions:
  """Changes to the hybrid that `ModelConfig.mixer` names.

  Every field is None by default: the mixer's own value. An option that the
  mixer has no use for is an error.
  """

  memory: str | None = field(
    None, "Mixer that is the memory: one that mac, mag and mal do not name."
  )
  segment: int | None = field(
    None, "Tokens of a segment (mac): a multiple of the memory's chunk; 0: 256."
  )
