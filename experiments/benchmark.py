"""Measures the memory layer and writes reports.

  python -m experiments.benchmark --suite=memory
  python -m experiments.benchmark --suite=bounds
  python -m experiments.benchmark --suite=mixers

`memory` times the layer beside the obvious ways and attention (OUT/benchmark.md
and OUT/results/memory.json); `bounds` compares what keeps the inner descent
finite (OUT/bounds.md and OUT/results/bounds.json); `mixers` times every mixer
by name (OUT/mixers.md, OUT/results/mixers.json and OUT/images/mixers.png).
"""

import pathlib

from absl import flags as absl_flags

from atlas_jax.benchmark import (
  bounds,
  bounds_report,
  files,
  mixers,
  mixers_report,
  speed,
  speed_report,
)
from atlas_jax.errors import UserError
from experiments import flags

_SUITE = absl_flags.DEFINE_string("suite", None, "memory, bounds or mixers.")
_OUT = absl_flags.DEFINE_string("out", "docs", "Folder of the reports.")
_LENGTHS = absl_flags.DEFINE_list(
  "lengths",
  [str(n) for n in speed.LENGTHS],
  "Tokens of a sequence (memory, mixers).",
)
_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Rounds of calls (memory).")
_MIXERS = absl_flags.DEFINE_list(
  "mixers", [], "Names of mixers; all if empty (mixers)."
)
_COMMAND = "python -m experiments.benchmark --suite="


def main() -> None:
  """Runs the suite that the flags name."""
  suite = _SUITE.value
  if suite == "memory":
    lengths = speed.parse_lengths(_LENGTHS.value)
    options = speed.Options(lengths=lengths, repeats=_REPEATS.value)
    files.check(_OUT.value)
    result = speed.run(options, _say)
    result["figures"] = speed_report.derive(result)
    text = speed_report.markdown(result, result["figures"], _COMMAND + suite)
    paths = files.write(_OUT.value, "benchmark", suite, text, result)
  elif suite == "bounds":
    files.check(_OUT.value)
    result = bounds.run(bounds.Options(), _say)
    text = bounds_report.markdown(result, _COMMAND + suite)
    paths = files.write(_OUT.value, "bounds", suite, text, result)
  elif suite == "mixers":
    options = mixers.Options(
      names=tuple(_MIXERS.value),
      lengths=speed.parse_lengths(_LENGTHS.value),
    )
    files.check(_OUT.value)
    result = mixers.run(options, _say)
    text = mixers_report.markdown(result, _COMMAND + suite)
    paths = files.write(_OUT.value, "mixers", suite, text, result)
    picture = pathlib.Path(_OUT.value) / "images" / "mixers.png"
    mixers_report.draw(result, picture)
    paths = (*paths, picture)
  else:
    raise UserError(f"unknown suite {suite!r}: use memory, bounds or mixers")
  print("wrote", *paths)


def _say(line: str) -> None:
  print(line, flush=True)


if __name__ == "__main__":
  flags.run(main)
