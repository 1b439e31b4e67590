"""Paths as a user writes them."""

import os
import pathlib

from atlas_jax.errors import UserError


def expand(path: str | os.PathLike[str]) -> pathlib.Path:
  """Replaces a leading ~ or ~NAME by a home folder.

  Raises:
    UserError: There is no such home, or no file could have this name.
  """
  try:
    found = pathlib.Path(path).expanduser()
    found.exists()
  except (RuntimeError, OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(
      f"cannot use the path {os.fspath(path)!r}: {reason}"
    ) from None
  return found
