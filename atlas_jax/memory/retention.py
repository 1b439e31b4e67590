"""Retention: how a memory's weights decay from token to token."""

import dataclasses

from atlas_jax.memory import checks


@dataclasses.dataclass(frozen=True)
class NoRetention:
  """Weights never decay; the decay gate must be absent (zero groups)."""

  groups: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True)
class ScalarRetention:
  """One kept fraction `alpha_t` for all weights of a head."""

  groups: int = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(frozen=True)
class ChannelRetention:
  """One kept fraction for each of `groups` equal groups of output rows.

  Exact in the dual form at the price of one more product over the chunk per
  group. As many groups as rows gives each output channel its own decay.
  """

  groups: int = 4

  def __post_init__(self):
    checks.count("decay groups", self.groups)


Retention = NoRetention | ScalarRetention | ChannelRetention
