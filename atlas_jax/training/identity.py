"""Which runs are the same run: what a resumed run may and may not change."""

from collections.abc import Mapping
from typing import Any

from atlas_jax import config as configs
from atlas_jax.errors import UserError
from atlas_jax.training.config import ExperimentConfig

# These change neither the numbers of a step nor the order of the data; all
# other fields do. `train.steps` moves the end of the run (and of the cosine,
# where `train.decay_steps` does not fix it): allowed, and recorded. A new mesh
# changes sums in their last bits only.
FREE = (
  "train.steps",
  "train.log_every",
  "train.eval_every",
  "train.checkpoint_every",
  "train.keep",
  "train.tensorboard",
  "mesh.data",
  "mesh.fsdp",
  "data.cache",
  "data.eval_windows",
  "data.read_threads",
)


def changes(
  old: Mapping[str, Any], new: ExperimentConfig
) -> dict[str, tuple[Any, Any]]:
  """Returns (old, new) by dotted name for every field that differs.

  Args:
    old: A configuration as `config.to_dict` wrote it.
    new: The configuration now asked for.

  Raises:
    UserError: `old` is not an experiment's configuration.
  """
  before = configs.leaves(configs.from_dict(ExperimentConfig, old))
  after = configs.leaves(new)
  return {
    name: (before[name].default, leaf.default)
    for name, leaf in after.items()
    if before[name].default != leaf.default
  }


def refuse_other_run(
  changed: Mapping[str, tuple[Any, Any]], workdir: str
) -> None:
  """Raises UserError if a field that makes the run's identity has changed."""
  fixed = {k: v for k, v in changed.items() if k not in FREE}
  if not fixed:
    return
  shown = [
    f"{name}={old!r} there, {new!r} now"
    for name, (old, new) in list(fixed.items())[:3]
  ]
  if len(fixed) > len(shown):
    shown.append(f"and {len(fixed) - len(shown)} more")
  raise UserError(
    f"{workdir} holds a run with other settings ({'; '.join(shown)}): use "
    f"the same settings, another --workdir, or another --workdir with "
    f"--init_from={workdir} to start anew from its weights"
  )
