"""Trains the demo model on real text and shows what it has learnt.

  python -m experiments.demo

Called again it goes on where it was, or shows the finished run once more. Any
other text: `--data.path=FILE_OR_FOLDER --workdir=OTHER`.
"""

import sys

from absl import flags as absl_flags

from atlas_jax import demo
from atlas_jax.training import progress
from atlas_jax.training.config import ExperimentConfig
from experiments import flags
from experiments.configs import PRESETS

flags.define_presets(PRESETS)
flags.define_fields(ExperimentConfig)
_WORKDIR = absl_flags.DEFINE_string(
  "workdir", "runs/demo", "Folder of the run, made if need be."
)


def main() -> None:
  """Trains, compares, samples, draws."""
  if absl_flags.FLAGS["config"].value is None:
    absl_flags.FLAGS["config"].value = "demo"
  config = flags.resolve(PRESETS)
  workdir = _WORKDIR.value
  summary, comparison = demo.run(config, workdir, progress.for_stream())
  print(f"\n{comparison.text()}")
  print(
    f"\n{summary.parameters:,} parameters, {summary.step} steps, "
    f"{summary.seconds:.0f} s of training in this call"
  )
  print("\nsample\n------")
  for text in demo.sample(workdir):
    print(text, end="", flush=True)
  print(f"\n------\nloss curve: {demo.draw(workdir, comparison)}")
  print(
    f"more text: {sys.executable} -m experiments.generate "
    f"--workdir={workdir} --prompt='import '"
  )


if __name__ == "__main__":
  flags.run(main)
