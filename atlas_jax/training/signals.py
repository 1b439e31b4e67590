"""A polite request to stop: SIGTERM, or Ctrl-C once."""

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
  """While entered, turns the first SIGTERM or SIGINT into a request.

  A second SIGINT raises KeyboardInterrupt as usual. In a run of several
  processes both are left alone: SIGTERM belongs to jax.distributed, whose
  preemption service makes all processes stop after the same step. Outside the
  main thread, where Python takes no handlers, nothing is installed.
  """

  def __init__(self):
    self._signal: signal.Signals | None = None
    self._previous: dict[signal.Signals, Any] = {}

  def __enter__(self) -> "StopRequest":
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and jax.process_count() == 1:
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def after(self, step: int) -> bool:
    """Says whether the run should end after this step, on all processes."""
    if jax.process_count() == 1:
      return self._signal is not None
    return multihost_utils.reached_preemption_sync_point(step)

  @property
  def name(self) -> str:
    """The signal that asked, for the message."""
    return self._signal.name if self._signal else "preemption"

  def _handle(self, number: int, _: FrameType | None) -> None:
    if self._signal is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self._signal = signal.Signals(number)
