"""A picture of the loss by context; needs matplotlib, the extra `plot`."""

import importlib.util
import io
import pathlib

import numpy as np

from atlas_jax.errors import UserError
from atlas_jax.evaluation.positions import Bucket
from atlas_jax.evaluation.report import Report
from atlas_jax.training.disk import explained

# Two colours that are told apart whatever one's sight (Okabe and Ito).
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#595959"


def available() -> bool:
  """Whether matplotlib is installed."""
  return importlib.util.find_spec("matplotlib") is not None


def write(report: Report, path: pathlib.Path) -> None:
  """Draws a report's loss by context into a PNG.

  Args:
    report: The report.
    path: The file, which appears whole or not at all.

  Raises:
    UserError: matplotlib is not installed, or the file cannot be written.
  """
  if not available():
    raise UserError("pictures need matplotlib: pip install 'atlas-jax[plot]'")
  from matplotlib import ticker
  from matplotlib.figure import Figure

  result = report.result
  per_byte = result.bits_per_byte is not None
  figure = Figure(figsize=(7.2, 4.5), dpi=160, layout="constrained")
  axes = figure.add_subplot()
  _curve(
    axes,
    result.positions,
    per_byte,
    _BLUE,
    f"all {len(result.documents):,} documents",
  )
  # Beyond that length both curves are the same.
  within = [x for x in result.long_positions if x.last < result.long]
  if within and within[0].documents < len(result.documents):
    count = within[0].documents
    _curve(
      axes,
      within,
      per_byte,
      _ORANGE,
      f"the {count:,} with at least {result.long:,} tokens",
    )
  last = result.positions[-1].last
  if report.window > 1:
    axes.axvline(report.window, color=_GREY, linestyle=(0, (2, 3)), linewidth=1)
    axes.annotate(
      f"window of training: {report.window:,}",
      (report.window, 0.03),
      xycoords=("data", "axes fraction"),
      xytext=(-5, 0),
      textcoords="offset points",
      rotation=90,
      ha="right",
      va="bottom",
      color=_GREY,
      fontsize=8,
    )
  axes.set_xscale("log", base=2)
  axes.set_xlim(0.9, max(last, report.window) * 1.15)
  axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
  axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=12))
  axes.minorticks_off()
  axes.set_xlabel("context of a prediction (tokens of its document before it)")
  axes.set_ylabel("bits per byte" if per_byte else "loss (nats per token)")
  axes.grid(color="#dddddd", linewidth=0.6)
  axes.set_axisbelow(True)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  axes.legend(
    frameon=False, title="mean and one standard error", alignment="left"
  )
  axes.set_title(_title(report), loc="left", fontsize=10)
  image = io.BytesIO()
  figure.savefig(image, format="png")
  temporary = path.with_name(path.name + ".tmp")
  with explained(path):
    temporary.write_bytes(image.getvalue())
    temporary.replace(path)


def _title(report: Report) -> str:
  result = report.result
  bits = result.bits_per_byte
  figures = f"perplexity per token {result.perplexity:,.2f}"
  if bits is not None:
    figures = f"{bits:.3f} bits per byte, {figures}"
  memory = (
    f"a fresh memory every {report.context:,} tokens"
    if report.context
    else "one memory per document"
  )
  return f"Held-out text, step {report.step:,}: {figures}\n{memory}"


def _curve(
  axes, buckets: list[Bucket], per_byte: bool, color: str, label: str
) -> None:
  """One line with its band."""
  shown = [
    bucket
    for bucket in buckets
    if not per_byte or bucket.bits_per_byte is not None
  ]
  x = np.array([np.sqrt(bucket.first * bucket.last) for bucket in shown])
  loss = np.array([bucket.loss for bucket in shown])
  error = np.array([bucket.error or 0.0 for bucket in shown])
  if per_byte:
    bits = np.array([bucket.bits_per_byte for bucket in shown])
    loss, error = bits, error * bits / np.maximum(loss, 1e-12)
  axes.plot(
    x, loss, color=color, linewidth=1.6, marker="o", markersize=3.5, label=label
  )
  axes.fill_between(
    x, loss - error, loss + error, color=color, alpha=0.18, linewidth=0
  )
