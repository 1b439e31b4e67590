"""The report of `bounds`."""

from typing import Any

from atlas_jax import environment
from atlas_jax.benchmark.tables import table

Result = dict[str, Any]

_REMEDIES = """\
- *default bound*: damped momentum, gradient of each token clipped, budget of \
a chunk's summed step, caps on weights and momentum (`atlas_jax.memory.Bound`);
- *budget of the diagonal*: the same with `budget="diagonal"`, one running sum;
- *none*: the bare equations (`bound=None`);
- *Huber objective, no bound*: the objective's slope is limited, nothing else;
- *layer norm inside, no bound*: the memory's output is normalised before the \
residual, as TTT does;
- *clip of each token only*: part 2 of the bound alone."""


def markdown(result: Result, command: str) -> str:
  """The report.

  Args:
    result: what `bounds.run` returns.
    command: the command line that writes it.
  """
  options = result["options"]
  rates = result["rates"]
  cases = len(result["cases"])
  depths = [d["depth"] for d in result["remedies"][0]["depths"]]
  blocks = [
    "# What keeps the inner descent finite",
    f"Written by `{command}`. {environment.sentence(result['environment'])}",
    "A memory descends on its own objective while it reads, with gradients "
    "taken once per chunk. Correlated keys then add up to steps that "
    "overshoot, and nothing in the equations stops it. Compared here, for "
    "Titans' rule (l2, momentum, scalar decay) over a window of 16 tokens in "
    "chunks of 64:",
    _REMEDIES,
    "## Finiteness",
    f"{cases} hostile cases for each depth of the memory, "
    f"{options['length']:,} tokens, width {options['width']}: streams of "
    "random tokens, of one token repeated, of one key with large values of "
    "alternating sign, of correlated keys, and of zeros with bursts of 10,000; "
    "gates all open, full rate without momentum, usual ones, and thrown "
    "between extremes by chance. *Values* and *gradients* count the cases with "
    "a number that is not finite; *largest* is the largest read-out among the "
    "others.",
    _finiteness(result, depths),
    "## Recall",
    "No training. Relative error `|y - v|² / |v|²`: 0 is perfect, 1 is what "
    "silence gets; depth 2, no momentum, all kept. *One fact* is written in "
    "one go among tokens that are ignored and asked for 100 tokens later. "
    f"*Stream*: {options['pairs']} pairs of width {options['fact_width']} "
    f"shown {options['times']} times in turn, all asked for at the end. Mean "
    f"over {options['seeds']} draws, for each rate (1 is the largest that a "
    "layer uses by default with a window of 1).",
    _recall(result, rates),
  ]
  if options["steps"]:
    blocks += [
      "## Outer training",
      "A byte model of two such memory layers (width 64, 2 heads, window 8, "
      "chunks of 32), trained on source of Python's standard library for "
      f"{options['steps']} steps at the normal learning rate and at four times "
      "that. Loss in nats per byte, mean of the last fifth of the steps; in "
      "brackets the largest after the first fifth.",
      _training(result),
    ]
  return "\n\n".join(blocks) + "\n"


def _finiteness(result: Result, depths: list[int]) -> str:
  header = ["", *(f"depth {d}: values, gradients, largest" for d in depths)]
  total = len(result["cases"])
  rows = []
  for remedy in result["remedies"]:
    row = [remedy["name"]]
    for found in remedy["depths"]:
      kept = [x for x in found["largest"] if x is not None]
      largest = f"{max(kept):.1e}" if kept else "-"
      row.append(
        f"{found['bad']} / {total}, {found['bad_slopes']} / {total}, {largest}"
      )
    rows.append(row)
  return table(header, rows)


def _recall(result: Result, rates: list[float]) -> str:
  header = ["", *(f"rate {rate:g}" for rate in rates), "best"]
  rows = []
  for name, title in (("one_fact", "one fact"), ("stream", "stream")):
    for remedy in result["remedies"]:
      errors = remedy[name]
      kept = [x for x in errors if x is not None]
      best = _error(min(kept)) if kept else "-"
      rows.append([f"{title}: {remedy['name']}", *map(_error, errors), best])
  return table(header, rows)


def _error(value: float | None) -> str:
  if value is None:
    return "not finite"
  return f"{value:.3f}" if value < 1e3 else f"{value:.0e}"


def _training(result: Result) -> str:
  first = result["remedies"][0]["training"]
  rates = [f"learning rate {run['learning_rate']:g}" for run in first]
  rows = [
    [remedy["name"], *map(_run, remedy["training"])]
    for remedy in result["remedies"]
  ]
  return table(["", *rates], rows)


def _run(run: Result) -> str:
  if run["first_bad"] is not None:
    return f"not finite at step {run['first_bad'] + 1}"
  return f"{run['loss']:.3f} ({run['largest']:.3f})"
