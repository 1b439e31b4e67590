"""Loss by how much context a token had."""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Bucket:
  """The tokens that had between `first` and `last` tokens of context.

  Attributes:
    first: Least context, counting the token that the prediction was made at.
    last: Most context.
    tokens: How many targets.
    documents: From how many documents.
    loss: Mean cross-entropy in nats per token.
    error: Standard error of the loss, with documents as the sample; None for
      a single document.
    bits_per_byte: The loss in bits per byte of the targets; None where they
      have no byte.
  """

  first: int
  last: int
  tokens: int
  documents: int
  loss: float
  error: float | None
  bits_per_byte: float | None


def edges(longest: int) -> Int[np.ndarray, "N+1"]:
  """Borders of the buckets: contexts `edges[i]` to before `edges[i + 1]`.

  Args:
    longest: The most context there is, 1 or more.

  Returns:
    The powers of two from 1 to the first above `longest`.
  """
  return 2 ** np.arange(int(longest).bit_length() + 1)


class ByPosition:
  """Sums of losses by document and by bucket of context.

  Args:
    documents: How many there are.
    longest: The most context of any token.
  """

  def __init__(self, documents: int, longest: int):
    self.edges = edges(longest)
    shape = (documents, len(self.edges) - 1)
    self.nats = np.zeros(shape)
    self.tokens = np.zeros(shape, np.int64)
    self.bytes = np.zeros(shape, np.int64)

  def add(
    self,
    document: int,
    context: int,
    nats: Float[np.ndarray, "T"],
    bytes_: Int[np.ndarray, "T"],
  ) -> None:
    """Adds consecutive targets of a document.

    Args:
      document: Its index.
      context: Tokens of context before the first of them, itself not counted.
      nats: Their losses.
      bytes_: The bytes that each stands for.
    """
    contexts = context + 1 + np.arange(len(nats))
    bucket = np.searchsorted(self.edges, contexts, side="right") - 1
    count = self.nats.shape[1]
    self.nats[document] += np.bincount(bucket, nats, count)
    self.tokens[document] += np.bincount(bucket, minlength=count)
    self.bytes[document] += np.bincount(bucket, bytes_, count).astype(np.int64)

  def buckets(self, chosen: Bool[np.ndarray, "D"]) -> list[Bucket]:
    """The buckets of some documents that have any token in them."""
    out = []
    for index in range(len(self.edges) - 1):
      tokens = self.tokens[chosen, index]
      nats = self.nats[chosen, index]
      size = int(self.bytes[chosen, index].sum())
      if not tokens.any():
        continue
      loss = float(nats.sum() / tokens.sum())
      out.append(
        Bucket(
          first=int(self.edges[index]),
          last=int(self.edges[index + 1]) - 1,
          tokens=int(tokens.sum()),
          documents=int((tokens > 0).sum()),
          loss=loss,
          error=_error(nats, tokens, loss),
          bits_per_byte=float(nats.sum() / (size * math.log(2)))
          if size
          else None,
        )
      )
    return out


def _error(
  nats: Float[np.ndarray, "D"], tokens: Int[np.ndarray, "D"], loss: float
) -> float | None:
  """Standard error of a ratio of sums over independent documents.

  W. G. Cochran, Sampling Techniques, 3rd edition, section 6.4. Tokens of one
  document are far from independent, so that they cannot be the sample.
  """
  count = int((tokens > 0).sum())
  if count < 2:
    return None
  squares = float(np.sum((nats - loss * tokens) ** 2))
  return math.sqrt(squares * count / (count - 1)) / float(tokens.sum())
