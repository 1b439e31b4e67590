"""Writes a suite's report and its figures."""

import json
import pathlib
from typing import Any

from atlas_jax.errors import UserError


def write(
  folder: str, page: str, suite: str, report: str, result: dict[str, Any]
) -> tuple[pathlib.Path, pathlib.Path]:
  """Writes `FOLDER/PAGE.md` and `FOLDER/results/SUITE.json`.

  Returns:
    both paths.

  Raises:
    UserError: a file cannot be written.
  """
  root = pathlib.Path(folder)
  paths = root / f"{page}.md", root / "results" / f"{suite}.json"
  texts = report, json.dumps(result, indent=1) + "\n"
  try:
    for path, text in zip(paths, texts, strict=True):
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text, encoding="utf-8")
  except OSError as error:
    raise UserError(
      f"cannot write {error.filename}: {error.strerror}; choose another --out"
    ) from None
  return paths


def check(folder: str) -> None:
  """Makes sure, before the long work, that the folder can be written.

  Raises:
    UserError: it cannot.
  """
  root = pathlib.Path(folder) / "results"
  try:
    root.mkdir(parents=True, exist_ok=True)
    probe = root / ".probe"
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise UserError(
      f"cannot write into {folder}: {error.strerror}; choose another --out"
    ) from None
