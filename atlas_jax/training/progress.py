"""What a person sees while a model trains."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class Reporter(Protocol):
  """Is told how far training has come."""

  def start(self, step: int, steps: int, tokens: int) -> None:
    """Training begins after `step`, ends at `steps`, `tokens` to a step."""

  def advance(self, step: int) -> None:
    """A step has been measured."""

  def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """A step's metrics were written."""

  def note(self, text: str) -> None:
    """Something happened that is worth a line."""

  def close(self) -> None:
    """Nothing more will be told."""


class Silent:
  """Tells nobody."""

  def start(self, step: int, steps: int, tokens: int) -> None:
    """See Reporter."""

  def advance(self, step: int) -> None:
    """See Reporter."""

  def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """See Reporter."""

  def note(self, text: str) -> None:
    """See Reporter."""

  def close(self) -> None:
    """See Reporter."""


class Pace:
  """Tokens per second and time to go, over the steps since it was made.

  The first step is not counted: it waits for the compiler.
  """

  def __init__(self):
    self._first: tuple[int, float] | None = None
    self._last: tuple[int, float] | None = None
    self._steps = 0
    self._tokens = 0

  def start(self, steps: int, tokens: int) -> None:
    """Sets the last step and the tokens of each."""
    self._steps, self._tokens = steps, tokens

  def advance(self, step: int) -> None:
    """Notes the time at which a step was measured."""
    self._last = (step, time.monotonic())
    self._first = self._first or self._last

  @property
  def tokens_per_second(self) -> float | None:
    """The mean pace, or None before the second step."""
    seconds = self._seconds_per_step()
    return None if seconds is None else self._tokens / max(seconds, 1e-9)

  @property
  def seconds_left(self) -> float | None:
    """An estimate, or None before the second step."""
    seconds = self._seconds_per_step()
    if seconds is None or self._last is None:
      return None
    return seconds * max(self._steps - self._last[0], 0)

  def text(self) -> str:
    """Both in words, or "" while not known."""
    rate, left = self.tokens_per_second, self.seconds_left
    if rate is None or left is None:
      return ""
    return f"{rate:,.0f} tokens/s  {duration(left)} left"

  def _seconds_per_step(self) -> float | None:
    if self._first is None or self._last is None:
      return None
    steps = self._last[0] - self._first[0]
    return (self._last[1] - self._first[1]) / steps if steps else None


class Lines:
  """Plain lines, for files and pipes.

  A reader that goes away, as `| head` does, or a full disk does not end the
  training.
  """

  def __init__(self, stream: TextIO | None = None):
    self._stream = stream or sys.stderr
    self._pace = Pace()
    self._steps = 0

  def start(self, step: int, steps: int, tokens: int) -> None:
    """See Reporter."""
    self._steps = steps
    self._pace.start(steps, tokens)

  def advance(self, step: int) -> None:
    """See Reporter."""
    self._pace.advance(step)

  def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """See Reporter."""
    pace = self._pace.text() if "train/loss" in metrics else ""
    text = "  ".join(filter(None, [summary(metrics), pace]))
    self.note(f"step {step}/{self._steps}  {text}")

  def note(self, text: str) -> None:
    """See Reporter."""
    with contextlib.suppress(OSError):
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """See Reporter."""


class Bar:
  """A progress bar, for terminals."""

  def __init__(self, stream: TextIO | None = None):
    self._pace = Pace()
    self._bar = Progress(
      TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
      BarColumn(bar_width=20),
      TextColumn("{task.fields[metrics]}  {task.fields[pace]}"),
      console=Console(file=stream or sys.stderr),
    )
    self._task = self._bar.add_task("", metrics="", pace="", total=1)

  def start(self, step: int, steps: int, tokens: int) -> None:
    """See Reporter."""
    self._pace.start(steps, tokens)
    self._bar.update(self._task, completed=step, total=steps)
    self._bar.start()

  def advance(self, step: int) -> None:
    """See Reporter."""
    self._pace.advance(step)
    self._bar.update(self._task, completed=step, pace=self._pace.text())

  def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """See Reporter."""
    if "train/loss" in metrics:
      self._bar.update(self._task, metrics=summary(metrics))
    else:
      self.note(f"step {step}  {summary(metrics)}")

  def note(self, text: str) -> None:
    """See Reporter."""
    self._bar.console.print(text, markup=False, highlight=False)

  def close(self) -> None:
    """See Reporter."""
    self._bar.stop()


def for_stream(stream: TextIO | None = None) -> Reporter:
  """Chooses a bar on a terminal and lines elsewhere (None: stderr)."""
  stream = stream or sys.stderr
  if stream is not None and stream.isatty():
    return Bar(stream)
  return Lines(stream)


def summary(metrics: Mapping[str, float]) -> str:
  """Says a few of a step's metrics in one line."""
  shown = {
    "train/loss": "loss {:.4f}",
    "train/bits_per_byte": "{:.4f} bits/byte",
    "train/grad_norm": "gradient {:.3g}",
    "train/learning_rate": "rate {:.3g}",
    "heldout/loss": "held-out loss {:.4f}",
    "heldout/bits_per_byte": "{:.4f} bits/byte",
  }
  return "  ".join(
    text.format(metrics[name])
    for name, text in shown.items()
    if name in metrics
  )


def duration(seconds: float) -> str:
  """Writes 3725 as 1h02m, 65 as 1m05s, 5 as 5s."""
  whole = round(seconds)
  hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
  if hours:
    return f"{hours}h{minutes:02}m"
  return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
