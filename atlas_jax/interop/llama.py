"""Language models of the Llama kind, from GGUF files.

A GGUF file of architecture `llama` holds what the `transformer` computes:
RMSNorm, rotary attention with fewer heads of keys and values than of queries,
SwiGLU. Whatever the file says beyond that is refused, as it would make other
numbers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from atlas_jax import config as configs
from atlas_jax import models
from atlas_jax.errors import UserError
from atlas_jax.interop.gguf_file import GgufFile

# Metadata of the architecture that is understood, without `llama.`.
_KNOWN = frozenset(
  {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "vocab_size",
  }
)

# A block's parameters by path, and the tensors that hold them, `blk.N.` before
# and `.weight` after.
_BLOCK = {
  "mixer_norm/scale": "attn_norm",
  "mixer/query/kernel": "attn_q",
  "mixer/key/kernel": "attn_k",
  "mixer/value/kernel": "attn_v",
  "mixer/output/kernel": "attn_output",
  "mlp_norm/scale": "ffn_norm",
  "mlp/gate/kernel": "ffn_gate",
  "mlp/up/kernel": "ffn_up",
  "mlp/down/kernel": "ffn_down",
}


def config_of(
  file: GgufFile, changes: Mapping[str, Any] | None = None
) -> models.ModelConfig:
  """Returns the configuration of a file's model.

  Args:
    file: The file.
    changes: Values by dotted name that are laid over it, such as
      `{"dtype": "bfloat16"}`, or another mixer with the same parameters.

  Raises:
    UserError: The file's model is of another kind, or the changes do not fit.
  """
  _refuse_others(file)
  dim, heads, kv_heads = _widths(file)
  config = configs.replace(
    models.ModelConfig(),
    {
      "mixer": "transformer",
      "dim": dim,
      "layers": _number(file, "block_count"),
      "heads": heads,
      "attention.kv_heads": kv_heads,
      "attention.rope_base": _decimal(file, "rope.freq_base", 10_000.0),
      "mlp_hidden": _number(file, "feed_forward_length"),
      "norm_epsilon": _decimal(file, "attention.layer_norm_rms_epsilon"),
      "tie_embeddings": "output.weight" not in file.tensors,
      **(changes or {}),
    },
  )
  config.validate()
  return config


def load(file: GgufFile, config: models.ModelConfig) -> models.LanguageModel:
  """Returns the model with the file's weights.

  Rows of the embedding beyond the vocabulary are 0; logits leave them out.

  Args:
    file: The file.
    config: From `config_of`.

  Raises:
    UserError: The file holds tensors that the model has no place for or lacks
      some, or has them in other shapes.
  """
  vocab = file.tensor("token_embd.weight").shape[0]
  graph, params = nnx.split(models.abstract(config, vocab))
  sources = _sources(file, config)
  leaves, structure = jax.tree_util.tree_flatten_with_path(
    nnx.to_pure_dict(params)
  )
  arrays = []
  for path, leaf in leaves:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name not in sources:
      raise UserError(
        f"{file.name!r} has no weights for {name}: make no change that adds "
        "parameters"
      )
    array = sources.pop(name)()
    if name == "embedding":
      array = _padded(array, leaf.shape[0], axis=0)
    elif name == "head/kernel":
      array = _padded(array, leaf.shape[1], axis=1)
    if array.shape != leaf.shape:
      raise UserError(
        f"{name} is {array.shape} in {file.name!r} but must be {leaf.shape}: "
        "the file contradicts itself; get it again"
      )
    arrays.append(jnp.asarray(array, leaf.dtype))
  if sources:
    raise UserError(
      f"the mixer {config.mixer} has no place for {next(iter(sources))} of "
      f"{file.name!r}: choose one with the parameters of the transformer"
    )
  return nnx.merge(graph, structure.unflatten(arrays))


def rotate_half(
  rows: Float[np.ndarray, "HK D"], heads: int
) -> Float[np.ndarray, "HK D"]:
  """Reorders rows of queries or keys for rotations of half against half.

  The file has the two numbers of a rotated pair next to each other, here they
  are half a head apart.

  Args:
    rows: Weights, one row for each output.
    heads: How many heads the outputs are of.
  """
  pairs = rows.reshape(heads, -1, 2, rows.shape[1])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


def _sources(
  file: GgufFile, config: models.ModelConfig
) -> dict[str, Callable[[], np.ndarray]]:
  """Every parameter by path, and what reads it.

  Raises:
    UserError: The file has a tensor that is none of them.
  """
  heads = {
    "mixer/query/kernel": config.heads,
    "mixer/key/kernel": config.attention.kv_heads or config.heads,
  }
  used = set()
  sources = {}

  def single(path: str, name: str, change: Callable) -> None:
    used.add(name)
    sources[path] = lambda: change(file.tensor(name))

  def stacked(path: str, part: str) -> None:
    names = [f"blk.{n}.{part}.weight" for n in range(config.layers)]
    used.update(names)

    def one(name: str) -> np.ndarray:
      array = file.tensor(name)
      if path in heads:
        array = rotate_half(array, heads[path])
      return array.T

    sources[f"blocks/{path}"] = lambda: np.stack([one(name) for name in names])

  single("embedding", "token_embd.weight", lambda array: array)
  single("norm/scale", "output_norm.weight", lambda array: array)
  if not config.tie_embeddings:
    single("head/kernel", "output.weight", np.transpose)
  for path, part in _BLOCK.items():
    stacked(path, part)
  extra = [name for name in file.tensors if name not in used]
  if extra:
    raise UserError(
      f"{file.name!r} holds {extra[0]}, for which the transformer has no "
      "place: name another file"
    )
  return sources


def _padded(array: np.ndarray, size: int, axis: int) -> np.ndarray:
  """Fills an axis with zeros up to a size."""
  missing = [(0, 0)] * array.ndim
  missing[axis] = (0, size - array.shape[axis])
  return np.pad(array, missing)


def _refuse_others(file: GgufFile) -> None:
  """Refuses architectures and hyper-parameters that are not understood."""
  architecture = file.value("general.architecture", str)
  if architecture != "llama":
    raise UserError(
      f"{file.name!r} holds a model of architecture {architecture!r}: only "
      "'llama' can be loaded"
    )
  for key in file.keys:
    name = key.removeprefix("llama.")
    if name != key and name not in _KNOWN:
      raise UserError(
        f"{file.name!r} sets {key}, which the transformer does not know: name "
        "another file"
      )
  scaling = file.value("llama.rope.scaling.type", str, "none")
  if scaling != "none":
    raise UserError(
      f"{file.name!r} scales positions ({scaling}), which the transformer does "
      "not: name another file"
    )


def _widths(file: GgufFile) -> tuple[int, int, int]:
  """Width, heads of queries, heads of keys and values."""
  dim = _number(file, "embedding_length")
  heads = _number(file, "attention.head_count")
  kv_heads = _number(file, "attention.head_count_kv", heads)
  if min(dim, heads, kv_heads) < 1 or dim % heads or heads % kv_heads:
    raise UserError(
      f"{file.name!r} has {heads} heads, {kv_heads} of keys and values, at "
      f"width {dim}, which do not divide each other: the file is damaged"
    )
  width = dim // heads
  for name in (
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
  ):
    given = _number(file, name, width)
    if given != width:
      raise UserError(
        f"{file.name!r} sets llama.{name}={given}, but the transformer's heads "
        f"are {width} wide throughout: name another file"
      )
  return dim, heads, kv_heads


def _number(file: GgufFile, name: str, default: int | None = None) -> int:
  key = f"llama.{name}"
  if default is None:
    return file.value(key, int)
  return file.value(key, int, default)


def _decimal(file: GgufFile, name: str, default: float | None = None) -> float:
  """A float32 as the shortest decimal that stands for it: 1e-05."""
  key = f"llama.{name}"
  if default is None:
    found = file.value(key, float)
  else:
    found = file.value(key, float, default)
  return float(str(np.float32(found)))
