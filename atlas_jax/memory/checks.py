"""Numbers and parts that a memory can be made of, told in one line if not."""

from typing import Any

from atlas_jax.errors import UserError

# Far beyond any use, and small enough that nothing overflows on the way.
LARGEST_COUNT = 2**20
LARGEST = 1e30


def count(
  name: str, value: Any, what: str = "", *, most: int = LARGEST_COUNT
) -> None:
  """Refuses all but whole numbers from 1 to the most.

  Raises:
    UserError: names the value and what to use.
  """
  whole = isinstance(value, int) and not isinstance(value, bool)
  if not whole or value < 1:
    raise UserError(f"{name} {value}: use 1 or more{what}")
  if value > most:
    raise UserError(f"{name} {value}: use {most} or less")


def positive(name: str, value: Any, *, most: float = LARGEST) -> None:
  """Refuses all but positive numbers that float32 holds with room to spare.

  Raises:
    UserError: names the value and what to use.
  """
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not number or not 1 / LARGEST <= value <= most:
    raise UserError(f"{name} {value}: use a positive number, at most {most:g}")


def part(name: str, value: Any, kinds: Any) -> None:
  """Refuses all but one of the kinds, a class or a union of classes.

  Raises:
    UserError: names the kinds.
  """
  if isinstance(value, kinds):
    return
  classes = getattr(kinds, "__args__", (kinds,))
  names = ", ".join(kind.__name__ for kind in classes)
  raise UserError(f"{name} {value!r}: use a value of {names}")
