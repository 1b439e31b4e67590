"""A trained model from its run's folder."""

import os
import pathlib
from typing import Any, NamedTuple

import jax
from flax import nnx

from atlas_jax import config as configs
from atlas_jax import models
from atlas_jax.data import tokenizers
from atlas_jax.errors import UserError
from atlas_jax.training import checkpoint
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.program import split_model
from atlas_jax.training.sharding import make_mesh, parameter_shardings


class Trained(NamedTuple):
  """What a run has made.

  Attributes:
    model: The language model with its trained weights.
    tokenizer: The run's own tokenizer.
    config: The run's configuration.
    step: Steps trained.
    record: All that the run recorded of itself with this checkpoint.
    home: The run's folder.
  """

  model: Any
  tokenizer: tokenizers.Tokenizer
  config: ExperimentConfig
  step: int
  record: dict[str, Any]
  home: pathlib.Path

  @property
  def is_trained(self) -> bool:
    """Whether the weights are other than random."""
    return self.step > 0 or self.record.get("init_from") is not None


def load(path: str | os.PathLike[str]) -> Trained:
  """Loads a trained model onto the first device.

  Args:
    path: A run's folder (its latest checkpoint is taken) or one checkpoint
      of it, `FOLDER/checkpoints/STEP`.

  Raises:
    UserError: There is no checkpoint, or it is damaged.
  """
  folder = checkpoint.latest_checkpoint(path)
  record = checkpoint.read_metadata(folder)["record"]
  config = configs.from_dict(ExperimentConfig, record["config"])
  home = pathlib.Path(folder).parents[1]
  tokenizer = tokenizers.load(os.fspath(home / "tokenizer"))
  if tokenizer.fingerprint != record["tokenizer"]:
    raise UserError(
      f"{home / 'tokenizer'} is not the tokenizer that {folder} was trained "
      "with: bring that one back"
    )
  graph, abstract = split_model(models.abstract(config.model, record["vocab"]))
  placed = parameter_shardings(abstract, make_mesh(1, 1, jax.devices()[:1]))
  abstract = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    abstract,
    placed,
  )
  params = checkpoint.read_params(folder, abstract)
  return Trained(
    model=nnx.merge(graph, params),
    tokenizer=tokenizer,
    config=config,
    step=int(folder.name),
    record=record,
    home=home,
  )
