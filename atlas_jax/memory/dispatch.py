"""Which implementation runs. The only place that looks at the backend."""

import math
from collections.abc import Sequence

import jax

from atlas_jax.errors import UserError

IMPLEMENTATIONS = ("auto", "reference", "xla")
FORMS = ("dual", "associative")


def resolve(
  implementation: str, available: Sequence[str] = IMPLEMENTATIONS[1:]
) -> str:
  """The implementation to run; only "auto" chooses, a name must be met.

  Raises:
    UserError: an unknown name, or one that this operation does not have.
  """
  if implementation not in IMPLEMENTATIONS:
    raise UserError(
      f"implementation {implementation!r}: use one of "
      f"{', '.join(IMPLEMENTATIONS)}"
    )
  if implementation == "auto":
    return "xla"
  if implementation not in available:
    raise UserError(
      f"implementation {implementation!r} is not available here: use one of "
      f"{', '.join(available)}"
    )
  return implementation


def rows_at_once(rows: int) -> int:
  """How many rows (batch x heads) of a memory run side by side.

  A CPU is fastest when the state of the rows in flight stays in its cache; an
  accelerator wants all of them.
  """
  if jax.default_backend() != "cpu":
    return rows
  return math.gcd(rows, 4)
