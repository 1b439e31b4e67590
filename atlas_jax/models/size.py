"""How large a model is, without making it."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx

from atlas_jax.models.build import abstract
from atlas_jax.models.config import ModelConfig
from atlas_jax.models.language_model import LanguageModel
from atlas_jax.models.presets import memory_of


class Size(NamedTuple):
  """Numbers that decide what a model costs.

  Attributes:
    parameters: All learned numbers.
    start: Those among them that are memories' start weights.
    embedding: Those among them that are the embedding and the output matrix.
    state_bytes: The state of a row, however long the text.
    carry_bytes: What one block keeps per row for the backward pass of
      training: a memory (weights, momentum) for every chunk. With `remat` one
      block at a time keeps them, without it every block does.
    cache_bytes: What steps keep per row besides, see `LanguageModel.prepare`.
  """

  parameters: int
  start: int
  embedding: int
  state_bytes: int
  carry_bytes: int
  cache_bytes: int

  @property
  def start_share(self) -> float:
    """Share of the parameters that are memories' start weights."""
    return self.start / self.parameters


def size(config: ModelConfig, vocab: int, length: int = 4096) -> Size:
  """Counts a model's parameters and bytes.

  Args:
    config: The model.
    vocab: Number of tokens.
    length: Tokens per row in training, for `carry_bytes`.

  Raises:
    UserError: The configuration does not fit together.
  """
  model = abstract(config, vocab)
  memory = memory_of(config)
  state = jax.eval_shape(lambda model: model.init_state(1), model)
  prepared = jax.eval_shape(LanguageModel.prepare, model, state)
  carry = memory.state_size(config.head_width, config.head_width)
  chunks = -(-length // memory.chunk)
  params = nnx.to_pure_dict(nnx.state(model))
  outer = {k: v for k, v in params.items() if k in ("embedding", "head")}
  return Size(
    parameters=_count(params),
    start=_count(params["blocks"]["mixer"]["memory"]["start"]),
    embedding=_count(outer),
    state_bytes=_bytes(state),
    # The carry is float32 whatever the type of activations.
    carry_bytes=4 * chunks * config.heads * carry,
    cache_bytes=_bytes(prepared) - _bytes(state),
  )


def _count(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
