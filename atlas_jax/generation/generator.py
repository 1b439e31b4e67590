"""Continues texts: reads prompts in parallel, then draws token by token.

```
run = restore.load(workdir)
generator = Generator(run.model, run.tokenizer)
for piece in generator.stream(["Once upon"], max_tokens=1000):
  print(piece.text, end="", flush=True)
texts = generator.generate(["Once upon", "def main("], stop=["\\n\\n"])
```

Whatever the length of prompts and texts, the device holds the parameters, one
state per row and one segment of a prompt. (The state of attention grows.)
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from atlas_jax.data.tokenizer import StreamDecoder, Tokenizer
from atlas_jax.errors import UserError
from atlas_jax.generation import prompts as prompts_lib
from atlas_jax.generation.program import (
  Context,
  Program,
  make_program,
)
from atlas_jax.generation.sampling import (
  NOT_FINITE,
  Controls,
  Sampling,
  controls,
)
from atlas_jax.generation.stopping import StopStrings
from atlas_jax.models import LanguageModel
from atlas_jax.models.room import room_for

BUCKETS = (64, 128, 256, 512, 1024)

End = Literal["end_of_text", "stop", "max_tokens"]


class Piece(NamedTuple):
  """Text that has become certain.

  Attributes:
    row: Which text it belongs to.
    text: The next characters of it; may be "" in the last piece.
    end: In the last piece of a row why it ended, None in all others.
  """

  row: int
  text: str
  end: End | None


class Generator:
  """A language model and its tokenizer, ready to continue texts.

  The first use of a number of rows compiles one step for it, and the first
  prompt of each bucket of lengths compiles one reading for it; nothing else
  does, neither further steps nor other settings. Where a model keeps every
  token, each doubling of the room for them compiles both anew.

  Args:
    model: The model. Later changes to it have no effect.
    tokenizer: The one that the model was trained with.
    trained: False warns that the weights are random.
    buckets: Lengths, ascending, to which a prompt is padded. A longer prompt
      is read in segments of the last.

  Raises:
    UserError: Model and tokenizer do not belong together, or the buckets are
      no ascending lengths.
  """

  def __init__(
    self,
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    trained: bool = True,
    buckets: Sequence[int] = BUCKETS,
  ):
    if tokenizer.vocab_size != model.vocab:
      raise UserError(
        f"the tokenizer has {tokenizer.vocab_size} tokens and the model "
        f"{model.vocab}: use the one that the model was trained with"
      )
    ascending = all(a < b for a, b in itertools.pairwise([0, *buckets]))
    if not buckets or not ascending:
      raise UserError(
        f"the buckets {tuple(buckets)} must be lengths from 1 in ascending "
        "order"
      )
    if not trained:
      logging.warning(
        "the weights of this model are random: it has not been trained, and "
        "what it writes means nothing"
      )
    self._graph, self._params = nnx.split(model)
    self._program = make_program(self._graph)
    self._tokenizer = tokenizer
    self._buckets = tuple(buckets)
    self._longest = model.longest

  def read(
    self, prompts: Sequence[str], after: Context | None = None
  ) -> Context:
    """Reads one text for each row.

    Args:
      prompts: The texts, of any lengths.
      after: What was read before, which stays usable; a row whose text is
        empty then stays where it is. None: nothing was.

    Raises:
      UserError: A prompt is empty or is no Unicode text, or there are not as
        many as rows.
    """
    ids = prompts_lib.encode(
      prompts, self._tokenizer, may_be_empty=after is not None
    )
    if after is None:
      context = self._program.start(self._params, len(ids))
    elif after.rows != len(ids):
      raise UserError(
        f"there are {len(ids)} prompts for {after.rows} rows; give one for each"
      )
    else:
      state = nnx.merge(self._graph, self._params).unprepare(after.state)
      context = self._program.copy(after._replace(state=state))
    total = np.array([len(row) for row in ids])
    segment = self._buckets[-1]
    held = int(np.max(np.asarray(context.length)))
    room = self._program.capacity(self._params, context)
    for begin in range(0, int(total.max()), segment):
      lengths = np.clip(total - begin, 0, segment).astype(np.int32)
      longest = int(lengths.max())
      bucket = next(size for size in self._buckets if size >= longest)
      tokens = np.zeros((len(ids), bucket), np.int32)
      for row, length in enumerate(lengths.tolist()):
        tokens[row, :length] = ids[row][begin : begin + length]
      held += longest
      self._check_length(held)
      if room is not None and held > room:
        room = room_for(held, room)
        context = self._program.resize(self._params, context, room)
      context = self._program.read(
        self._params, context, jnp.asarray(tokens), jnp.asarray(lengths)
      )
    return self._program.prepare(self._params, context)

  def _check_length(self, held: int) -> None:
    """Refuses a text that is longer than the model can read."""
    if self._longest is not None and held > self._longest:
      raise UserError(
        f"a text has more than the {self._longest} tokens that this model was "
        "made for: shorten it, draw fewer tokens, or train a model with a "
        "larger model.hyena.max_length"
      )

  def stream(
    self,
    start: Sequence[str] | Context,
    *,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] = 0,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
  ) -> "Stream":
    """Begins to continue texts; an iterator of pieces, as they are certain.

    Args:
      start: Prompts, or what `read` or `Stream.context` returned.
      sampling: How tokens are drawn; None: as the model says.
      seed: One for each row; or one number, and row i has `seed + i`.
      max_tokens: Tokens drawn per row; 0: until the text ends by itself.
      stop: Strings at which a row ends; they are not part of its text.

    Raises:
      UserError: As `read`, and for settings out of range.
    """
    if max_tokens < 0:
      raise UserError(
        f"max_tokens is {max_tokens}; give a number of tokens, or 0 for no "
        "limit"
      )
    StopStrings(stop)  # Complains before a long prompt is read.
    rows = start.rows if isinstance(start, Context) else len(start)
    settings = controls(rows, sampling or Sampling(), seed)
    if isinstance(start, Context):
      context = self._program.copy(start)
    else:
      context = self.read(start)
    return Stream(
      self._program,
      self._params,
      context,
      settings,
      [_Row(self._tokenizer, max_tokens, stop) for _ in range(rows)],
      self._tokenizer.end_of_text,
      self._check_length,
    )

  def generate(
    self,
    start: Sequence[str] | Context,
    *,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] = 0,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
  ) -> list[str]:
    """Returns the continuation of each text, whole; arguments as `stream`."""
    stream = self.stream(
      start, sampling=sampling, seed=seed, max_tokens=max_tokens, stop=stop
    )
    texts = [[] for _ in range(stream.rows)]
    for piece in stream:
      texts[piece.row].append(piece.text)
    return ["".join(parts) for parts in texts]


class Stream(Iterator[Piece]):
  """Texts being continued; made by `Generator.stream`."""

  def __init__(
    self,
    program: Program,
    params: Any,
    context: Context,
    settings: Controls,
    rows: list["_Row"],
    end_of_text: int,
    check_length: Callable[[int], None],
  ):
    self._program = program
    self._params = params
    self._context = context
    self._settings = settings
    self._rows = rows
    self._end_of_text = jnp.asarray(end_of_text, jnp.int32)
    self._check_length = check_length
    self._active = jnp.ones((len(rows),), bool)
    self._held = int(np.max(np.asarray(context.length)))
    self._room = program.capacity(params, context)
    self._ready: collections.deque[Piece] = collections.deque()

  @property
  def rows(self) -> int:
    """How many texts there are, B."""
    return len(self._rows)

  def context(self) -> Context:
    """What the model knows now; the stream goes on unaffected.

    Every drawn token was read, but the end of a text. With the same settings,
    a stream from here draws what this one will.
    """
    return self._program.copy(self._context)

  def __next__(self) -> Piece:
    while not self._ready:
      if all(row.ended for row in self._rows):
        raise StopIteration
      self._step()
    return self._ready.popleft()

  def _step(self) -> None:
    self._held += 1
    if self._room is not None and self._held > self._room:
      self._room = room_for(self._held, self._room)
      self._context = self._program.resize(
        self._params, self._context, self._room
      )
    self._context, tokens = self._program.step(
      self._params,
      self._context,
      self._settings,
      self._active,
      self._end_of_text,
    )
    drawn = np.asarray(tokens).tolist()
    ended = False
    for number, (row, token) in enumerate(zip(self._rows, drawn, strict=True)):
      if row.ended:
        continue
      if token == NOT_FINITE:
        self._check_length(self._held)
      text, end = row.push(token)
      ended = ended or end is not None
      if text or end:
        self._ready.append(Piece(number, text, end))
    if ended:
      self._active = jnp.array([not row.ended for row in self._rows])


class _Row:
  """Turns the drawn tokens of one row into text, and says when it ends."""

  def __init__(
    self, tokenizer: Tokenizer, max_tokens: int, stop: Sequence[str]
  ):
    self.ended = False
    self._end_of_text = tokenizer.end_of_text
    self._decoder = StreamDecoder(tokenizer)
    self._stops = StopStrings(stop)
    self._left = max_tokens

  def push(self, token: int) -> tuple[str, End | None]:
    """Returns the text that a token makes certain, and why the row ends."""
    if token == NOT_FINITE:
      raise UserError(
        "the model's predictions are not finite numbers: its weights are "
        "damaged or training has diverged; use an earlier checkpoint"
      )
    if token == self._end_of_text:
      return self._finish("", "end_of_text")
    text, stopped = self._stops.push(self._decoder.push(token))
    if stopped:
      self.ended = True
      return text, "stop"
    self._left -= 1
    if not self._left:
      return self._finish(text, "max_tokens")
    return text, None

  def _finish(self, text: str, end: End) -> tuple[str, End]:
    """Lets go of what was held back."""
    self.ended = True
    more, stopped = self._stops.push(self._decoder.finish())
    text += more
    if stopped:
      return text, "stop"
    return text + self._stops.finish(), end
