"""Documents as one long array of tokens on disk, split into train and valid."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable

import numpy as np
from absl import logging
from jaxtyping import Bool, Int

from atlas_jax.data.records import token_dtype
from atlas_jax.data.sources import Document
from atlas_jax.data.tokenizer import Tokenizer
from atlas_jax.errors import UserError

# The first bytes of a UTF-8 character are all outside this range.
_CONTINUATION = range(0x80, 0xC0)


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Tokenised documents, each followed by the end-of-text token.

  Document d has `inputs[d]` input tokens from `tokens[begin[d]]` on, and the
  token behind them is the target of the last.

  Attributes:
    tokens: All tokens, on disk.
    ids: The documents' identities.
    begin: See above, int64.
    inputs: See above, int64.
    sizes: Bytes behind each document's tokens, int64.
  """

  tokens: Int[np.ndarray, "N"]
  ids: list[str]
  begin: Int[np.ndarray, "D"]
  inputs: Int[np.ndarray, "D"]
  sizes: Int[np.ndarray, "D"]

  def take(self, chosen: Bool[np.ndarray, "D"]) -> "Corpus":
    """The corpus of some of the documents, over the same tokens."""
    ids = [self.ids[index] for index in np.flatnonzero(chosen)]
    return Corpus(
      self.tokens,
      ids,
      self.begin[chosen],
      self.inputs[chosen],
      self.sizes[chosen],
    )


def tokenise(
  documents: Iterable[Document], tokenizer: Tokenizer, path: pathlib.Path
) -> Corpus:
  """Tokenises documents into a file, one part of a document at a time.

  Args:
    documents: The documents.
    tokenizer: The tokenizer.
    path: Where to write the tokens; the file must outlive the corpus.

  Raises:
    UserError: There is no document with any text.
    OSError: The file cannot be written.
  """
  dtype = token_dtype(tokenizer.vocab_size)
  end = np.array([tokenizer.end_of_text], dtype)
  ids, inputs, sizes = [], [], []
  changed = 0
  with open(path, "wb") as stream:
    for document in documents:
      count = size = raw = 0
      for part in document.parts:
        tokens = np.asarray(tokenizer.encode(part), dtype)
        stream.write(tokens.tobytes())
        count += len(tokens)
        size += int(tokenizer.byte_length(tokens).sum())
        raw += len(part.encode())
      stream.write(end.tobytes())
      ids.append(document.id)
      inputs.append(count)
      sizes.append(size)
      changed += size != raw
      logging.log_every_n_seconds(
        logging.INFO, "tokenised %d documents", 10, len(ids)
      )
  if not sum(inputs):
    raise UserError("the text is empty; give one with text in it by data.path")
  if changed:
    logging.warning(
      "the tokenizer does not keep %d of %d documents unchanged: figures per "
      "byte count the bytes of the text as decoded from tokens",
      changed,
      len(ids),
    )
  lengths = np.array(inputs, np.int64) + 1
  return Corpus(
    np.memmap(path, dtype, mode="r"),
    ids,
    np.cumsum(lengths) - lengths,
    lengths - 1,
    np.array(sizes, np.int64),
  )


def split(
  corpus: Corpus, fraction: float, tokenizer: Tokenizer
) -> tuple[Corpus, Corpus]:
  """Splits by document into train and held-out.

  A document is held out when a hash of its identity, as a fraction of its
  range, is below `fraction`: adding documents moves none of the others. With
  `0 < fraction < 1` neither part is left empty: the document nearest to the
  threshold changes sides, and a single document is cut in two, its end held
  out.

  Args:
    corpus: All documents.
    fraction: Share of the documents to hold out.
    tokenizer: The tokenizer of the corpus.

  Returns:
    The training documents and the held-out documents, each in order.
  """
  if len(corpus.ids) == 1 and 0.0 < fraction < 1.0:
    return _cut(corpus, fraction, tokenizer)
  places = np.array([_place(id_) for id_ in corpus.ids])
  held = places < fraction
  if 0.0 < fraction < 1.0:
    if not held.any():
      held[np.argmin(places)] = True
    elif held.all():
      held[np.argmax(places)] = False
  return corpus.take(~held), corpus.take(held)


def _place(id_: str) -> float:
  """A number in [0, 1) that depends on the identity alone."""
  return int.from_bytes(hashlib.sha256(id_.encode()).digest()[:6]) / 2**48


def _cut(
  corpus: Corpus, fraction: float, tokenizer: Tokenizer
) -> tuple[Corpus, Corpus]:
  inputs = int(corpus.inputs[0])
  at = min(max(round(inputs * (1.0 - fraction)), 2), inputs - 1)
  if at < 2:
    raise UserError(
      f"the text has only {inputs} tokens, too few to hold some out; "
      "give more text"
    )
  # Not inside a character.
  while at < inputs - 1 and _continues(tokenizer, int(corpus.tokens[at])):
    at += 1
  head_size = int(tokenizer.byte_length(corpus.tokens[:at]).sum())
  # The last token of the head is only a target: the one behind it is held out.
  head = Corpus(
    corpus.tokens,
    [f"{corpus.ids[0]} (beginning)"],
    np.array([0]),
    np.array([at - 1]),
    np.array([head_size]),
  )
  tail = Corpus(
    corpus.tokens,
    [f"{corpus.ids[0]} (end)"],
    np.array([at]),
    np.array([inputs - at]),
    corpus.sizes - head_size,
  )
  return head, tail


def _continues(tokenizer: Tokenizer, token: int) -> bool:
  piece = tokenizer.decode_bytes((token,))
  return bool(piece) and piece[0] in _CONTINUATION
