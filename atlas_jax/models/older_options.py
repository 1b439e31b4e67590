"""Options of Hyena, flat so that each is one flag."""

import dataclasses

from atlas_jax.config import field


@dataclasses.dataclass(frozen=True)
class HyenaOptions:
  """Changes to Hyena's filter; None is the mixer's own value."""

  max_length: int | None = field(
    None, "Longest text in tokens; a longer one is refused."
  )
  filter_width: int | None = field(
    None, "Hidden width of the network that makes the filter."
  )
