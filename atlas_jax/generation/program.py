"""What generation runs on the device: read a segment, draw a token."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from atlas_jax.generation.sampling import Controls, sample
from atlas_jax.models import LanguageModel, LanguageState


class Context(NamedTuple):
  """What a model knows of some texts.

  Of constant size, unless the model keeps every token, as attention does. It
  is a value and a pytree: keep it, save it, go on from it several times.

  Attributes:
    state: The model's state after the last token.
    logits: Of the next token.
    drawn: How many tokens each row has drawn.
    length: How many tokens each row holds, drawn or read.
  """

  state: LanguageState
  logits: Float[Array, "B vocab"]
  drawn: UInt32[Array, "B"]
  length: Int[Array, "B"]

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

  @property
  def rows(self) -> int:
    """How many texts there are, B."""
    return self.logits.shape[0]


@dataclasses.dataclass(frozen=True)
class Program:
  """Compiled functions; each compiles once for each shape of its arrays.

  Attributes:
    start: (params, rows) -> Context before any token.
    read: (params, context, tokens [B, T], lengths [B]) -> Context after the
      first `lengths` tokens of each row; consumes the context. A state that
      grows must have room for them, and keeps its room.
    resize: (params, context, capacity) -> the same with room for `capacity`
      tokens.
    capacity: (params, context) -> the tokens there is room for; None: any.
    prepare: (params, context) -> the same, ready for steps; consumes it.
    step: (params, context, controls, active [B], end_of_text) -> (Context,
      drawn tokens [B]); consumes the context. Rows that are not active stay as
      they are. The end of a text is drawn, but not read.
    copy: (context) -> an equal one with arrays of its own.
  """

  start: Callable[..., Context]
  read: Callable[..., Context]
  resize: Callable[..., Context]
  capacity: Callable[..., int | None]
  prepare: Callable[..., Context]
  step: Callable[..., tuple[Context, Array]]
  copy: Callable[[Context], Context]


@functools.lru_cache(maxsize=8)
def make_program(graph: nnx.GraphDef) -> Program:
  """Returns the functions of a model; equal models share them.

  Args:
    graph: The graph definition of a `LanguageModel`, as of `nnx.split`.
  """

  def start(params: Any, rows: int) -> Context:
    model = nnx.merge(graph, params)
    return Context(
      model.init_state(rows),
      jnp.zeros((rows, model.vocab), jnp.float32),
      jnp.zeros((rows,), jnp.uint32),
      jnp.zeros((rows,), jnp.int32),
    )

  def read(
    params: Any,
    context: Context,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
  ) -> Context:
    model = nnx.merge(graph, params)
    state, logits = read_segment(model, context.state, tokens, lengths)
    room = model.capacity(context.state)
    if room is not None:
      # The read adds room for its tokens; as large as before, the state can
      # take the place of the one that is consumed.
      state = model.resize(state, room)
    logits = jnp.where((lengths > 0)[:, None], logits, context.logits)
    return Context(state, logits, context.drawn, context.length + lengths)

  def resize(params: Any, context: Context, capacity: int) -> Context:
    model = nnx.merge(graph, params)
    return context._replace(state=model.resize(context.state, capacity))

  def capacity(params: Any, context: Context) -> int | None:
    model = nnx.merge(graph, params)
    return model.capacity(context.state)

  def prepare(params: Any, context: Context) -> Context:
    model = nnx.merge(graph, params)
    return context._replace(state=model.prepare(context.state))

  def step(
    params: Any,
    context: Context,
    controls: Controls,
    active: Bool[Array, "B"],
    end_of_text: Int[Array, ""],
  ) -> tuple[Context, Int[Array, "B"]]:
    model = nnx.merge(graph, params)
    tokens = sample(context.logits, controls, context.drawn)
    # Not `NOT_FINITE` either, after which the logits stay as they are.
    valid = active & (tokens != end_of_text) & (tokens >= 0)
    logits, state = model.step(
      jnp.where(valid, tokens, 0), context.state, valid=valid
    )
    logits = jnp.where(valid[:, None], logits, context.logits)
    drawn = context.drawn + active.astype(jnp.uint32)
    length = context.length + valid.astype(jnp.int32)
    return Context(state, logits, drawn, length), tokens

  return Program(
    start=jax.jit(start, static_argnums=1),
    read=jax.jit(read, donate_argnums=1),
    resize=jax.jit(resize, static_argnums=2),
    capacity=capacity,
    prepare=jax.jit(prepare, donate_argnums=1),
    step=jax.jit(step, donate_argnums=1),
    copy=jax.jit(lambda context: jax.tree.map(jnp.copy, context)),
  )


def read_segment(
  model: LanguageModel,
  state: LanguageState,
  tokens: Int[Array, "B T"],
  lengths: Int[Array, "B"],
) -> tuple[LanguageState, Float[Array, "B vocab"]]:
  """Reads the first `lengths` tokens of each row.

  Returns:
    The state after them and float32 logits of the token after the last; those
    of rows of length 0 mean nothing.
  """
  places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  out = model.hidden(tokens, state=state, mask=places < lengths[:, None])
  last = jnp.maximum(lengths - 1, 0)[:, None, None]
  hidden = jnp.take_along_axis(out.hidden, last, axis=1)[:, 0]
  assert out.state is not None  # Only aligned documents give none.
  return out.state, model.logits(hidden)
