"""Speed and memory of one memory layer beside the obvious ways to do it.

Every case is compiled and run once; then all cases take turns, round after
round, so that a ratio compares neighbours in time. The scan over tokens and the
materialised form run only where they fit: the compiler's own figure decides,
and where that is not at hand yet the line through the lengths before.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax import environment
from atlas_jax import memory as am
from atlas_jax.benchmark import layer, measure
from atlas_jax.errors import UserError

Say = Callable[[str], None]

LENGTHS = (1024, 2048, 4096, 8192, 32768)

# Methods whose memory decides how far they get.
_LIMITED = (layer.TOKENS, layer.MATERIALISED)


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure.

  Attributes:
    lengths: tokens of a sequence, rising.
    windows: windows of the memory.
    repeats: rounds after the first call; medians are taken over them.
    turn_seconds: how long a case runs in each round, at least.
    limit_bytes: memory up to which the obvious ways are run.
    patience: seconds of calls after which a case sits out the later rounds;
      ours never does.
    compare_at: the length of the ratios.
    decode_tokens: tokens that are stepped through.
    longest_whole: longest sequence for which attention forms all scores.
    shape: widths of the layer.
  """

  lengths: tuple[int, ...] = LENGTHS
  windows: tuple[int, ...] = (1, 16)
  repeats: int = 5
  turn_seconds: float = 0.5
  limit_bytes: int = 12 * 2**30
  patience: float = 10.0
  compare_at: int = 2048
  decode_tokens: int = 1024
  longest_whole: int = 4096
  shape: layer.Shape = layer.Shape()

  def __post_init__(self):
    if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
      raise UserError(f"lengths {self.lengths}: give rising numbers")
    for length in self.lengths:
      if length < 1 or length % self.shape.chunk:
        raise UserError(
          f"length {length}: use a multiple of the chunk {self.shape.chunk}"
        )
    if self.repeats < 1:
      raise UserError(f"repeats {self.repeats}: use 1 or more")


def parse_lengths(words: Sequence[str]) -> tuple[int, ...]:
  """Reads lengths from text.

  Raises:
    UserError: one of them is no number.
  """
  try:
    return tuple(int(word) for word in words)
  except ValueError:
    raise UserError(
      f"lengths {','.join(words)!r}: give whole numbers, say 1024,2048"
    ) from None


@dataclasses.dataclass
class Case:
  """One method at one length, forward alone or with the backward pass.

  Attributes:
    method: a name of `layer`.
    window: of the memory; None for attention.
    length: tokens.
    backward: whether gradients of parameters and input are taken.
    peak_bytes: planned temporaries and outputs.
    program: None if it does not fit.
    compiled: whether `peak_bytes` comes from the program itself.
    timings: of the first call, then of one call in each round.
    resident_bytes: growth of the resident set during the first call.
  """

  method: str
  window: int | None
  length: int
  backward: bool
  peak_bytes: int = 0
  program: measure.Program | None = None
  compiled: bool = True
  timings: list[measure.Timing] = dataclasses.field(default_factory=list)
  resident_bytes: int | None = None

  @property
  def steady(self) -> list[measure.Timing]:
    """The timings that count: without the first, if there are others."""
    return self.timings[1:] or self.timings

  def record(self) -> dict[str, Any]:
    """Everything measured, ready for JSON."""
    out = {
      "method": self.method,
      "window": self.window,
      "length": self.length,
      "backward": self.backward,
      "fits": self.program is not None,
      "peak_bytes": self.peak_bytes,
      "peak_from": "compiler" if self.compiled else "line",
    }
    if self.program is None:
      return out
    middle = measure.median(self.steady)
    return out | {
      "resident_bytes": self.resident_bytes,
      "compile_seconds": self.program.compile_seconds,
      "wall_seconds": [t.wall for t in self.timings],
      "cpu_seconds": [t.cpu for t in self.timings],
      "tokens_per_second": self.length / middle.wall,
      "tokens_per_cpu_second": self.length / middle.cpu,
    }


def run(options: Options, say: Say = lambda line: None) -> dict[str, Any]:
  """Measures everything.

  Args:
    options: what to measure.
    say: takes a line about the progress.

  Returns:
    JSON-ready: `environment`, `options`, `cases`, `decode`.
  """
  found = environment.describe()
  cases = prepare(options, say)
  _take_turns(options, [c for c in cases if c.program is not None], say)
  return {
    "environment": found,
    "options": dataclasses.asdict(options),
    "cases": [case.record() for case in cases],
    "decode": [decode(options, window, say) for window in options.windows],
  }


def prepare(options: Options, say: Say = lambda line: None) -> list[Case]:
  """Compiles every case that fits; the others know what they would need."""
  cases = []
  for method, window in methods(options):
    for backward in (False, True):
      points: list[tuple[int, int]] = []
      for length in options.lengths:
        if method == layer.ATTENTION and length > options.longest_whole:
          continue
        case = Case(method, window, length, backward)
        _plan(options, case, points)
        cases.append(case)
        say(f"{_name(case)}: {_planned(case)}")
  return cases


