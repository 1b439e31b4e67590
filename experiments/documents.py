"""Prints a document, or with --write puts it into a file."""

import pathlib

from absl import flags as absl_flags

from atlas_jax.errors import UserError

_WRITE = absl_flags.DEFINE_string("write", None, "Markdown file to write.")


def emit(printed: str, written: str) -> None:
  """Prints one text, or writes the other where `--write` says.

  Raises:
    UserError: The file cannot be written.
  """
  if _WRITE.value is None:
    print(printed)
    return
  try:
    pathlib.Path(_WRITE.value).write_text(written, encoding="utf-8")
  except OSError as error:
    raise UserError(f"cannot write {_WRITE.value}: {error.strerror}") from None
