"""Speed, latency, state and peak memory of every mixer of the registry.

One layer of each, all of the same width, one after the other: forward, forward
and backward at every length, one step of decoding, and the mixer's own
token-by-token definition beside it. A case that would need more memory or time
than allowed is not run: what it would need is predicted from the lengths before
and said.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from atlas_jax import config as configs
from atlas_jax import environment
from atlas_jax.benchmark import measure
from atlas_jax.config import suggestion
from atlas_jax.errors import UserError
from atlas_jax.layers.mixer import Mixer
from atlas_jax.models import ModelConfig
from atlas_jax.models.registry import REGISTRY

Say = Callable[[str], None]

LENGTHS = (1024, 2048, 4096, 8192, 32768)


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure.

  Attributes:
    names: mixers; empty: all.
    lengths: tokens of a sequence, rising.
    repeats: turns of a case, of which the median counts.
    turn_seconds: how long a turn lasts, at least.
    limit_bytes: planned memory beyond which a case is not run.
    limit_seconds: time of one call beyond which a case is not run.
    compare_at: length at which the definition is timed as well, and from which
      on the time per token is to be flat.
    dim, heads: of the layer.
    window: of mixers that attend to a window.
    decode_tokens: steps that are timed.
  """

  names: tuple[str, ...] = ()
  lengths: tuple[int, ...] = LENGTHS
  repeats: int = 3
  turn_seconds: float = 0.3
  limit_bytes: int = 10 * 2**30
  limit_seconds: float = 20.0
  compare_at: int = 2048
  dim: int = 256
  heads: int = 4
  window: int = 512
  decode_tokens: int = 64

  def __post_init__(self):
    if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
      raise UserError(f"lengths {self.lengths}: give rising numbers")
    if self.lengths[0] < 1 or self.repeats < 1:
      raise UserError("lengths and repeats must be 1 or more")
    for name in self.names:
      if name not in REGISTRY:
        raise UserError(
          f"unknown mixer {name!r}{suggestion(name, REGISTRY)}; there are "
          f"{', '.join(REGISTRY)}"
        )


def run(options: Options, say: Say = lambda line: None) -> dict[str, Any]:
  """Measures everything.

  Args:
    options: what to measure.
    say: takes a line about the progress.

  Returns:
    JSON-ready: `environment`, `options`, `mixers`.
  """
  found = environment.describe()
  return {
    "environment": found,
    "options": dataclasses.asdict(options),
    "mixers": [
      measure_mixer(options, name, say) for name in options.names or REGISTRY
    ],
  }


def measure_mixer(
  options: Options, name: str, say: Say = lambda line: None
) -> dict[str, Any]:
  """Everything about one mixer, ready for JSON."""
  mixer = mixer_of(options, name)
  slow = mixer_of(options, name, "reference")
  cases, definition = [], []
  for backward in (False, True):
    runs: list[_Run] = []
    for length in options.lengths:
      runs.append(_start(options, mixer, length, backward, runs))
    runs.append(_start_definition(options, slow, backward))
    _take_turns(options, runs)
    for run in runs:
      whose = " token by token" if run is runs[-1] else ""
      length = run.case["length"]
      say(
        f"{name}{whose}, {length} tokens, {_direction(backward)}: "
        f"{_shown(run.case)}"
      )
    *ours, theirs = (run.case for run in runs)
    cases += ours
    definition.append(theirs)
  decode = _decode(options, mixer)
  say(f"{name}: {1e6 * decode['seconds']:.0f} µs per step")
  jax.clear_caches()
  return {
    "name": name,
    "family": REGISTRY[name].family,
    "quadratic": "T²" in REGISTRY[name].cost,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(mixer)),
    "state_bytes": {
      str(length): _bytes(_state(mixer, length)) for length in options.lengths
    },
    "grows": mixer.capacity(_state(mixer, 1)) is not None,
    "cases": cases,
    "definition": definition,
    "decode": decode,
  }


def mixer_of(
  options: Options,
  name: str,
  implementation: Literal["auto", "reference"] = "auto",
) -> Mixer:
  """One layer of a mixer with random weights."""
  config = ModelConfig(
    mixer=name,
    dim=options.dim,
    heads=options.heads,
    layers=1,
    implementation=implementation,
  )
  entry = REGISTRY[name]
  if "hyena" in entry.options:
    longest = max(*options.lengths, options.compare_at)
    config = configs.replace(config, {"hyena.max_length": longest})
  if "attention.window" in entry.options:
    config = configs.replace(config, {"attention.window": options.window})
  make = jax.jit(lambda key: entry.make(config, nnx.Rngs(key)))
  return make(jax.random.key(0))


@dataclasses.dataclass
class _Run:
  """A case, and what is run for it; nothing where it would not fit."""

  case: dict[str, Any]
  call: Callable[[float], measure.Timing] | None = None
  turns: list[measure.Timing] = dataclasses.field(default_factory=list)

  def take_turn(self, seconds: float) -> None:
    """Runs for some seconds; the case then has the medians of all turns."""
    if self.call is None:
      return
    self.turns.append(self.call(seconds))
    middle = measure.median(self.turns)
    self.case["seconds"] = middle.wall
    self.case["cpu_seconds"] = middle.cpu
    self.case["tokens_per_second"] = self.case["length"] / middle.wall


