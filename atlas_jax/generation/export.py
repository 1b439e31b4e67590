"""Generation as files that need only jax and flatbuffers to run.

Three functions are exported, with weights and states as plain dicts of arrays
by name:

  start(weights) -> state
  prefill(weights, state, tokens [B, T], lengths [B]) -> (logits, state)
  step(weights, state, tokens [B]) -> (logits, state)

`prefill` reads the first `lengths` tokens of each row, `step` one token per
row; both go on from any state and return float32 logits [B, vocab] of the
tokens after. A folder from `Exported.save` can be read by `Exported.load`, or
anywhere with

  step = jax.export.deserialize(open("step.jax", "rb").read())
  logits, state = step.call(weights, state, tokens)
"""

import dataclasses
import importlib.util
import io
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlas_jax.errors import UserError
from atlas_jax.generation.program import read_segment
from atlas_jax.models import LanguageModel, LanguageState

Arrays = dict[str, Any]

_FUNCTIONS = ("start", "prefill", "step")
_WEIGHTS = "weights.npz"


@dataclasses.dataclass(frozen=True)
class Exported:
  """Exported functions, see the module, with the weights that they take."""

  start: jax.export.Exported
  prefill: jax.export.Exported
  step: jax.export.Exported
  weights: Arrays

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes `start.jax`, `prefill.jax`, `step.jax` and `weights.npz`.

    The folder is made; each file appears whole or not at all.

    Raises:
      UserError: The folder is not empty or cannot be written, or the extra
        `export` is not installed.
    """
    folder = pathlib.Path(folder)
    weights = io.BytesIO()
    arrays = {name: np.asarray(leaf) for name, leaf in self.weights.items()}
    np.savez(weights, allow_pickle=False, **arrays)
    _check_installed()
    contents = {
      f"{name}.jax": bytes(getattr(self, name).serialize())
      for name in _FUNCTIONS
    }
    contents[_WEIGHTS] = weights.getvalue()
    try:
      folder.mkdir(parents=True, exist_ok=True)
      if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name another folder")
      for name, content in contents.items():
        temporary = folder / f".{name}"
        temporary.write_bytes(content)
        temporary.replace(folder / name)
    except OSError as error:
      raise UserError(
        f"cannot write to {folder} ({error.strerror or error}): free some "
        "space or name another folder"
      ) from error

  @classmethod
  def load(cls, folder: str | os.PathLike[str]) -> "Exported":
    """Reads a folder that `save` wrote.

    Raises:
      UserError: It is not one, or damaged, or the extra `export` is not
        installed.
    """
    _check_installed()
    folder = pathlib.Path(folder)
    try:
      functions = {
        name: jax.export.deserialize(
          bytearray((folder / f"{name}.jax").read_bytes())
        )
        for name in _FUNCTIONS
      }
      # The file knows no bfloat16: the types are those of the functions.
      types = _argument(functions["start"])
      with np.load(folder / _WEIGHTS) as file:
        weights = {
          name: jnp.asarray(file[name].view(leaf.dtype))
          for name, leaf in types.items()
        }
    except Exception as error:  # The parser raises whatever it runs into.
      raise UserError(
        f"{folder} holds no exported model, or a damaged one "
        f"({type(error).__name__}): export it again"
      ) from error
    return cls(**functions, weights=weights)


def export(
  model: LanguageModel,
  *,
  batch: int,
  length: int,
  capacity: int | None = None,
  platforms: Sequence[str] | None = None,
) -> Exported:
  """Exports a model's generation for one batch size.

  Args:
    model: The model.
    batch: Rows, B.
    length: Tokens that one call of `prefill` takes, T.
    capacity: Tokens for which the state has room, if the model keeps every
      token, as attention does; what comes after them is NaN.
    platforms: Where the functions are to run, such as ("cpu", "tpu"); None:
      where this process runs.

  Raises:
    UserError: `batch` or `length` is below 1, or the model's state grows and
      no capacity is given.
  """
  if batch < 1 or length < 1:
    raise UserError(
      f"batch={batch} and length={length} must both be at least 1"
    )
  grows = (
    model.capacity(jax.eval_shape(lambda: model.init_state(1))) is not None
  )
  if grows and (capacity is None or capacity < 1):
    raise UserError(
      "this model keeps every token: give capacity, the tokens to have room for"
    )
  graph, params = nnx.split(model)
  names, weights, tree = _named(nnx.to_pure_dict(params))

  def merged(weights: Arrays) -> LanguageModel:
    return nnx.merge(graph, tree.unflatten([weights[name] for name in names]))

  def sized(model: LanguageModel, state: LanguageState) -> LanguageState:
    return state if capacity is None else model.resize(state, capacity)

  def fresh(weights: Arrays) -> LanguageState:
    model = merged(weights)
    return model.prepare(sized(model, model.init_state(batch)))

  state_names, state, state_tree = _named(jax.eval_shape(fresh, weights))

  def restored(state: Arrays) -> LanguageState:
    return state_tree.unflatten([state[name] for name in state_names])

  def start(weights: Arrays) -> Arrays:
    return _named(fresh(weights))[1]

  def prefill(
    weights: Arrays, state: Arrays, tokens: jax.Array, lengths: jax.Array
  ) -> tuple[jax.Array, Arrays]:
    model = merged(weights)
    before = model.unprepare(restored(state))
    after, logits = read_segment(model, before, tokens, lengths)
    after = sized(model, after)
    return logits, _named(model.prepare(after))[1]

  def step(
    weights: Arrays, state: Arrays, tokens: jax.Array
  ) -> tuple[jax.Array, Arrays]:
    logits, after = merged(weights).step(tokens, restored(state))
    return logits, _named(after)[1]

  def exported(function: Callable, *arguments: Any) -> jax.export.Exported:
    return jax.export.export(jax.jit(function), platforms=platforms)(*arguments)

  tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
  row = jax.ShapeDtypeStruct((batch,), jnp.int32)
  return Exported(
    start=exported(start, weights),
    prefill=exported(prefill, weights, state, tokens, row),
    step=exported(step, weights, state, row),
    weights=weights,
  )


def _check_installed() -> None:
  if importlib.util.find_spec("flatbuffers") is None:
    raise UserError(
      "exported models are files of flatbuffers, which is not installed: "
      "pip install 'atlas-jax[export]'"
    )


def _named(tree: Any) -> tuple[list[str], Arrays, Any]:
  """Names of a tree's leaves in order, the leaves by name, and its structure.

  The names are paths such as `blocks/memory/weights/in`.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
  names = [
    jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
  ]
  by_name = dict(zip(names, (leaf for _, leaf in leaves), strict=True))
  return names, by_name, structure


def _argument(function: jax.export.Exported) -> Arrays:
  """Shapes and types of a function's first argument."""
  arguments, _ = jax.tree.unflatten(function.in_tree, function.in_avals)
  return arguments[0]