def methods(options: Options) -> list[tuple[str, int | None]]:
  """Method and window of every line of the report."""
  memories = (layer.TOKENS, layer.MATERIALISED, layer.OURS)
  lines: list[tuple[str, int | None]] = [
    (method, window) for window in options.windows for method in memories
  ]
  return [*lines, (layer.ATTENTION, None), (layer.BLOCKED, None)]


def _plan(options: Options, case: Case, points: list[tuple[int, int]]) -> None:
  """Fills in the program, or the memory that it would need.

  `points` are lengths and bytes of the same program compiled so far.
  """
  limited = case.method in _LIMITED
  if limited and points and points[-1][1] > options.limit_bytes:
    # It grows with the length; a single point too large is extended as if all
    # of it did.
    line = points if len(points) > 1 else [(0, 0), *points]
    case.peak_bytes = measure.predict(line, case.length)
    case.compiled = False
    return
  if limited and len(points) > 1:
    case.peak_bytes = measure.predict(points, case.length)
    case.compiled = False
    if case.peak_bytes > options.limit_bytes:
      return
  program = measure.compile_program(
    _function(options, case), *_shapes(options, case)
  )
  points.append((case.length, program.peak_bytes))
  case.peak_bytes, case.compiled = program.peak_bytes, True
  if not limited or program.peak_bytes <= options.limit_bytes:
    case.program = program


def _function(options: Options, case: Case) -> Callable[..., Any]:
  """What is compiled: a function of the parameters and the input."""
  shape = options.shape
  core = layer.core_of(case.method, layer.memory_of(shape, case.window or 1))
  if case.backward:
    loss = functools.partial(layer.loss, core, heads=shape.heads)
    return jax.value_and_grad(loss, argnums=(0, 1))
  return functools.partial(layer.apply, core, heads=shape.heads)


def _shapes(options: Options, case: Case) -> Any:
  return jax.eval_shape(lambda: _arguments(options, case.window, case.length))


def _arguments(options: Options, window: int | None, length: int):
  """Parameters of the layer and its input."""
  shape = options.shape
  memory = layer.memory_of(shape, window or 1)
  x = jax.random.normal(jax.random.key(1), (1, length, shape.dim))
  return layer.init(jax.random.key(0), shape, memory), x


def _take_turns(options: Options, cases: Sequence[Case], say: Say) -> None:
  """First calls, then rounds in which every case has a turn."""
  needed = {(case.window, case.length) for case in cases}
  arguments = {key: _arguments(options, *key) for key in needed}
  for case in cases:
    args = arguments[case.window, case.length]
    timing, resident = measure.run_resident(_program(case), *args)
    case.timings.append(timing)
    case.resident_bytes = resident
    say(f"{_name(case)}: first call {timing.wall:.2f} s")
  for turn in range(options.repeats):
    for case in cases:
      spent = sum(t.wall for t in case.timings)
      if case.method == layer.OURS or spent < options.patience:
        args = arguments[case.window, case.length]
        case.timings.append(
          measure.run_turn(_program(case), *args, seconds=options.turn_seconds)
        )
    say(f"round {turn + 1} of {options.repeats} done")


def _program(case: Case) -> measure.Program:
  assert case.program is not None
  return case.program


def decode(
  options: Options, window: int, say: Say = lambda line: None
) -> dict[str, Any]:
  """Times one token after another through `step`, with its cache.

  The calls cross chunk borders, at which the weights are written; projections
  are not included.

  Returns:
    JSON-ready: the window, microseconds per token on the clock and of the
    processor, and the seconds of compiling.
  """
  params, x = _arguments(options, window, options.decode_tokens)
  memory = layer.memory_of(options.shape, window)
  tokens = layer.inputs(params, x, options.shape.heads)
  each = [
    jax.tree.map(lambda leaf, t=t: leaf[:, t], tokens)
    for t in range(options.decode_tokens)
  ]

  def step(state, params, token):
    query, key, value, gates = token
    out = am.step(memory, params, query, key, value, gates, state)
    return out.state, out.y

  params = params["memory"]
  start = am.with_cache(memory, params, am.init_state(memory, params, 1))
  # A donated argument is gone after the call: every pass needs its own.
  fresh = lambda: jax.tree.map(jnp.copy, start)
  program = measure.compile_program(step, fresh(), params, each[0], donate=0)

  def through(state):
    for token in each:
      state, y = program.call(state, params, token)
    return y

  passes = measure.Program(through, 0.0, 0)
  timings = [
    measure.run_once(passes, fresh()) for _ in range(options.repeats + 1)
  ]
  middle = measure.median(timings[1:])
  scale = 1e6 / options.decode_tokens
  say(f"step, window {window}: {middle.wall * scale:.0f} µs per token")
  return {
    "window": window,
    "tokens": options.decode_tokens,
    "wall_microseconds": middle.wall * scale,
    "cpu_microseconds": middle.cpu * scale,
    "compile_seconds": program.compile_seconds,
  }


def _name(case: Case) -> str:
  window = "" if case.window is None else f", window {case.window}"
  direction = "forward + backward" if case.backward else "forward"
  return f"{case.method}{window}, {case.length} tokens, {direction}"


def _planned(case: Case) -> str:
  size = f"{case.peak_bytes / 2**30:.2f} GiB"
  if case.program is None:
    return f"does not fit ({size})"
  return f"{size}, compiled in {case.program.compile_seconds:.1f} s"
