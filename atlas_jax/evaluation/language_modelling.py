"""How well a language model predicts whole documents.

Documents are read from beginning to end, each with a memory of its own that
is carried from segment to segment, so that a document may be longer than any
window of training. The device holds one segment and one state per row. (The
state of attention grows with the document.)
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from atlas_jax import models
from atlas_jax.data.tokenizer import Tokenizer
from atlas_jax.errors import UserError
from atlas_jax.evaluation.documents import Documents
from atlas_jax.evaluation.positions import Bucket, ByPosition
from atlas_jax.evaluation.stretches import Segment, schedule, stretches
from atlas_jax.models.room import room_for


@dataclasses.dataclass(frozen=True)
class DocumentResult:
  """One document's share of the result; losses as in `Result`."""

  id: str
  tokens: int
  bytes: int
  loss: float
  bits_per_byte: float | None


@dataclasses.dataclass(frozen=True)
class Result:
  """How well documents were predicted.

  Every token of a document but its first is predicted, and its end.

  Attributes:
    tokens: How many predictions were made.
    bytes: Bytes of text that the predicted tokens stand for.
    loss: Mean cross-entropy in nats per token.
    perplexity: exp(loss).
    bits_per_byte: Sum of losses in bits, per byte; None without a byte.
    positions: Loss by context, of all documents.
    long_positions: The same, of those documents only that have at least
      `long` tokens of context: the same documents at each position up to it,
      so that a falling curve is not an effect of which documents are long.
    long: See above.
    documents: The documents, in the order of the text.
  """

  tokens: int
  bytes: int
  loss: float
  perplexity: float
  bits_per_byte: float | None
  positions: list[Bucket]
  long_positions: list[Bucket]
  long: int
  documents: list[DocumentResult]