def _start(
  options: Options,
  mixer: Mixer,
  length: int,
  backward: bool,
  before: Sequence[_Run],
) -> _Run:
  """One case after its first turn, or what it would need."""
  case = {"length": length, "backward": backward, "fits": False}
  peak, seconds = predict([run.case for run in before], length)
  if (peak is not None and peak > options.limit_bytes) or (
    seconds is not None and seconds > options.limit_seconds
  ):
    return _Run(case | {"peak_bytes": peak, "seconds": seconds})
  x = jax.random.normal(jax.random.key(1), (1, length, options.dim))
  program = measure.compile_program(_function(backward), mixer, x)
  case["peak_bytes"] = program.peak_bytes
  if program.peak_bytes > options.limit_bytes:
    return _Run(case | {"seconds": seconds})
  case |= {"fits": True, "compile_seconds": program.compile_seconds}
  run = _Run(
    case,
    lambda seconds: measure.run_turn(program, mixer, x, seconds=seconds),
  )
  measure.run_once(program, mixer, x)
  run.take_turn(options.turn_seconds)
  return run


def _take_turns(options: Options, runs: Sequence[_Run]) -> None:
  """The further turns, of one case after the other.

  A machine that is slow for a while is so for all of them.
  """
  for _ in range(options.repeats - 1):
    for run in runs:
      run.take_turn(options.turn_seconds)


def predict(
  before: Sequence[dict[str, Any]], length: int
) -> tuple[int | None, float | None]:
  """Bytes and seconds at a length, growing as they did between the last two.

  Growth is a power of the length: 1 for what is linear, 2 for all pairs.

  Args:
    before: cases of rising lengths, measured or predicted.
    length: a longer one.

  Returns:
    None for what is not known of two cases before.
  """
  known = before[-2:]

  def grown(name: str) -> float | None:
    if len(known) < 2 or any(case[name] is None for case in known):
      return None
    low, high = (max(case[name], 1e-9) for case in known)
    first, last = (case["length"] for case in known)
    power = math.log(high / low) / math.log(last / first)
    return high * (length / last) ** min(2.0, max(0.0, power))

  peak = grown("peak_bytes")
  return None if peak is None else round(peak), grown("seconds")


def _start_definition(options: Options, mixer: Mixer, backward: bool) -> _Run:
  """The token-by-token definition, first at small parts of the length."""
  before: list[_Run] = []
  single = dataclasses.replace(options, turn_seconds=0.0)
  for part in (16, 8):
    length = max(1, options.compare_at // part)
    before.append(_start(single, mixer, length, backward, before))
  return _start(options, mixer, options.compare_at, backward, before)


def _function(backward: bool) -> Callable[..., Any]:
  """What is compiled: a function of the mixer and its input."""

  def loss(mixer: Mixer, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(mixer(x).y))

  if backward:
    return jax.value_and_grad(loss, argnums=(0, 1))
  return lambda mixer, x: mixer(x).y


def _decode(options: Options, mixer: Mixer) -> dict[str, Any]:
  """Times one token after another, with room for `compare_at` of them."""
  room = max(options.compare_at, options.decode_tokens)
  state = mixer.init_state(1)
  if mixer.capacity(state) is not None:
    state = mixer.resize(state, room)
  state = mixer.prepare(state)
  x = jax.random.normal(jax.random.key(1), (1, options.dim))
  step = lambda state, mixer, x: mixer.step(x, state)
  fresh = lambda: jax.tree.map(jnp.copy, state)
  # A donated argument is gone after the call: every pass needs its own.
  program = measure.compile_program(step, fresh(), mixer, x, donate=0)

  def through(state: Any) -> jax.Array:
    for _ in range(options.decode_tokens):
      y, state = program.call(state, mixer, x)
    return y

  passes = measure.Program(through, 0.0, 0)
  turns = [
    measure.run_once(passes, fresh()) for _ in range(options.repeats + 1)
  ]
  middle = measure.median(turns[1:])
  return {
    "seconds": middle.wall / options.decode_tokens,
    "cpu_seconds": middle.cpu / options.decode_tokens,
    "room": room,
    "compile_seconds": program.compile_seconds,
  }


def _state(mixer: Mixer, length: int) -> Any:
  """Shapes of the state of one row after some tokens."""

  def make() -> Any:
    state = mixer.init_state(1)
    grows = mixer.capacity(state) is not None
    return mixer.resize(state, length) if grows else state

  return jax.eval_shape(make)


def _bytes(tree: Any) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _direction(backward: bool) -> str:
  return "forward + backward" if backward else "forward"


def _shown(case: dict[str, Any]) -> str:
  size = f"{case['peak_bytes'] / 2**20:,.0f} MiB"
  if case["fits"]:
    return f"{case['seconds']:.3f} s, {size}"
  if case["seconds"] is None:
    return f"not run, would take {size}"
  return f"not run, would take {case['seconds']:.0f} s and {size}"
