"""A pretrained model in the place of a run that is over."""

import os

from atlas_jax import config as configs
from atlas_jax import paths
from atlas_jax.interop.pretrained import Pretrained
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.restore import Trained


def as_run(
  pretrained: Pretrained, name: str, home: str | os.PathLike[str]
) -> Trained:
  """Returns the model as `training.restore.load` returns that of a run.

  It has no text of its own and no steps of training; its record names where
  its weights are from.

  Args:
    pretrained: From `atlas_jax.interop.load`.
    name: What it was loaded from.
    home: A folder for what is made of it, such as tokenised text.

  Raises:
    UserError: There can be no such folder.
  """
  model, tokenizer = pretrained
  config = ExperimentConfig(model=model.config)
  return Trained(
    model=model,
    tokenizer=tokenizer,
    config=config,
    step=0,
    record={
      "config": configs.to_dict(config),
      "tokenizer": tokenizer.fingerprint,
      "vocab": tokenizer.vocab_size,
      "text": "",
      "init_from": name,
    },
    home=paths.expand(home),
  )
