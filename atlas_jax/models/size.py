"""How large a model is, without making it."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx

from atlas_jax.models.build import abstract
from atlas_jax.models.config import ModelConfig
from atlas_jax.models.language_model import LanguageModel, LanguageState


class Size(NamedTuple):
  """Numbers that decide what a model costs.

  Attributes:
    parameters: All learned numbers.
    start: Those among them that are memories' start weights.
    embedding: Those among them that are the embedding and the output matrix.
    state_bytes: The state of a row; where it grows with the text, that after
      `length` tokens.
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
    length: Tokens per row in training, for what grows with them.

  Raises:
    UserError: The configuration does not fit together.
  """
  model = abstract(config, vocab)
  state = jax.eval_shape(lambda model: _state(model, length), model)
  prepared = jax.eval_shape(LanguageModel.prepare, model, state)
  params = nnx.to_pure_dict(nnx.state(model))
  outer = {k: v for k, v in params.items() if k in ("embedding", "head")}
  return Size(
    parameters=_count(params),
    start=sum(
      math.prod(leaf.shape)
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
      if "/memory/start/" in _name(path)
    ),
    embedding=_count(outer),
    state_bytes=_bytes(state),
    # The carry is float32 whatever the type of activations.
    carry_bytes=4 * model.blocks.carry_size(length),
    cache_bytes=_bytes(prepared) - _bytes(state),
  )


def _state(model: LanguageModel, length: int) -> LanguageState:
  state = model.init_state(1)
  return state if model.capacity(state) is None else model.resize(state, length)


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _count(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
