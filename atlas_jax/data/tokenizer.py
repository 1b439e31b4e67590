"""What a tokenizer is: text to tokens, and the bytes that each token is.

Every token stands for a fixed sequence of bytes, wherever it occurs. This makes
decoding a concatenation, counts the bytes behind a loss exactly, and lets text
be streamed token by token. Tokenizers that treat the beginning of a text
specially (a space put before it) have that turned off.
"""

import abc
import codecs
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Tokenizer(abc.ABC):
  """Tokens of a text.

  Attributes:
    vocab_size: Number of token ids.
    end_of_text: The id that follows a document's last token. It stands for no
      byte, and no text is encoded to it.
    fingerprint: Hash of all that decides how text is encoded.
    keeps_text: Whether decoding returns every text unchanged. Where it does
      not, a figure per byte counts the bytes of the text as decoded.
  """

  def __init__(
    self,
    pieces: Sequence[bytes],
    *,
    end_of_text: int,
    content: bytes,
    keeps_text: bool,
  ):
    """Takes what is common to all tokenizers.

    Args:
      pieces: The bytes of every token, by id.
      end_of_text: See the class.
      content: The bytes by which `save` keeps the tokenizer.
      keeps_text: See the class.
    """
    self.vocab_size = len(pieces)
    self.end_of_text = end_of_text
    self.keeps_text = keeps_text
    digest = hashlib.sha256(type(self).__name__.encode() + b"\0" + content)
    self.fingerprint = digest.hexdigest()
    self._pieces = tuple(pieces)
    self._content = content
    self._lengths = np.array([len(piece) for piece in pieces], np.int32)

  @property
  @abc.abstractmethod
  def file_name(self) -> str:
    """The name of the file that `save` writes."""

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Returns the token ids of a text, without any that begin or end it."""

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """Returns the bytes that the tokens stand for; special tokens none.

    Raises:
      IndexError: An id is not below `vocab_size`.
    """
    if isinstance(ids, np.ndarray):
      ids = ids.tolist()  # Indexing by Python integers is twice as fast.
    return b"".join([self._pieces[token] for token in ids])

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of the tokens; bytes that are no UTF-8 become U+FFFD."""
    return self.decode_bytes(ids).decode("utf-8", errors="replace")

  def byte_length(
    self, ids: Int[np.ndarray, "*shape"]
  ) -> Int[np.ndarray, "*shape"]:
    """Returns how many bytes each token stands for, as int32."""
    return self._lengths[ids]

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Keeps the tokenizer in a folder, for `tokenizers.load(folder)`.

    The folder is made where it is missing. The file appears whole or not at
    all.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{self.file_name}-")
    try:
      with os.fdopen(handle, "wb") as stream:
        stream.write(self._content)
      os.replace(name, folder / self.file_name)
    except BaseException:
      os.unlink(name)
      raise


class ByteTokenizer(Tokenizer):
  """The 256 bytes of UTF-8, and one id more for the end of a text."""

  def __init__(self):
    pieces = [bytes([value]) for value in range(256)]
    super().__init__(
      [*pieces, b""], end_of_text=256, content=b"bytes\n", keeps_text=True
    )

  @property
  def file_name(self) -> str:
    """See `Tokenizer`."""
    return "tokenizer.bytes"

  def encode(self, text: str) -> list[int]:
    """See `Tokenizer`."""
    return list(text.encode())

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """See `Tokenizer`; an array of ids is decoded without a Python loop."""
    if not isinstance(ids, np.ndarray):
      return super().decode_bytes(ids)
    if ids.size and (ids.max() > 256 or ids.min() < 0):
      raise IndexError(f"a token is not in 0 to 256: {ids.max()}, {ids.min()}")
    return ids[ids < 256].astype(np.uint8).tobytes()


class StreamDecoder:
  """Turns tokens into text one at a time; only whole characters come out.

  ```
  decoder = StreamDecoder(tokenizer)
  for token in tokens:
    print(decoder.push(token), end="")
  print(decoder.finish())
  ```
  What came out in all is `tokenizer.decode(tokens)`.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

  def push(self, token: int) -> str:
    """Takes one token id, returns the text that it completes, possibly ""."""
    return self._decoder.decode(self._tokenizer.decode_bytes((token,)))

  def finish(self) -> str:
    """Returns what a character broken off at the end becomes, mostly ""."""
    return self._decoder.decode(b"", final=True)


def encode_around(
  text: str, marker: str, marker_ids: list[int], encode
) -> list[int]:
  """Encodes a text whose tokenizer writes spaces as `marker`.

  A marker in the text itself would come back as a space, so it is encoded by
  its bytes, and the text around it as usual.

  Args:
    text: The text.
    marker: One character.
    marker_ids: The ids of the marker's bytes.
    encode: `str -> list[int]` for text without marker.
  """
  first, *rest = text.split(marker)
  ids = encode(first) if first else []
  for part in rest:
    ids += marker_ids
    if part:
      ids += encode(part)
  return ids
