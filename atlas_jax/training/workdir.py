"""The folder of a run: who owns it, what it was asked, what it measured.

config.json       the resolved configuration, identity and history
metrics.jsonl     every measured number but time; same run, same bits
timing.jsonl      tokens per second
tokenizer/        what turns text into the model's tokens and back
checkpoints/N/    the state after step N
"""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging

from atlas_jax import config as configs
from atlas_jax import paths
from atlas_jax.errors import UserError
from atlas_jax.training import identity
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.disk import explained, write_json
from atlas_jax.training.writers import read_json_lines

_OWN = ("metrics.jsonl", "timing.jsonl", "checkpoints", "tokenizer")


class Workdir:
  """A folder that belongs to one run and, while open, to one process.

  Attributes:
    path: The folder.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = paths.expand(path).absolute()
    self._lock: Any = None

  @property
  def record(self) -> pathlib.Path:
    """The file that says which run this folder holds."""
    return self.path / "config.json"

  @property
  def metrics(self) -> pathlib.Path:
    """The file of metrics, JSON lines."""
    return self.path / "metrics.jsonl"

  @property
  def timing(self) -> pathlib.Path:
    """The file of timings, JSON lines."""
    return self.path / "timing.jsonl"

  @property
  def tokenizer(self) -> pathlib.Path:
    """The folder of the tokenizer."""
    return self.path / "tokenizer"

  @property
  def checkpoints(self) -> pathlib.Path:
    """The folder of the checkpoints."""
    return self.path / "checkpoints"

  @contextlib.contextmanager
  def claimed(self):
    """Makes the folder if need be and holds it against other trainers.

    The lock is the kernel's: it ends with the process, however that ends.

    Raises:
      UserError: Another process trains here, or the folder cannot be made.
    """
    with explained(self.path):
      self.path.mkdir(parents=True, exist_ok=True)
      file = (self.path / "lock").open("a+", encoding="utf-8")
    with file:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        file.seek(0)
        raise UserError(
          f"{self.path} is in use by process {file.read().strip() or '?'}: "
          "stop that one, or give another --workdir"
        ) from None
      except OSError as error:
        logging.warning("cannot lock %s: %s", self.path, error)
      file.truncate(0)
      file.write(f"{os.getpid()}\n")
      file.flush()
      yield

  def check(self, config: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
    """Compares the folder's run with the one now asked for; writes nothing.

    Returns:
      The settings that changed and may change: (old, new) by dotted name.

    Raises:
      UserError: The folder holds another run, or files that no run recorded.
    """
    record = self.read()
    if record is None:
      # A run that was killed before it wrote its record left an empty folder.
      foreign = [name for name in _OWN if _holds(self.path / name)]
      if foreign:
        raise UserError(
          f"{self.path} has a {foreign[0]} but no config.json, so it is not "
          "known which run it holds: give another --workdir"
        )
      return {}
    changed = identity.changes(record["config"], config)
    identity.refuse_other_run(changed, str(self.path))
    return changed

  def read(self) -> dict[str, Any] | None:
    """Returns what `write` recorded, or None in a folder without a run.

    Raises:
      UserError: config.json is there but damaged.
    """
    return read_record(self.record)

  def write(self, record: Mapping[str, Any]) -> None:
    """Records the run: `config` and whatever else tells it from others."""
    write_json(self.record, record)

  def heldout(self) -> dict[int, dict[str, float]]:
    """Returns the held-out metrics written so far, by step."""
    if not self.metrics.exists():
      return {}
    prefix = "heldout/"
    return {
      line["step"]: {
        k.removeprefix(prefix): v for k, v in line.items() if k != "step"
      }
      for line in read_json_lines(self.metrics)
      if any(name.startswith(prefix) for name in line)
    }

  def rewind(self, step: int) -> None:
    """Drops lines of later steps, which a resumed run will write anew.

    Args:
      step: The step of the restored state; -1 drops every line.
    """
    for path in (self.metrics, self.timing):
      if not path.exists():
        continue
      lines = [x for x in read_json_lines(path) if x["step"] <= step]
      temporary = path.with_name(path.name + ".tmp")
      with explained(path):
        with temporary.open("w", encoding="utf-8") as file:
          file.writelines(json.dumps(line) + "\n" for line in lines)
          file.flush()
          os.fsync(file.fileno())
        temporary.replace(path)


def _holds(path: pathlib.Path) -> bool:
  """Whether there is a file, or a folder with something in it."""
  return any(path.iterdir()) if path.is_dir() else path.exists()


def read_record(path: pathlib.Path) -> dict[str, Any] | None:
  """Reads a run's config.json; None where there is none.

  Raises:
    UserError: The file is damaged.
  """
  try:
    record = json.loads(path.read_text(encoding="utf-8"))
    configs.from_dict(ExperimentConfig, record["config"])
    if not isinstance(record.get("history", []), list):
      raise ValueError("no history")
  except FileNotFoundError:
    return None
  except NotADirectoryError:
    raise UserError(f"{path.parent} is a file, not a folder") from None
  except (OSError, UserError) as error:
    raise UserError(f"cannot use {path}: {error}") from None
  except (ValueError, KeyError, TypeError, AttributeError):
    raise UserError(
      f"{path} is damaged: restore it from a copy, or give another --workdir"
    ) from None
  return record
