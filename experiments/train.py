"""Trains a language model, or goes on training one.

  python -m experiments.train --config=demo --workdir=DIR --train.steps=1000

Called again with the same arguments it goes on from the latest checkpoint.
SIGTERM and Ctrl-C save one and end with code 0; a loss that is no number ends
with code 1.
"""

import sys

import jax
from absl import flags as absl_flags

from atlas_jax.errors import UserError
from atlas_jax.training import progress
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.loop import train
from experiments import flags
from experiments.configs import PRESETS

flags.define_presets(PRESETS)
flags.define_fields(ExperimentConfig)
_WORKDIR = absl_flags.DEFINE_string(
  "workdir", None, "Folder of the run, made if need be."
)
_INIT_FROM = absl_flags.DEFINE_string(
  "init_from", None, "A run or one of its checkpoints; its weights are taken."
)
_DISTRIBUTED = absl_flags.DEFINE_bool(
  "distributed", False, "Train on all hosts of a cluster that jax detects."
)


def main() -> None:
  """Trains as the flags say."""
  config = flags.resolve(PRESETS)
  if not _WORKDIR.value:
    raise UserError("no folder given: add --workdir=DIR")
  if _DISTRIBUTED.value:
    jax.distributed.initialize()
  silent = jax.process_index() > 0
  summary = train(
    config,
    _WORKDIR.value,
    init_from=_INIT_FROM.value,
    reporter=progress.Silent() if silent else progress.for_stream(),
  )
  if summary.status == "non-finite":
    sys.exit(1)


if __name__ == "__main__":
  flags.run(main)
