"""Equal numbers of parameters for different mixers, by the width of SwiGLU."""

import dataclasses
import functools
import math

import jax
from flax import nnx

from atlas_jax import config as configs
from atlas_jax.errors import UserError
from atlas_jax.models.config import ModelConfig
from atlas_jax.models.language_model import LanguageModel

# Hidden widths are multiples of the first of these that is fine enough.
_MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)

# Largest difference between the numbers of parameters of the blocks.
_FINE = 0.01


@functools.lru_cache(maxsize=256)
def matched(config: ModelConfig) -> ModelConfig:
  """The configuration with the hidden width that `config.match` asks for.

  Args:
    config: As given. Without `match` it comes back as it is.

  Raises:
    UserError: The mixer alone has more parameters than the whole block that it
      is matched with, or the configuration does not fit together.
  """
  if not config.match:
    return config
  target = block_parameters(reference(config))
  own = configs.replace(config, {"match": "", "mlp_hidden": 1})
  per_width = 3 * config.dim * config.layers
  width = 1 + (target - block_parameters(own)) / per_width
  if width < 1:
    raise UserError(
      f"the mixers {', '.join(config.mixers)} alone have more parameters than "
      f"blocks of model.match={config.match}: raise model.mlp_hidden (now "
      f"{config.hidden}), give the mixers fewer, or give no match"
    )
  for multiple in _MULTIPLES:
    hidden = max(multiple, multiple * round(width / multiple))
    if abs(hidden - width) * per_width <= _FINE * target:
      break
  return configs.replace(own, {"mlp_hidden": hidden})


def reference(config: ModelConfig) -> ModelConfig:
  """The configuration that another is matched with: all but the mixer equal."""
  branches = {
    spec.name: type(getattr(config, spec.name))()
    for spec in dataclasses.fields(config)
    if dataclasses.is_dataclass(getattr(config, spec.name))
  }
  changes = {"mixer": config.match, "pattern": (), "match": "", **branches}
  return dataclasses.replace(config, **changes)


def block_parameters(config: ModelConfig) -> int:
  """Parameters of all blocks, without embedding and output matrix."""
  model = nnx.eval_shape(lambda: LanguageModel(config, 1, rngs=nnx.Rngs(0)))
  leaves = jax.tree.leaves(nnx.state(model.blocks))
  return sum(math.prod(leaf.shape) for leaf in leaves)
