"""Every mixer by name: how it is made, what it does, where it is from.

`--model.mixer=NAME` and `--model.pattern=NAME,NAME` choose from here.
"""

from collections.abc import Mapping

from atlas_jax.config import suggestion
from atlas_jax.errors import UserError
from atlas_jax.models import hybrid
from atlas_jax.models.entry import Entry

REGISTRY: Mapping[str, Entry] = {**hybrid.PARTS, **hybrid.ENTRIES}

# Names of sequential stacks: which mixers take turns.
PATTERNS: Mapping[str, tuple[str, ...]] = {
  "samba": ("mamba2", "swa"),
  "gated_deltanet_h1": ("gated_deltanet", "swa"),
  "gated_deltanet_h2": ("mamba2", "gated_deltanet", "swa"),
}

NAMES = (*REGISTRY, *PATTERNS)


def mixers_of(mixer: str, pattern: tuple[str, ...]) -> tuple[str, ...]:
  """The mixers of a model's blocks, in turn.

  Args:
    mixer: A name of a mixer or of a stack; ignored where there is a pattern.
    pattern: Names of mixers and stacks that take turns.

  Raises:
    UserError: A name is unknown.
  """
  names = []
  for name in pattern or (mixer,):
    if name not in NAMES:
      which = "model.pattern" if pattern else "model.mixer"
      raise UserError(
        f"unknown {which} {name!r}{suggestion(name, NAMES)}; there are "
        f"{', '.join(NAMES)}"
      )
    names += PATTERNS.get(name, (name,))
  return tuple(names)
