"""Figures derived from the measurements of `speed`, and its report."""

from collections.abc import Callable, Sequence
from typing import Any

from atlas_jax import environment
from atlas_jax.benchmark import layer
from atlas_jax.benchmark.tables import table

# What is asked of the library's own form, on two cores.
SPEED_RATIO = 10.0
FLATNESS = 1.3
PEAK_RATIO = 0.1

Result = dict[str, Any]


def derive(result: Result) -> list[Result]:
  """The figures that the requirements are about, and their fulfilment.

  Args:
    result: what `speed.run` returns.

  Returns:
    entries with `name`, `value` (None if a case was not measured) and, where
    there is one, `required` and `met`.
  """
  at = result["options"]["compare_at"]
  figures = []
  for window in result["options"]["windows"]:
    ours = _find(result, layer.OURS, window, at, True)
    theirs = _find(result, layer.MATERIALISED, window, at, True)
    where = f"window {window}, {at} tokens, forward + backward"
    figures.append(
      _figure(
        f"speed of ours over weights materialised; {where}",
        _ratio(ours, theirs, "tokens_per_second"),
        f">= {SPEED_RATIO:g}",
        lambda value: value >= SPEED_RATIO,
      )
    )
    figures.append(
      _figure(
        f"peak of ours over weights materialised; {where}",
        _ratio(ours, theirs, "peak_bytes"),
        f"<= {PEAK_RATIO:g}",
        lambda value: value <= PEAK_RATIO,
      )
    )
  for window in result["options"]["windows"]:
    for backward in (False, True):
      figures.append(
        _figure(
          f"slowest over fastest time per token of ours from {at} tokens on; "
          f"window {window}, {_direction(backward)}",
          flatness(result, window, backward),
          f"<= {FLATNESS:g}",
          lambda value: value <= FLATNESS,
        )
      )
      figures.append(
        {
          "name": "tokens from which ours is faster than the faster attention; "
          f"window {window}, {_direction(backward)}",
          "value": overtakes(result, window, backward),
        }
      )
  return figures


def flatness(result: Result, window: int, backward: bool) -> float | None:
  """Slowest over fastest time per token, from `compare_at` tokens on."""
  speeds = [
    case["tokens_per_second"]
    for case in _cases(result, layer.OURS, window, backward)
    if case["length"] >= result["options"]["compare_at"]
  ]
  return max(speeds) / min(speeds) if len(speeds) > 1 else None


def overtakes(result: Result, window: int, backward: bool) -> int | None:
  """Shortest measured length from which on ours is always the faster."""
  first = None
  for case in _cases(result, layer.OURS, window, backward):
    rivals = [
      _find(result, method, None, case["length"], backward)
      for method in (layer.ATTENTION, layer.BLOCKED)
    ]
    best = max(r["tokens_per_second"] for r in rivals if r is not None)
    if case["tokens_per_second"] <= best:
      first = None
    elif first is None:
      first = case["length"]
  return first


