"""Failures of a disk as one line; files that are either old or new."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from atlas_jax.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
  """Turns an OSError while writing `path` into a UserError."""
  try:
    yield
  except OSError as error:
    reason = error.strerror or str(error)
    todo = (
      "free some space and run the same command again"
      if error.errno in _FULL
      else "check the path and its permissions"
    )
    raise UserError(f"cannot write {path} ({reason}): {todo}") from error


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes a JSON file so that a reader sees the old one or the new one.

  Raises:
    UserError: The file cannot be written; an old one is then unchanged.
  """
  temporary = path.with_name(path.name + ".tmp")
  with explained(path):
    with temporary.open("w", encoding="utf-8") as file:
      json.dump(value, file, indent=2)
      file.write("\n")
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
