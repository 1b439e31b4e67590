"""Tokenizers by name: bytes, SentencePiece models, Hugging Face files."""

import pathlib

from atlas_jax import paths
from atlas_jax.data.tokenizer import ByteTokenizer, StreamDecoder, Tokenizer
from atlas_jax.errors import UserError

__all__ = ["ByteTokenizer", "StreamDecoder", "Tokenizer", "load"]

_SAVED = ("tokenizer.bytes", "tokenizer.model", "tokenizer.json")


def load(spec: str) -> Tokenizer:
  """Loads a tokenizer.

  Args:
    spec: "bytes"; a SentencePiece file `*.model`; a Hugging Face file
      `*.json`; or a folder that holds one of `tokenizer.bytes`,
      `tokenizer.model` and `tokenizer.json` (`Tokenizer.save` makes one).

  Raises:
    UserError: There is no such tokenizer, it is damaged or of a kind that
      cannot be used, or its library is not installed.
  """
  if spec == "bytes":
    return ByteTokenizer()
  path = paths.expand(spec)
  if path.is_dir():
    path = _in_folder(path)
  if path.name == "tokenizer.bytes":
    return ByteTokenizer()
  if path.suffix not in (".model", ".json"):
    raise UserError(
      f"{spec!r} is no tokenizer; give 'bytes', a SentencePiece .model file or "
      "a Hugging Face tokenizer.json"
    )
  try:
    content = path.read_bytes()
  except OSError as error:
    raise UserError(
      f"cannot read the tokenizer {spec!r}: {error.strerror or error}"
    ) from error
  # Each format needs a library of its own, installed only where it is used.
  if path.suffix == ".model":
    from atlas_jax.data import tokenizer_sentencepiece

    return tokenizer_sentencepiece.SentencePieceTokenizer(content, name=spec)
  from atlas_jax.data import tokenizer_huggingface

  return tokenizer_huggingface.HuggingFaceTokenizer(content, name=spec)


def _in_folder(folder: pathlib.Path) -> pathlib.Path:
  found = [folder / name for name in _SAVED if (folder / name).is_file()]
  if len(found) != 1:
    raise UserError(
      f"the folder {str(folder)!r} holds {len(found) or 'none'} of "
      f"{', '.join(_SAVED)}; name the tokenizer's file"
    )
  return found[0]
