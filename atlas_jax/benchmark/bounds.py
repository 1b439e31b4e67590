"""Compares ways to keep the inner descent finite: safety beside quality."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from atlas_jax import environment
from atlas_jax.benchmark import hostile, outer, recall, remedies

Say = Callable[[str], None]
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
  """What to compare, and at what size.

  Attributes:
    depths: matrices of the memories that meet hostile streams.
    length: tokens of each hostile stream.
    width: of keys and values there.
    fact_width: of keys and values of the facts to recall.
    pairs, times: pairs of a stream to recall, and how often each is shown.
    seeds: draws of keys, values and start weights that recall is averaged over.
    learning_rate: the normal one of outer training; four times as much is the
      other.
    steps: of outer training; 0 leaves it out.
    train_length: tokens of a row there.
  """

  depths: tuple[int, ...] = (1, 2, 4)
  length: int = 4096
  width: int = 16
  fact_width: int = 32
  pairs: int = 32
  times: int = 8
  seeds: int = 8
  learning_rate: float = 3e-3
  steps: int = 300
  train_length: int = 256


def run(options: Options, say: Say = lambda line: None) -> Result:
  """Measures every remedy.

  Args:
    options: what to compare.
    say: takes a line about the progress.

  Returns:
    JSON-ready: `environment`, `options`, `rates`, `cases` (names) and
    `remedies`. A number that is not finite is None.
  """
  return {
    "environment": environment.describe(),
    "options": dataclasses.asdict(options),
    "rates": list(recall.RATES),
    "cases": hostile.names(),
    "remedies": [_remedy(options, name, say) for name in remedies.REMEDIES],
  }


def _remedy(options: Options, name: str, say: Say) -> Result:
  start = time.perf_counter()
  depths = [_hostile(options, name, depth) for depth in options.depths]
  memory = remedies.memory_of(name)
  sizes = {"width": options.fact_width, "seeds": options.seeds}
  fact = recall.one_fact(memory, **sizes)
  stream = recall.stream(memory, options.pairs, options.times, **sizes)
  found = {
    "name": name,
    "depths": depths,
    "one_fact": _numbers(fact),
    "stream": _numbers(stream),
    "training": _training(options, name) if options.steps else [],
  }
  say(f"{name}: {time.perf_counter() - start:.0f} s")
  return found


def _hostile(options: Options, name: str, depth: int) -> Result:
  memory = remedies.memory_of(name, depth=depth)
  out = hostile.outcomes(memory, options.length, options.width)
  return {
    "depth": depth,
    "bad": int((~out.finite).sum()),
    "bad_slopes": int((~out.slopes_finite).sum()),
    "largest": _numbers(out.largest),
  }


def _training(options: Options, name: str) -> list[Result]:
  memory = remedies.memory_of(name, window=8, chunk=32)
  rates = (options.learning_rate, 4 * options.learning_rate)
  runs = outer.train(
    memory, rates, steps=options.steps, length=options.train_length
  )
  return [
    {
      "learning_rate": rate,
      "loss": _number(run.loss),
      "first_bad": run.first_bad,
      "largest": _number(run.largest),
    }
    for rate, run in zip(rates, runs, strict=True)
  ]


def _numbers(values: Any) -> list[float | None]:
  return [_number(value) for value in np.asarray(values)]


def _number(value: float) -> float | None:
  """JSON has no infinity."""
  return float(value) if math.isfinite(value) else None
