"""Which implementation runs. The only place that looks at the backend."""

from collections.abc import Sequence

import jax

from atlas_jax.errors import UserError

IMPLEMENTATIONS = ("auto", "reference", "xla")
FORMS = ("dual", "associative")

# Found by timing forward and backward passes of memories from 16 KiB to 1 MiB
# a row: up to 16 rows pay, beyond a core's cache of about 1 MiB none do.
CACHE_BYTES = 2**20
LARGEST_GROUP = 16


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


def rows_at_once(rows: int, row_bytes: int) -> int:
  """How many rows (batch x heads) of a memory run side by side.

  A CPU is fastest when the state of the rows in flight stays in its cache, and
  small rows need company so that a call is worth its overhead; an accelerator
  wants all of them.

  Args:
    rows: how many there are.
    row_bytes: size of one row's carry.

  Returns:
    a divisor of `rows`.
  """
  if jax.default_backend() != "cpu":
    return rows
  most = min(LARGEST_GROUP, max(1, CACHE_BYTES // row_bytes))
  return max(n for n in range(1, most + 1) if rows % n == 0)
