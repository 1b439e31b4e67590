"""Which runs are the same run: what a resumed run may and may not change."""

import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import flax
import jax

import atlas_jax
from atlas_jax import config as configs
from atlas_jax import paths
from atlas_jax.errors import UserError
from atlas_jax.training import checkpoint
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.task import Task

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


def describe(
  config: ExperimentConfig,
  task: Task,
  parameters: int,
  init_from: str | os.PathLike[str] | None,
  old: Mapping[str, Any] | None,
) -> dict[str, Any]:
  """Describes a run as its folder and its checkpoints record it.

  Args:
    config: The configuration.
    task: What it trains; the tokenizer and the text have fingerprints.
    parameters: Numbers in the model.
    init_from: Where its first weights come from.
    old: What the folder recorded before, if it did; its beginning and its
      history are kept.

  Raises:
    UserError: The run differs from that of `old` in what no field says, or
      `init_from` holds no checkpoint.
  """
  if old is None and init_from is not None:
    # The one checkpoint: the latest of a run is another one later on.
    init_from = checkpoint.latest_checkpoint(init_from)
  record = {
    "config": configs.to_dict(config),
    "tokenizer": task.tokenizer.fingerprint,
    "vocab": task.tokenizer.vocab_size,
    "text": task.fingerprint,
    "init_from": None if init_from is None else os.fspath(init_from),
    "parameters": parameters,
    "versions": {
      "atlas_jax": atlas_jax.__version__,
      "python": platform.python_version(),
      "jax": jax.__version__,
      "flax": flax.__version__,
      "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    },
    "history": [],
  }
  if old is None:
    return record
  for name, what in (("tokenizer", "tokenizer"), ("text", "training text")):
    if old.get(name) != record[name]:
      raise UserError(
        f"the {what} is no longer the one that this run began with, though "
        "its settings are the same: bring it back, or start anew in another "
        "--workdir"
      )
  if init_from is not None and not _is_of(old.get("init_from"), init_from):
    raise UserError(
      f"this run began from {old.get('init_from') or 'new weights'}, not from "
      f"{init_from}: leave --init_from away to go on, or give another --workdir"
    )
  return {
    **record,
    "init_from": old.get("init_from"),
    "history": list(old.get("history", ())),
  }


def _is_of(began_from: str | None, source: str | os.PathLike[str]) -> bool:
  """Whether a checkpoint is the source itself, or one of that run."""
  if began_from is None:
    return False
  path = pathlib.Path(began_from)
  return paths.expand(source).absolute() in (path, *path.parents)
