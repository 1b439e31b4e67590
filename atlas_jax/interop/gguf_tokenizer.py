"""The tokenizer that a GGUF file carries.

Byte-level vocabularies with merges (`tokenizer.ggml.model` is `gpt2`) become a
Hugging Face `tokenizer.json`, from which everything else follows. How a text is
cut before merging stands in the file as a name only, so that a name that is not
known here is refused: cut otherwise, text would be other tokens.
"""

import json
from typing import Any

from atlas_jax.data.tokenizer import Tokenizer
from atlas_jax.errors import UserError
from atlas_jax.interop.gguf_file import GgufFile

# Kinds of tokens, `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER = 2, 3, 4

_BYTE_LEVEL = {
  "type": "ByteLevel",
  "add_prefix_space": False,
  "trim_offsets": True,
  "use_regex": True,
}
_DIGITS = {"type": "Digits", "individual_digits": True}

# By `tokenizer.ggml.pre`, what cuts a text into words, one after the other.
_CUTS: dict[str, list[dict[str, Any]]] = {
  "gpt-2": [_BYTE_LEVEL],
  # Every digit is a token.
  "refact": [_DIGITS, _BYTE_LEVEL],
  "smollm": [_DIGITS, _BYTE_LEVEL],
  "starcoder": [_DIGITS, _BYTE_LEVEL],
}


def read(file: GgufFile) -> Tokenizer:
  """Returns the tokenizer of a GGUF file.

  Its `end_of_text` is the file's (`tokenizer.ggml.eos_token_id`). Tokens that
  control a model are never read from text. Bytes for which a vocabulary has no
  token are left out of a text; `Tokenizer.keeps_text` is then False.

  Args:
    file: The file.

  Raises:
    UserError: The file has no tokenizer, or one of another kind, or a damaged
      one; or the extra `gguf` is not installed.
  """
  content = json.dumps(_specification(file), ensure_ascii=False).encode()
  # Its library is installed only where it is used.
  from atlas_jax.data.tokenizer_huggingface import HuggingFaceTokenizer

  return HuggingFaceTokenizer(content, name=file.name)


def _specification(file: GgufFile) -> dict[str, Any]:
  """The contents of a `tokenizer.json`."""
  _refuse_others(file)
  cut = file.value("tokenizer.ggml.pre", str)
  tokens = file.values("tokenizer.ggml.tokens", str)
  kinds = file.values("tokenizer.ggml.token_type", int)
  end = file.value("tokenizer.ggml.eos_token_id", int)
  if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
    raise UserError(
      f"the tokenizer of {file.name!r} names a token twice or does not say "
      "what each is: get the file again"
    )
  if not (0 <= end < len(tokens) and kinds[end] == _CONTROL):
    raise UserError(
      f"the tokenizer of {file.name!r} ends texts by token {end}, which is no "
      "token of control: get the file again"
    )
  added = [
    {
      "id": index,
      "content": token,
      "single_word": False,
      "lstrip": False,
      "rstrip": False,
      "normalized": False,
      "special": kind != _USER,
    }
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    if kind in (_UNKNOWN, _CONTROL, _USER)
  ]
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "eos_token": tokens[end],
    "added_tokens": added,
    "normalizer": None,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[cut]},
    "post_processor": None,
    "decoder": _BYTE_LEVEL,
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": False,
      "ignore_merges": False,
      "vocab": {token: index for index, token in enumerate(tokens)},
      "merges": file.values("tokenizer.ggml.merges", str),
    },
  }


def _refuse_others(file: GgufFile) -> None:
  """Refuses tokenizers that would be read wrongly."""
  model = file.value("tokenizer.ggml.model", str)
  if model != "gpt2":
    raise UserError(
      f"the tokenizer of {file.name!r} is of kind {model!r}: only byte-level "
      "ones ('gpt2') can be read"
    )
  cut = file.value("tokenizer.ggml.pre", str, "default")
  if cut not in _CUTS:
    raise UserError(
      f"the tokenizer of {file.name!r} cuts text as {cut!r}, which is not "
      f"known here; known are {', '.join(sorted(_CUTS))}"
    )
  if file.value("tokenizer.ggml.add_bos_token", bool, False):
    raise UserError(
      f"{file.name!r} wants a token before every text, which is not written "
      "here: name another file"
    )
