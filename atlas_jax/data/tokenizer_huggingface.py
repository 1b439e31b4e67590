"""Hugging Face `tokenizer.json` files.

Three families keep the text and are read: byte-level vocabularies (GPT-2 and
most newer models), vocabularies with byte fallback (Llama 2, Gemma), and plain
vocabularies that write spaces into their tokens. Where every byte can be
represented, normalisers that would change the text are left out, as is the
space that some put before it; special tokens are never read from text.
Vocabularies that drop spaces (WordPiece and the like) are refused.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from atlas_jax.data.tokenizer import REPLACEMENT, Tokenizer, encode_around
from atlas_jax.errors import UserError

try:
  import tokenizers
except ImportError as error:
  raise UserError(
    "Hugging Face tokenizers need another package: pip install tokenizers"
  ) from error

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ENDS = (
  "<|endoftext|>",
  "<|end_of_text|>",
  "</s>",
  "<eos>",
  "<|im_end|>",
)
_DROP_SPACES = (
  "BertPreTokenizer",
  "CharDelimiterSplit",
  "Whitespace",
  "WhitespaceSplit",
)
# Put a space before the text, which belongs to no byte of it.
_PREFIXES = ("Prepend",)
# Fold characters into others, or drop them.
_FOLDS = (
  "BertNormalizer",
  "Lowercase",
  "NFC",
  "NFD",
  "NFKC",
  "NFKD",
  "Nmt",
  "Precompiled",
  "Strip",
  "StripAccents",
)


class HuggingFaceTokenizer(Tokenizer):
  """The tokens of a `tokenizer.json` file.

  The end of a text is the special token that the file names as `eos_token`, a
  key that tokenizer files of GGUF origin have here (the format itself has
  none); else the usual one (`<|endoftext|>`, `</s>` and the like), or one id
  more where there is none.
  """

  def __init__(self, content: bytes, name: str):
    """Reads a tokenizer.

    Args:
      content: The file's bytes.
      name: What to call it in messages.

    Raises:
      UserError: The bytes are no such file, or one that drops spaces.
    """
    try:
      spec = json.loads(content)
      _refuse_lossy(spec, name)
      pieces, specials = _pieces(spec)
      byte_ids = _byte_ids(pieces)
      whole = len(byte_ids) == 256
      end = _end_of_text(spec, specials)
      _neutralise(spec, folds=whole)
      core = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except UserError:
      raise
    except Exception as error:  # The parser raises bare Exception.
      raise UserError(
        f"the tokenizer {name!r} is damaged or is no tokenizer.json "
        f"({type(error).__name__}: {error})"
      ) from error
    core.encode_special_tokens = True
    if end is None:
      end = len(pieces)
      pieces.append(b"")
    super().__init__(
      pieces,
      end_of_text=end,
      content=content,
      keeps_text=whole and not _eats_spaces(spec),
    )
    self._core = core
    self._space_ids = None
    if whole and not _is_byte_level(spec):
      self._space_ids = [byte_ids[value] for value in _SPACE.encode()]

  @property
  def file_name(self) -> str:
    """See `Tokenizer`."""
    return "tokenizer.json"

  def encode(self, text: str) -> list[int]:
    """See `Tokenizer`."""
    if self._space_ids and _SPACE in text:
      return encode_around(text, _SPACE, self._space_ids, self._encode)
    return self._encode(text)

  def _encode(self, text: str) -> list[int]:
    return self._core.encode(text, add_special_tokens=False).ids


def _components(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
  """The members of a normaliser, pre-tokenizer or decoder, flattened."""
  if part is None:
    return
  yield part
  for key in ("normalizers", "pretokenizers", "decoders"):
    for member in part.get(key, ()):
      yield from _components(member)


def _types(spec: dict[str, Any], key: str) -> set[str]:
  return {part["type"] for part in _components(spec.get(key))}


def _is_byte_level(spec: dict[str, Any]) -> bool:
  return "ByteLevel" in _types(spec, "pre_tokenizer") | _types(spec, "decoder")


def _refuse_lossy(spec: dict[str, Any], name: str) -> None:
  model = spec["model"]
  kind = model.get("type", "BPE")
  dropping = _types(spec, "pre_tokenizer").intersection(_DROP_SPACES)
  affixes = ("continuing_subword_prefix", "end_of_word_suffix")
  if kind not in ("BPE", "Unigram"):
    reason = f"a {kind} vocabulary"
  elif dropping:
    reason = f"its pre-tokenizer {min(dropping)}"
  elif any(model.get(affix) for affix in affixes):
    reason = "a vocabulary that marks the parts of words"
  else:
    return
  raise UserError(
    f"the tokenizer {name!r} does not keep the spaces of a text ({reason}); "
    "use a byte-level one, one with byte fallback, or 'bytes'"
  )


def _pieces(spec: dict[str, Any]) -> tuple[list[bytes], dict[str, int]]:
  """The bytes of every token by id, and the ids of the special tokens."""
  model = spec["model"]
  if isinstance(model["vocab"], dict):
    names = {id_: name for name, id_ in model["vocab"].items()}
  else:
    names = {id_: name for id_, (name, _) in enumerate(model["vocab"])}
  alphabet = _byte_alphabet() if _is_byte_level(spec) else None
  fallback = model.get("byte_fallback", False)
  values = {}
  for id_, name in names.items():
    byte = _BYTE.fullmatch(name) if fallback else None
    if byte:
      values[id_] = bytes([int(byte[1], 16)])
    elif alphabet:
      values[id_] = b"".join(
        alphabet[char] if char in alphabet else char.encode() for char in name
      )
    else:
      values[id_] = name.replace(_SPACE, " ").encode()
  specials = {}
  for token in spec.get("added_tokens") or ():
    values[token["id"]] = token["content"].encode()
    if token["special"]:
      values[token["id"]] = b""
      specials[token["content"]] = token["id"]
  unknown = model.get("unk_token")
  if unknown is not None:
    names_to_ids = {name: id_ for id_, name in names.items()}
    values[names_to_ids[unknown]] = REPLACEMENT
  elif model.get("unk_id") is not None:
    values[model["unk_id"]] = REPLACEMENT
  # An id that no token has is never encoded; it stands for nothing.
  size = max(values) + 1
  return [values.get(id_, b"") for id_ in range(size)], specials


def _end_of_text(spec: dict[str, Any], specials: dict[str, int]) -> int | None:
  """The id of the special token that ends a text; None: there is none.

  Takes our own key out, which the library would refuse.
  """
  named = spec.pop("eos_token", None)
  if named is not None:
    return specials[named]
  return next((specials[end] for end in _ENDS if end in specials), None)


def _byte_ids(pieces: list[bytes]) -> dict[int, int]:
  """The ids of the tokens that are one byte, by that byte."""
  found: dict[int, int] = {}
  for id_, piece in enumerate(pieces):
    if len(piece) == 1:
      # "<0x41>" stands before "A" in files with byte fallback.
      found.setdefault(piece[0], id_)
  return found


def _neutralise(spec: dict[str, Any], folds: bool) -> None:
  """Turns off what would change the text or how often it is encoded alike."""
  spec["truncation"] = spec["padding"] = None
  spec["model"]["dropout"] = None
  drop = _PREFIXES + (_FOLDS if folds else ())
  spec["normalizer"] = _without(spec.get("normalizer"), drop)
  for part in _components(spec.get("pre_tokenizer")):
    if part["type"] == "Metaspace":
      part["prepend_scheme"] = "never"
    if "add_prefix_space" in part:
      part["add_prefix_space"] = False


def _without(
  part: dict[str, Any] | None, drop: tuple[str, ...]
) -> dict[str, Any] | None:
  if part is None or part["type"] in drop:
    return None
  if part["type"] != "Sequence":
    return part
  kept = [_without(member, drop) for member in part["normalizers"]]
  return {**part, "normalizers": [member for member in kept if member]}


def _eats_spaces(spec: dict[str, Any]) -> bool:
  """Whether a token that is matched in text takes the spaces around it."""
  return any(
    not token["special"] and (token.get("lstrip") or token.get("rstrip"))
    for token in spec.get("added_tokens") or ()
  )


def _byte_alphabet() -> dict[str, bytes]:
  """GPT-2's characters for the 256 bytes.

  Printable characters of Latin-1 stand for themselves; the other bytes, in
  order, are the characters from U+0100 on.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  table = {chr(value): bytes([value]) for value in printable}
  others = [value for value in range(256) if value not in printable]
  for offset, value in enumerate(others):
    table[chr(256 + offset)] = bytes([value])
  return table
