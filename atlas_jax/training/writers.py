"""Where metrics go: a file of JSON lines, TensorBoard, or several at once."""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from atlas_jax.errors import UserError
from atlas_jax.training.disk import explained


class MetricWriter(Protocol):
  """Takes the metrics of one step after the other."""

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Records metrics by name; steps never decrease."""

  def flush(self) -> None:
    """Returns when all that was written would survive the process."""

  def close(self) -> None:
    """Flushes and lets go of the files."""


class JsonLines:
  """Appends one JSON object per call: {"step": 10, "train/loss": 2.5}.

  A number that is not finite is written as the string "nan", "inf" or "-inf",
  since JSON has none of them.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self._path = pathlib.Path(path)
    with explained(self._path):
      self._file = self._path.open("a", encoding="utf-8")

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """See MetricWriter."""
    line: dict[str, Any] = {"step": step}
    for name, value in metrics.items():
      line[name] = value if math.isfinite(value) else str(value)
    with explained(self._path):
      self._file.write(json.dumps(line) + "\n")
      self._file.flush()

  def flush(self) -> None:
    """See MetricWriter."""
    with explained(self._path):
      self._file.flush()
      os.fsync(self._file.fileno())

  def close(self) -> None:
    """See MetricWriter."""
    with explained(self._path):
      self._file.close()


class TensorBoard:
  """Writes TensorBoard events; needs tensorboardX (the extra `tb`).

  Args:
    folder: Where the event files go.
    after: Events of later steps, from a run that was cut short, are hidden.
  """

  def __init__(self, folder: str | os.PathLike[str], *, after: int):
    try:
      import tensorboardX
    except ImportError:
      raise UserError(
        "train.tensorboard needs tensorboardX: "
        "pip install 'atlas-jax[tb]', or leave the flag away"
      ) from None
    self._writer = tensorboardX.SummaryWriter(
      os.fspath(folder), purge_step=after + 1
    )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """See MetricWriter."""
    for name, value in metrics.items():
      self._writer.add_scalar(name, value, step)

  def flush(self) -> None:
    """See MetricWriter."""
    self._writer.flush()

  def close(self) -> None:
    """See MetricWriter."""
    self._writer.close()


class Several:
  """Writes to each of several writers; with none, a writer to nowhere."""

  def __init__(self, writers: Sequence[MetricWriter] = ()):
    self._writers = tuple(writers)

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """See MetricWriter."""
    for writer in self._writers:
      writer.write(step, metrics)

  def flush(self) -> None:
    """See MetricWriter."""
    for writer in self._writers:
      writer.flush()

  def close(self) -> None:
    """See MetricWriter."""
    for writer in self._writers:
      writer.close()


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the complete lines of a file that `JsonLines` wrote.

  A last line that a killed process left incomplete is left out.

  Raises:
    UserError: The file cannot be read, or an earlier line is damaged.
  """
  path = pathlib.Path(path)
  try:
    texts = path.read_bytes().splitlines()
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from None
  lines = []
  for number, text in enumerate(texts, 1):
    try:
      line = json.loads(text)
      if not isinstance(line, dict) or not isinstance(line["step"], int):
        raise ValueError("not the metrics of a step")
    except (ValueError, KeyError):
      if number == len(texts):
        break
      raise UserError(
        f"line {number} of {path} is damaged: mend it, or move the file away "
        "to go on without the metrics so far"
      ) from None
    lines.append(line)
  return lines
