"""Makes models from configurations."""

import jax
from flax import nnx

from atlas_jax.models.config import ModelConfig
from atlas_jax.models.language_model import LanguageModel
from atlas_jax.models.matching import matched


def build(config: ModelConfig, vocab: int, seed: int = 0) -> LanguageModel:
  """Returns the model with its starting weights, a function of the seed.

  Args:
    config: Sizes and kinds.
    vocab: Number of tokens.
    seed: Seed of the starting weights.

  Raises:
    UserError: The configuration does not fit together.
  """
  config = matched(config)
  # Compiled as a whole: one by one, the many small arrays take far longer.
  make = jax.jit(lambda key: LanguageModel(config, vocab, rngs=nnx.Rngs(key)))
  return make(jax.random.key(seed))


def abstract(config: ModelConfig, vocab: int) -> LanguageModel:
  """Returns the model with shapes and types in place of weights.

  Raises:
    UserError: The configuration does not fit together.
  """
  return nnx.eval_shape(lambda: build(config, vocab))


def longest_of(config: ModelConfig) -> int | None:
  """Tokens of the longest document that the model can read; None: any.

  Raises:
    UserError: The configuration does not fit together.
  """
  return abstract(config, 1).longest


def chunk_of(config: ModelConfig) -> int:
  """The multiple at which aligned documents start.

  Raises:
    UserError: The configuration does not fit together.
  """
  return abstract(config, 1).chunk
