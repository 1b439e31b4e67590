"""The report and the picture of the suite `mixers`."""

import importlib.util
import io
import pathlib
from collections.abc import Callable
from typing import Any

from atlas_jax import environment
from atlas_jax.benchmark.tables import table
from atlas_jax.errors import UserError

# What is asked of mixers whose cost is linear in the length.
FLATNESS = 1.3

# Flax runs them token by token, as their definition does.
_CELLS = ("lstm", "gru")

Result = dict[str, Any]


def markdown(result: Result, command: str) -> str:
  """The report.

  Args:
    result: what `mixers.run` returns.
    command: the command line that writes it.
  """
  options = result["options"]
  at = options["compare_at"]
  blocks = [
    "# Speed and memory of every mixer",
    f"Written by `{command}`. {environment.sentence(result['environment'])}",
    f"One layer each, batch 1, width {options['dim']}, {options['heads']} "
    f"heads, float32, all options as by default but windows of "
    f"{options['window']} tokens. Medians of {options['repeats']} turns of at "
    f"least {options['turn_seconds']:g} s on the clock, of all lengths of a "
    "mixer in turn. *Peak* is what the compiler plans for temporaries and "
    "outputs. A case that would need more than "
    f"{options['limit_bytes'] / 2**30:g} GiB or {options['limit_seconds']:g} s "
    "a call is not run: the number in brackets is what it would need, by the "
    "growth between the two lengths before.",
    "![Tokens per second by length, forward and backward, a line for each "
    "mixer.](images/mixers.png)",
    "## Required and found",
    f"*Gain*: speed over that of the mixer's own token-by-token definition at "
    f"{at:,} tokens; more than 1 is asked of all but LSTM and GRU, which are "
    "their definition (where that does not fit into memory, what it needs is "
    "said). *Flatness*: slowest over fastest time per token from "
    f"{at:,} tokens on; at most {FLATNESS:g} is asked of what is linear in the "
    "length.",
    table(
      (
        "mixer",
        "gain, forward",
        "gain, forward + backward",
        "flatness, forward",
        "flatness, forward + backward",
      ),
      (
        (
          found["name"],
          *(_gain_cell(found, backward, at) for backward in (False, True)),
          *(_flat_cell(found, backward, at) for backward in (False, True)),
        )
        for found in result["mixers"]
      ),
    ),
  ]
  for backward in (False, True):
    title = "Forward + backward" if backward else "Forward"
    blocks += [
      f"## {title}: tokens per second",
      _grid(result, backward, _pace),
      f"## {title}: peak, MiB",
      _grid(result, backward, _peak),
    ]
  lengths = [str(length) for length in options["lengths"]]
  blocks += [
    "## One token at a time, and the state",
    f"Mean over {options['decode_tokens']} steps; a state that grows has room "
    f"for {result['mixers'][0]['decode']['room']:,} tokens.",
    table(
      (
        "mixer",
        "parameters",
        "µs per step",
        *(f"state at {int(n):,}, KiB" for n in (lengths[0], lengths[-1])),
      ),
      (
        (
          found["name"],
          f"{found['parameters']:,}",
          f"{1e6 * found['decode']['seconds']:.0f}",
          *(
            f"{found['state_bytes'][n] / 1024:,.0f}"
            for n in (lengths[0], lengths[-1])
          ),
        )
        for found in result["mixers"]
      ),
    ),
  ]
  return "\n\n".join(blocks) + "\n"


def gain(found: Result, backward: bool, at: int) -> float | None:
  """Speed over the definition's; None if one of them was not run."""
  ours = _case(found["cases"], backward, at)
  theirs = _case(found["definition"], backward, at)
  if ours is None or theirs is None or not ours["fits"]:
    return None
  if theirs["seconds"] is None:
    return None
  return theirs["seconds"] / ours["seconds"]


def flatness(found: Result, backward: bool, at: int) -> float | None:
  """Slowest over fastest time per token from `at` tokens on."""
  paces = [
    case["tokens_per_second"]
    for case in found["cases"]
    if case["fits"] and case["backward"] == backward and case["length"] >= at
  ]
  return max(paces) / min(paces) if len(paces) > 1 else None


def draw(result: Result, path: pathlib.Path) -> None:
  """Draws tokens per second by length into a PNG.

  Raises:
    UserError: matplotlib is not installed, or the file cannot be written.
  """
  if importlib.util.find_spec("matplotlib") is None:
    raise UserError("pictures need matplotlib: pip install 'atlas-jax[plot]'")
  from matplotlib import colormaps
  from matplotlib.figure import Figure

  families: dict[str, list[Result]] = {}
  for found in result["mixers"]:
    families.setdefault(found["family"], []).append(found)
  columns = min(3, len(families))
  rows = -(-len(families) // columns)
  figure = Figure(
    figsize=(4.8 * columns, 3.8 * rows), dpi=130, layout="constrained"
  )
  panels = figure.subplots(rows, columns, sharex=True, sharey=True)
  flat = panels.ravel() if len(families) > 1 else [panels]
  for axes in flat[len(families) :]:
    axes.set_axis_off()
  for axes, (family, members) in zip(flat, families.items(), strict=False):
    for index, found in enumerate(members):
      cases = [c for c in found["cases"] if c["fits"] and c["backward"]]
      axes.plot(
        [case["length"] for case in cases],
        [case["tokens_per_second"] for case in cases],
        marker="osv^D"[index // 10],
        markersize=4,
        color=colormaps["tab10"](index % 10),
        label=found["name"],
      )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(family)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("tokens per second")
  figure.suptitle("One layer, forward + backward")
  picture = io.BytesIO()
  figure.savefig(picture, format="png")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture.getvalue())
  except OSError as error:
    raise UserError(f"cannot write {path}: {error.strerror}") from None


def _grid(result: Result, backward: bool, show: Callable[[Result], str]) -> str:
  """One line for each mixer, one column for each length."""
  lengths = result["options"]["lengths"]
  return table(
    ("", *(f"{n:,}" for n in lengths)),
    (
      [
        found["name"],
        *(
          show(case) for case in found["cases"] if case["backward"] == backward
        ),
      ]
      for found in result["mixers"]
    ),
  )


def _pace(case: Result) -> str:
  if case["fits"]:
    return f"{case['tokens_per_second']:,.0f}"
  if case["seconds"] is None:
    return "(does not fit)"
  return f"({case['seconds']:,.0f} s)"


def _peak(case: Result) -> str:
  size = f"{case['peak_bytes'] / 2**20:,.0f}"
  return size if case["fits"] else f"({size})"


def _gain_cell(found: Result, backward: bool, at: int) -> str:
  value = gain(found, backward, at)
  theirs = _case(found["definition"], backward, at)
  if value is None:
    if theirs is None or theirs["fits"]:
      return "not run"
    return f"needs {theirs['peak_bytes'] / 2**30:,.0f} GiB"
  cell = f"{value:.3g}"
  if theirs is not None and not theirs["fits"]:
    cell = f"{cell} (predicted)"
  missed = value <= 1 and found["name"] not in _CELLS
  return f"{cell} MISSED" if missed else cell


def _flat_cell(found: Result, backward: bool, at: int) -> str:
  value = flatness(found, backward, at)
  if value is None:
    return "not run"
  if found["quadratic"]:
    return f"{value:.2f} (quadratic)"
  return f"{value:.2f}" if value <= FLATNESS else f"{value:.2f} MISSED"


def _case(cases: list[Result], backward: bool, length: int) -> Result | None:
  for case in cases:
    if case["backward"] == backward and case["length"] == length:
      return case
  return None
