"""What a compiled program costs: time, planned memory, resident memory."""

import ctypes
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from atlas_jax.errors import UserError

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")


class Timing(NamedTuple):
  """One call: seconds on the clock, and of all the process's threads."""

  wall: float
  cpu: float


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled function of known shapes.

  Attributes:
    call: the executable.
    compile_seconds: tracing, lowering and compiling, on the clock.
    peak_bytes: temporaries and outputs, as the compiler planned them.
  """

  call: Callable[..., Any]
  compile_seconds: float
  peak_bytes: int


def compile_program(
  function: Callable[..., Any], *args: Any, donate: int | None = None
) -> Program:
  """Compiles for arguments of these shapes (arrays or their shapes).

  Args:
    function: what to compile.
    args: its arguments, or what stands for their shapes.
    donate: index of an argument whose buffers the call may use up.
  """
  start = time.perf_counter()
  donated = () if donate is None else donate
  call = jax.jit(function, donate_argnums=donated).lower(*args).compile()
  seconds = time.perf_counter() - start
  plan = call.memory_analysis()
  if plan is None:
    raise UserError(
      f"{jax.default_backend()} plans no memory that could be reported: run "
      "the benchmark on another backend"
    )
  peak = plan.temp_size_in_bytes + plan.output_size_in_bytes
  return Program(call, seconds, peak)


def run_once(program: Program, *args: Any) -> Timing:
  """Runs to the end and tells how long it took."""
  wall, cpu = time.perf_counter(), time.process_time()
  jax.block_until_ready(program.call(*args))
  return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def run_turn(program: Program, *args: Any, seconds: float) -> Timing:
  """Runs again and again for at least some seconds; the mean of one call.

  The first call is left out where others follow: it finds the processor's
  caches and the allocator as another program has left them.
  """
  first = run_once(program, *args)
  if first.wall >= seconds:
    return first
  timings = []
  while sum(timing.wall for timing in timings) < seconds:
    timings.append(run_once(program, *args))
  return Timing(
    statistics.fmean(timing.wall for timing in timings),
    statistics.fmean(timing.cpu for timing in timings),
  )


def run_resident(program: Program, *args: Any) -> tuple[Timing, int | None]:
  """As `run_once`, and by how many bytes the resident set grew at most.

  None where the system does not tell (it is Linux's /proc that does).
  """
  before = _reset_resident()
  timing = run_once(program, *args)
  after = _status("VmHWM")
  if before is None or after is None:
    return timing, None
  return timing, max(0, after - before)


def median(timings: Sequence[Timing]) -> Timing:
  """Medians of clock and processor seconds, each on its own."""
  return Timing(
    statistics.median(t.wall for t in timings),
    statistics.median(t.cpu for t in timings),
  )


def predict(points: Sequence[tuple[int, int]], length: int) -> int:
  """Bytes at `length`, on the line through the last two (length, bytes).

  The programs here keep something for every token and something once, so the
  compiler's own figures lie on a line.
  """
  (x0, y0), (x1, y1) = points[-2:]
  return round(y1 + (y1 - y0) / (x1 - x0) * (length - x1))


def _reset_resident() -> int | None:
  """Sets the process's peak to its resident set now, which is returned."""
  try:
    # What the allocator keeps for later would hide what a call needs.
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5")
  except (OSError, AttributeError):
    return None
  return _status("VmHWM")


def _status(name: str) -> int | None:
  try:
    lines = _STATUS.read_text().splitlines()
  except OSError:
    return None
  for line in lines:
    if line.startswith(f"{name}:"):
      return int(line.split()[1]) * 1024
  return None
