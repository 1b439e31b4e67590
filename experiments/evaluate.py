"""Measures a trained model on text that it has not seen.

  python -m experiments.evaluate --workdir=DIR
  python -m experiments.evaluate --workdir=DIR --data.path=TEXT --context=512

Prints perplexity, bits per byte and the loss by context, and writes them, with
those of every document, as JSON and PNG into DIR/evaluation. Without a text
the run's own held-out documents are read.
"""

import sys

from absl import flags as absl_flags

from atlas_jax.errors import UserError
from atlas_jax.evaluation import EvaluationConfig, evaluate_run, plot
from atlas_jax.evaluation.run import OPTIONS
from atlas_jax.training import restore
from atlas_jax.training.config import ExperimentConfig
from experiments import flags

_WORKDIR = absl_flags.DEFINE_string(
  "workdir", None, "Folder of a run, or one checkpoint in it."
)
flags.define_fields(EvaluationConfig)
flags.define_fields(ExperimentConfig, only=OPTIONS)


def main() -> None:
  """Evaluates as the flags say."""
  if not _WORKDIR.value:
    raise UserError("no model given: add --workdir=DIR, the folder of a run")
  run = restore.load(_WORKDIR.value)
  report = evaluate_run(
    run,
    EvaluationConfig(**flags.overrides(EvaluationConfig)),
    flags.overrides(ExperimentConfig),
    progress=_show if sys.stderr.isatty() else lambda done, total: None,
  )
  path = report.write(run.home / "evaluation")
  print("\n".join([*report.text_lines(), "", str(path)]))
  if plot.available():
    picture = path.with_suffix(".png")
    plot.write(report, picture)
    print(picture)
  else:
    print("no picture: pip install 'atlas-jax[plot]'", file=sys.stderr)


def _show(done: int, total: int) -> None:
  end = "\n" if done == total else ""
  print(f"\r{done:,} of {total:,} tokens", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
  flags.run(main)
