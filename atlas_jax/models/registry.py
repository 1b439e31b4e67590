"""Every mixer by name: how it is made, what it does, where it is from.

`--model.mixer=NAME` and `--model.pattern=NAME,NAME` choose from here.
"""

from collections.abc import Mapping

from atlas_jax.config import suggestion
from atlas_jax.errors import UserError
from atlas_jax.models import attention, deep, older
from atlas_jax.models.entry import Entry

REGISTRY: Mapping[str, Entry] = {
  **deep.ENTRIES,
  **attention.ENTRIES,
  **older.ENTRIES,
}

# Names of sequential stacks: which mixers take turns.
PATTERNS: Mapping[str, tuple[str, ...]] = {}

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