def evaluate(
  model: models.LanguageModel,
  tokenizer: Tokenizer,
  documents: Documents,
  *,
  window: int,
  context: int = 0,
  tokens: int = 0,
  batch: int = 8,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
  """Measures a model on documents.

  Args:
    model: The model.
    tokenizer: Its tokenizer.
    documents: What to read.
    window: Tokens of a row that are read at once, as in training; and from
      how many tokens on a document counts as long.
    context: Tokens after which the memory starts afresh, inside of documents,
      too; 0: a document is read with one memory.
    tokens: About how much to read; 0: everything. Documents are taken in an
      order that depends on their names only.
    batch: Rows that are read beside each other, at most.
    progress: Told how many tokens are done, and of how many.

  Raises:
    UserError: There is nothing to read, an argument is out of range, or a
      loss is not finite.
  """
  for name, value, least in (
    ("context", context, 0),
    ("tokens", tokens, 0),
    ("batch", batch, 1),
    ("window", window, 1),
  ):
    if value < least:
      raise UserError(f"{name} is {value}; give {least} or more")
  items = stretches(
    documents.lengths,
    documents.order().tolist(),
    context=context,
    tokens=tokens,
  )
  if not items:
    raise UserError(
      "there is no held-out text to evaluate: give one by --data.path"
    )
  total = sum(item.stop - item.start for item in items)
  longest = max(item.stop - item.start for item in items)
  if model.longest is not None and longest > model.longest:
    raise UserError(
      f"a text is read for {longest} tokens, but this model was made for "
      f"{model.longest}: give shorter texts, or train a model with a larger "
      "model.hyena.max_length"
    )
  rows = min(batch, len(items))
  segment = min(window, longest)
  by_position = ByPosition(len(documents), longest)
  read = _Reader(model, tokenizer, documents, rows, segment)
  done = 0
  # One step stays ahead of the host, which sorts the losses of the last.
  steps = schedule(items, rows=rows, segment=segment)
  pending = read(steps[0])
  for number, step in enumerate(steps):
    losses, bytes_ = pending
    if number + 1 < len(steps):
      pending = read(steps[number + 1])
    done += _collect(by_position, step, losses, bytes_)
    progress(done, total)
  return _result(by_position, documents, segment)


def _collect(
  by_position: ByPosition,
  step: list[Segment | None],
  losses: Float[Array, "B T"],
  bytes_: Int[np.ndarray, "B T"],
) -> int:
  """Adds up the losses of one step; returns how many there were."""
  done = 0
  host = np.asarray(losses, np.float64)
  for row, part in enumerate(step):
    if part is None:
      continue
    length = part.stop - part.start
    nats = host[row, :length]
    if not np.isfinite(nats).all():
      raise UserError(
        "the loss is not a finite number: the weights are damaged or training "
        "has diverged; use an earlier checkpoint"
      )
    by_position.add(part.document, part.context, nats, bytes_[row, :length])
    done += length
  return done


class _Reader:
  """Reads one step's segments; keeps the state between steps."""

  def __init__(
    self,
    model: models.LanguageModel,
    tokenizer: Tokenizer,
    documents: Documents,
    rows: int,
    segment: int,
  ):
    graph, self._params = nnx.split(model)
    self._model = model
    self._tokenizer = tokenizer
    self._documents = documents
    self._shape = (rows, segment)
    self._state = model.init_state(rows)
    self._room = model.capacity(self._state)
    self._losses = _compiled(graph)

  def __call__(
    self, step: list[Segment | None]
  ) -> tuple[Float[Array, "B T"], Int[np.ndarray, "B T"]]:
    """Returns losses, on their way, and bytes of the targets."""
    tokens = np.zeros(self._shape, np.int32)
    targets = np.zeros(self._shape, np.int32)
    lengths = np.zeros(self._shape[:1], np.int32)
    fresh = np.zeros(self._shape[:1], bool)
    for row, part in enumerate(step):
      if part is None:
        continue
      ids = self._documents.read(part.document, part.start, part.stop)
      lengths[row] = len(ids) - 1
      tokens[row, : len(ids) - 1] = ids[:-1]
      targets[row, : len(ids) - 1] = ids[1:]
      fresh[row] = part.fresh
    self._make_room(step)
    losses, self._state = self._losses(
      self._params,
      self._state,
      *map(jnp.asarray, (tokens, targets, lengths, fresh)),
    )
    return losses, self._tokenizer.byte_length(targets)

  def _make_room(self, step: list[Segment | None]) -> None:
    """Lets a state that grows hold all tokens of this step."""
    held = max(
      (part.context + part.stop - part.start for part in step if part),
      default=0,
    )
    if self._room is not None and held > self._room:
      self._room = room_for(held, self._room)
      self._state = _resized(self._model, self._state, self._room)


_resized = jax.jit(models.LanguageModel.resize, static_argnums=2)


@functools.lru_cache(maxsize=8)
def _compiled(graph: nnx.GraphDef) -> Callable[..., tuple[Array, Any]]:
  """Compiles (params, state, tokens, targets, lengths, fresh) -> losses, state.

  The state is consumed; rows marked `fresh` begin anew. One that grows must
  have room for the tokens, and keeps its room.
  """

  @functools.partial(jax.jit, donate_argnums=1)
  def losses(
    params: Any,
    state: models.LanguageState,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    fresh: Bool[Array, "B"],
  ) -> tuple[Float[Array, "B T"], models.LanguageState | None]:
    model = nnx.merge(graph, params)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    out = model.hidden(
      tokens,
      state=model.reset(state, fresh),
      mask=places < lengths[:, None],
    )
    after, room = out.state, model.capacity(state)
    if after is not None and room is not None:
      after = model.resize(after, room)
    return models.token_losses(model, out.hidden, targets), after

  return losses


def _result(by_position: ByPosition, documents: Documents, long: int) -> Result:
  nats, tokens, bytes_ = (
    getattr(by_position, name).sum(1) for name in ("nats", "tokens", "bytes")
  )
  read = tokens > 0
  loss = float(nats.sum() / tokens.sum())
  return Result(
    tokens=int(tokens.sum()),
    bytes=int(bytes_.sum()),
    loss=loss,
    # Of a larger loss it would be no float.
    perplexity=math.exp(min(loss, 700.0)),
    bits_per_byte=_bits(nats.sum(), bytes_.sum()),
    positions=by_position.buckets(read),
    long_positions=by_position.buckets(tokens >= long),
    long=long,
    documents=[
      DocumentResult(
        id=documents.ids[index],
        tokens=int(tokens[index]),
        bytes=int(bytes_[index]),
        loss=float(nats[index] / tokens[index]),
        bits_per_byte=_bits(nats[index], bytes_[index]),
      )
      for index in np.flatnonzero(read).tolist()
    ],
  )


def _bits(nats: float, count: int) -> float | None:
  return float(nats / (count * math.log(2))) if count else None