def markdown(result: Result, figures: Sequence[Result], command: str) -> str:
  """The report.

  Args:
    result: what `speed.run` returns.
    figures: what `derive` returns.
    command: the command line that writes it.
  """
  options = result["options"]
  shape = options["shape"]
  width = shape["dim"] // shape["heads"]
  blocks = [
    "# Speed and memory of one memory layer",
    f"Written by `{command}`. {environment.sentence(result['environment'])}",
    f"Batch 1, width {shape['dim']}, {shape['heads']} heads of {width}, "
    "float32; projections to queries, keys, values, gates and back are in all "
    f"lines. The memory is an MLP {width}-{4 * width}-{width} (GELU, residual) "
    "with the l2 objective, momentum, scalar decay, and the default bound; "
    f"gradients are taken once per chunk of {shape['chunk']} tokens.",
    "- *token scan*: `lax.scan` over tokens, gradients at each token's own "
    "weights, steps recomputed in the backward pass;\n"
    "- *weights materialised*: each chunk's momenta and weights by "
    "`lax.associative_scan`, every token's weights kept, nothing recomputed;\n"
    "- *ours*: `atlas_jax.memory.apply` as it is by default;\n"
    "- *attention*: causal softmax attention with all scores at once (up to "
    f"{options['longest_whole']} tokens), and by blocks of queries.",
    f"Medians of up to {options['repeats']} turns on the clock, all cases in "
    "turn (cases whose calls take more than "
    f"{options['patience']:g} s together have fewer). In a turn a program runs "
    f"for at least {options['turn_seconds']:g} s, and the first call is left "
    "out where others follow. *Peak* is what the "
    "compiler plans for temporaries and outputs; *resident* is by how much the "
    "process grew during the first call. The two obvious ways run where their "
    f"peak is at most {options['limit_bytes'] / 2**30:g} GiB.",
    "## Required and found",
    table(
      ("figure", "found", "required"),
      (
        (f["name"], _value(f), f"{f['required']} {_met(f)}")
        if "required" in f
        else (f["name"], _value(f), "")
        for f in figures
      ),
    ),
  ]
  for backward in (False, True):
    title = _direction(backward).capitalize()
    blocks += [
      f"## {title}: tokens per second",
      _grid(result, backward, lambda c: f"{c['tokens_per_second']:,.0f}"),
      f"## {title}: peak (resident), MiB",
      _grid(result, backward, _memory),
      f"## {title}: seconds of compiling",
      _grid(result, backward, lambda c: f"{c['compile_seconds']:.1f}"),
    ]
  blocks += [
    "## One token at a time",
    "`atlas_jax.memory.step` with its cache, without projections, mean over "
    f"{options['decode_tokens']} tokens.",
    table(
      ("window", "µs per token", "seconds of compiling"),
      (
        (
          str(d["window"]),
          f"{d['wall_microseconds']:.0f}",
          f"{d['compile_seconds']:.1f}",
        )
        for d in result["decode"]
      ),
    ),
  ]
  return "\n\n".join(blocks) + "\n"


def _grid(result: Result, backward: bool, show: Callable[[Result], str]) -> str:
  """One line for each method, one column for each length."""
  lengths = result["options"]["lengths"]
  lines: dict[tuple[str, int | None], dict[int, str]] = {}
  for case in result["cases"]:
    if case["backward"] == backward:
      line = lines.setdefault((case["method"], case["window"]), {})
      line[case["length"]] = show(case) if case["fits"] else _too_large(case)
  rows = (
    [
      method if window is None else f"{method}, window {window}",
      *(cells.get(length, "") for length in lengths),
    ]
    for (method, window), cells in lines.items()
  )
  return table(("", *(f"{n:,}" for n in lengths)), rows)


def _too_large(case: Result) -> str:
  return f"does not fit ({case['peak_bytes'] / 2**30:.0f} GiB)"


def _memory(case: Result) -> str:
  resident = case["resident_bytes"]
  beside = "?" if resident is None else f"{resident / 2**20:,.0f}"
  return f"{case['peak_bytes'] / 2**20:,.0f} ({beside})"


def _cases(
  result: Result, method: str, window: int | None, backward: bool
) -> list[Result]:
  """Measured cases by rising length."""
  return [
    case
    for case in result["cases"]
    if case["fits"]
    and (case["method"], case["window"], case["backward"])
    == (method, window, backward)
  ]


def _find(
  result: Result, method: str, window: int | None, length: int, backward: bool
) -> Result | None:
  for case in _cases(result, method, window, backward):
    if case["length"] == length:
      return case
  return None


def _ratio(one: Result | None, two: Result | None, name: str) -> float | None:
  if one is None or two is None:
    return None
  return one[name] / two[name]


def _figure(
  name: str, value: float | None, required: str, test: Callable[[float], bool]
) -> Result:
  met = None if value is None else test(value)
  return {"name": name, "value": value, "required": required, "met": met}


def _value(figure: Result) -> str:
  value = figure["value"]
  if value is None:
    return "not measured" if "required" in figure else "not yet"
  return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _met(figure: Result) -> str:
  return {True: "(met)", False: "(MISSED)", None: ""}[figure["met"]]


def _direction(backward: bool) -> str:
  return "forward + backward" if backward else "forward"
