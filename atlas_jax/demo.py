"""The demo: train on real text, show what was learnt, and beside what.

It prints the held-out bits per byte before and after training next to those of
interpolated byte trigrams, one fitted on exactly the bytes that training read,
one on the whole train split; then a sample; and draws the loss curve.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator

from atlas_jax import environment
from atlas_jax.data import Trigram, coverage, pipeline, tokenizers, windows
from atlas_jax.errors import UserError
from atlas_jax.generation import Generator, Sampling
from atlas_jax.training import identity, progress, restore, writers
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.disk import write_json
from atlas_jax.training.loop import Summary, train
from atlas_jax.training.workdir import Workdir

PROMPT = "import os\nimport sys\n\n\ndef "


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Held-out bits per byte, all over the same text.

  Attributes:
    before: of the model before training.
    after: of the model after training.
    trigram: of a trigram fitted on the bytes that training read.
    trigram_all: of a trigram fitted on the whole train split.
    bytes_read: bytes of text that training read, each counted once.
    bytes_all: bytes of the train split.
  """

  before: float
  after: float
  trigram: float
  trigram_all: float
  bytes_read: int
  bytes_all: int

  @property
  def margin(self) -> float:
    """Share by which the model is below the trigram of the same bytes."""
    return 1.0 - self.after / self.trigram

  def text(self) -> str:
    """A table of the figures."""
    rows = [
      ("model before training", self.before),
      ("model after training", self.after),
      (f"trigram on the same {self.bytes_read:,} bytes", self.trigram),
      (f"trigram on all {self.bytes_all:,} bytes", self.trigram_all),
    ]
    lines = ["held-out bits per byte"]
    lines += [f"  {name:<40} {value:6.3f}" for name, value in rows]
    lines.append(
      f"  the model is {abs(self.margin):.1%} "
      f"{'below' if self.margin > 0 else 'above'} the trigram of the same bytes"
    )
    return "\n".join(lines)


def run(
  config: ExperimentConfig,
  workdir: str | os.PathLike[str],
  reporter: progress.Reporter | None = None,
) -> tuple[Summary, Comparison]:
  """Trains, compares, and writes `comparison.json` into the run's folder.

  Raises:
    UserError: As `train`, where training did not come to its end, or where the
      run so far was measured on other held-out text.
  """
  if config.data.valid_fraction == 0 and not config.data.valid_path:
    raise UserError(
      "the demo compares on held-out text: make data.valid_fraction more than "
      "0, or give data.valid_path"
    )
  refuse_other_text(config, workdir)
  summary = train(config, workdir, reporter=reporter)
  if summary.status != "finished":
    raise UserError(summary.reason)
  comparison = compare(config, workdir, summary)
  path = Workdir(workdir).path / "comparison.json"
  if not summary.train and path.exists():
    # This call only shows the run: the file says how long training took.
    return summary, comparison
  figures = dataclasses.asdict(comparison) | {
    "margin": comparison.margin,
    "steps": summary.step,
    "parameters": summary.parameters,
    "seconds": summary.seconds,
    "environment": environment.describe(),
  }
  write_json(path, figures)
  return summary, comparison


def refuse_other_text(
  config: ExperimentConfig, workdir: str | os.PathLike[str]
) -> None:
  """Refuses to go on with a run whose held-out text was another so far.

  Raises:
    UserError: The figures before and after could not be compared.
  """
  record = Workdir(workdir).read()
  changed = identity.changes(record["config"], config) if record else {}
  if "data.eval_windows" in changed:
    before, _ = changed["data.eval_windows"]
    raise UserError(
      f"the run in {os.fspath(workdir)} was measured on other held-out text: "
      f"use --data.eval_windows={before}, or give another --workdir"
    )


def compare(
  config: ExperimentConfig,
  workdir: str | os.PathLike[str],
  summary: Summary,
) -> Comparison:
  """Held-out figures of a finished run and of trigrams on its text."""
  home = Workdir(workdir)
  tokenizer = tokenizers.load(os.fspath(home.tokenizer))
  prepared = windows.prepare(
    config.data,
    tokenizer,
    chunk=config.chunk,
    cache=config.data.cache or home.path / "cache",
  )
  read = coverage.window_bytes(
    prepared.train,
    tokenizer,
    pipeline.train_indices(
      prepared.train,
      batch=config.train.batch,
      steps=summary.step,
      seed=config.train.seed,
      shuffle=config.data.shuffle,
    ),
  )
  everything = coverage.window_bytes(
    prepared.train, tokenizer, range(prepared.train.windows)
  )
  heldout = coverage.window_bytes(
    prepared.valid,
    tokenizer,
    pipeline.valid_indices(prepared.valid, config.data.eval_windows),
  )
  scores = {
    step: figures["bits_per_byte"] for step, figures in summary.heldout.items()
  }
  if not {0, summary.step} <= scores.keys():
    raise UserError(
      f"{home.metrics} no longer holds the held-out figures before and after "
      "training: bring it back, or give another --workdir"
    )
  return Comparison(
    before=scores[0],
    after=scores[summary.step],
    trigram=Trigram(read).bits_per_byte(heldout),
    trigram_all=Trigram(everything).bits_per_byte(heldout),
    bytes_read=sum(map(len, read)),
    bytes_all=sum(map(len, everything)),
  )


def sample(
  workdir: str | os.PathLike[str], max_tokens: int = 400
) -> Iterator[str]:
  """Yields the prompt and then what the trained model makes of it."""
  trained = restore.load(workdir)
  generator = Generator(
    trained.model, trained.tokenizer, trained=trained.is_trained
  )
  yield PROMPT
  stream = generator.stream(
    [PROMPT],
    sampling=Sampling(temperature=0.8, top_k=40),
    max_tokens=max_tokens,
  )
  for piece in stream:
    yield piece.text


def draw(
  workdir: str | os.PathLike[str], comparison: Comparison
) -> pathlib.Path:
  """Draws the loss curve of a run beside its baselines, as a PNG.

  Raises:
    UserError: matplotlib is missing.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise UserError(
      "the loss curve needs matplotlib: pip install 'atlas-jax[plot]'"
    ) from error
  home = Workdir(workdir)
  curves: dict[str, list[tuple[int, float]]] = {"train": [], "heldout": []}
  for line in writers.read_json_lines(home.metrics):
    for part, points in curves.items():
      if f"{part}/bits_per_byte" in line:
        points.append((line["step"], line[f"{part}/bits_per_byte"]))
  figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
  axes = figure.subplots()
  if curves["train"]:
    axes.plot(
      *zip(*curves["train"], strict=True),
      color="#9bbbd4",
      linewidth=1,
      label="training batches",
    )
  axes.plot(
    *zip(*curves["heldout"], strict=True),
    color="#1f4e79",
    marker="o",
    markersize=4,
    label="held-out text",
  )
  for value, name, color in (
    (comparison.trigram, "trigram, same bytes", "#c0504d"),
    (comparison.trigram_all, "trigram, whole train split", "#8a8a8a"),
  ):
    axes.axhline(value, color=color, linestyle="--", linewidth=1, label=name)
  axes.set_xlabel("optimizer step")
  axes.set_ylabel("bits per byte")
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  axes.set_title("Learning to read at test time", fontsize=11)
  path = home.path / "loss_curve.png"
  figure.savefig(path)
  return path
