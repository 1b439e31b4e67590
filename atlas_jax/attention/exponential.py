"""Memories over exponential features: DeepTransformers, SWDT and Dot.

The models of arXiv 2505.23735, sections 4.2 and 4.3, exact by kernel values
(see `exponential_config`): `apply` reads a sequence, or the next part of one,
and `step` one token per row. States hold all tokens of a document, so that a
call adds room for its tokens and a step needs room made by `resize`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention import (
  exponential_chunked,
  exponential_once,
  exponential_reference,
  exponential_step,
)
from atlas_jax.attention.cache import LOST
from atlas_jax.attention.exponential_chunked import ChunkedState, Pending
from atlas_jax.attention.exponential_config import (
  ExponentialMemory,
  Inputs,
  init_params,
)
from atlas_jax.attention.exponential_once import OnceState
from atlas_jax.attention.exponential_read import Columns, Fast, Vectors
from atlas_jax.attention.exponential_tokens import (
  outputs_of,
  tokens_of,
)
from atlas_jax.errors import UserError
from atlas_jax.memory import layout as layouts
from atlas_jax.memory.config import state_dtype
from atlas_jax.memory.gates import Gates

__all__ = [
  "ChunkedState",
  "ExponentialMemory",
  "Inputs",
  "OnceState",
  "Output",
  "State",
  "apply",
  "capacity",
  "carry_size",
  "check_room",
  "init_params",
  "init_state",
  "prepare",
  "resize",
  "step",
  "tokens_of_state",
  "unprepare",
]

State = OnceState | ChunkedState

_IMPLEMENTATIONS = ("auto", "reference", "xla")


class Output(NamedTuple):
  """What a memory gives.

  Attributes:
    y: outputs in the type of values; anything at padding.
    state: the state after the last token; None for aligned documents.
  """

  y: Float[Array, "B T H V"]
  state: State | None


def apply(
  memory: ExponentialMemory,
  params: dict[str, Array],
  inputs: Inputs,
  gates: Gates,
  state: State | None = None,
  *,
  lam: Float[Array, ""] | float = 1.0,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  lengths: Int[Array, "B"] | None = None,
  layout: layouts.Layout | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  implementation: str = "auto",
) -> Output:
  """Writes and reads a memory over a sequence.

  A token sees itself and what its document holds before it.

  Args:
    memory: which memory.
    params: starting weights (`init_params`).
    inputs: vectors of any floating-point type. Gates, sums and the memory's
      own weights are at least float32.
    gates: log of the decays [B, T, N, 1], rates and window weights; there is
      no momentum.
    state: where to go on; None is a fresh start.
    lam: share of the deep part; only with `attends`.
    restart: tokens that begin a document, without a chunk.
    valid: tokens that are no padding; None: all.
    lengths: valid tokens at the front of each row, if that is where they are.
    layout: slots of compact tokens, with a chunk; None: rows without padding
      and documents.
    segment_ids: documents that start at multiples of the chunk, 0 for padding;
      then there is no state.
    implementation: "reference" (token by token), "xla" (blocks of tokens), or
      "auto", which is the same.

  Raises:
    UserError: an implementation that does not exist, or a state of another
      memory.
  """
  batch, length = inputs.value.shape[:2]
  _check(memory, state, implementation)
  if memory.chunk is not None and restart is not None:
    if layout is None and segment_ids is None:
      raise UserError(
        "documents of a memory with chunks need a layout, or segment_ids that "
        "start at multiples of the chunk"
      )
  tokens = tokens_of(inputs, gates, valid)
  dtype = inputs.value.dtype
  share = _share(memory, lam, dtype)
  layout_count = getattr(state, "count", None)
  if state is None:
    heads, width = inputs.key.shape[2:]
    state = init_state(memory, batch, heads, width, dtype)
  state = unprepare(state)
  if restart is None:
    restart = jnp.zeros((batch, length), bool)
  if implementation == "reference":
    if valid is None:
      valid = jnp.ones((batch, length), bool)
    y, after = exponential_reference.run(
      memory, params, share, tokens, state, restart, valid
    )
  elif isinstance(state, OnceState):
    if lengths is None:
      lengths = jnp.full((batch,), length, jnp.int32)
    y, after = exponential_once.run(
      memory, params, share, tokens, state, restart, lengths, grow=True
    )
  elif segment_ids is not None:
    y = exponential_chunked.run_aligned(
      memory, params, share, tokens, state, segment_ids
    )
    after = None
  else:
    if layout is None:
      layout = layouts.plan(length, memory.refresh, batch, count=layout_count)
    y, after = exponential_chunked.run(
      memory, params, share, tokens, state, layout
    )
  if segment_ids is not None:
    after = None
  return Output(outputs_of(y, dtype), after)


def step(
  memory: ExponentialMemory,
  params: dict[str, Array],
  inputs: Inputs,
  gates: Gates,
  state: State,
  *,
  lam: Float[Array, ""] | float = 1.0,
  valid: Bool[Array, "B"] | None = None,
  implementation: str = "auto",
) -> tuple[Float[Array, "B 1 H V"], State]:
  """Writes and reads one token per row, in the room that the state has.

  Args:
    memory, params, inputs, gates, lam, implementation: as of `apply`, for T of
      1.
    state: what stands before. With a chunk it comes back prepared for further
      steps.
    valid: rows that have a token; the others stay as they are. None is all.

  Returns:
    outputs in the type of values, and the state after. A row without room
    gives NaN from then on.

  Raises:
    UserError: where a row has no room, as far as that is known (`check_room`).
  """
  _check(memory, state, implementation)
  check_room(memory, state, valid)
  batch, dtype = inputs.value.shape[0], inputs.value.dtype
  if valid is None:
    valid = jnp.ones((batch,), bool)
  tokens = tokens_of(inputs, gates, valid[:, None])
  share = _share(memory, lam, dtype)
  none = jnp.zeros((batch, 1), bool)
  if implementation == "reference":
    y, after = exponential_reference.run(
      memory,
      params,
      share,
      tokens,
      unprepare(state),
      none,
      valid[:, None],
      grow=False,
    )
  elif isinstance(state, OnceState):
    lengths = valid.astype(jnp.int32)
    y, after = exponential_once.run(
      memory, params, share, tokens, state, none, lengths, grow=False
    )
  else:
    if state.cache is None:
      state = exponential_step.with_cache(memory, params, state)
    y, after = exponential_step.step(
      memory, params, share, tokens, state, valid
    )
  return outputs_of(y, dtype), after


def init_state(
  memory: ExponentialMemory,
  batch: int,
  heads: int,
  width: int,
  dtype: DTypeLike = jnp.float32,
) -> State:
  """The state of rows before their first token, without room.

  Args:
    memory: which memory.
    batch: B.
    heads: heads of keys, N.
    width: width of keys and values.
    dtype: type of the vectors; sums are at least float32.
  """
  wide = state_dtype(dtype)

  def zeros(*shape: int, dtype: DTypeLike = wide) -> Array:
    return jnp.zeros((batch, heads, *shape), dtype)

  def vectors(size: int) -> Vectors:
    return Vectors(*(zeros(size, width, dtype=dtype) for _ in range(3)))

  columns = Columns(
    zeros(0, width, dtype=dtype),
    zeros(0, memory.payload(width), dtype=dtype),
    zeros(0),
    zeros(0),
  )
  fast = Fast(zeros(width, memory.hidden(width)), zeros(), zeros())
  before = vectors(memory.window - 1)
  count = jnp.zeros((batch,), jnp.int32)
  if memory.chunk is None:
    return OnceState(columns, fast, before, count)
  size = memory.chunk - 1
  pending = Pending(
    vectors(size), zeros(size), zeros(size), zeros(size, memory.window)
  )
  return ChunkedState(columns, fast, before, pending, count, count)


def prepare(
  memory: ExponentialMemory, params: dict[str, Array], state: State
) -> State:
  """The state with what steps need besides, derived from the rest of it."""
  if isinstance(state, OnceState) or state.cache is not None:
    return state
  return exponential_step.with_cache(memory, params, state)


def unprepare(state: State) -> State:
  """The state without what only steps need."""
  if isinstance(state, OnceState):
    return state
  return state._replace(cache=None)


def capacity(memory: ExponentialMemory, state: State) -> int:
  """Tokens for which a state has room, those it holds included."""
  places = state.columns.log.shape[-1]
  if memory.chunk is None:
    return places
  return places // memory.columns * memory.chunk


def resize(memory: ExponentialMemory, state: State, capacity: int) -> State:
  """The state with room for at least so many tokens.

  Room that is taken away must be empty: a row that held more gives NaN from
  then on.

  Raises:
    UserError: a negative capacity.
  """
  if capacity < 0:
    raise UserError(f"a capacity of {capacity} tokens: use 0 or more")
  rows = places = capacity
  if memory.chunk is not None:
    rows = -(-capacity // memory.chunk)
    places = rows * memory.columns

  def change(x: Array) -> Array:
    x = x[:, :, :places]
    width = [(0, 0)] * x.ndim
    width[2] = (0, places - x.shape[2])
    return jnp.pad(x, width)

  columns = jax.tree.map(change, state.columns)
  if isinstance(state, OnceState):
    count = jnp.where(state.count > rows, LOST, state.count)
    return state._replace(columns=columns, count=count)
  chunks = jnp.where(state.chunks > rows, LOST, state.chunks)
  return state._replace(columns=columns, chunks=chunks)


def tokens_of_state(memory: ExponentialMemory, state: State) -> Int[Array, "B"]:
  """How many tokens of its document each row has read."""
  if isinstance(state, OnceState):
    return state.count
  return state.chunks * memory.refresh + state.count


def carry_size(
  memory: ExponentialMemory, heads: int, width: int, length: int
) -> int:
  """Numbers per row kept from block to block for the backward pass."""
  blocks = -(-length // (memory.chunk or exponential_once.BLOCK))
  return blocks * heads * (memory.hidden(width) * width + 2)


def check_room(
  memory: ExponentialMemory, state: State, valid: Bool[Array, "B"] | None
) -> None:
  """Refuses a step for which there is no room.

  Inside jit it is only known whether there is any room at all.

  Raises:
    UserError: names the remedy.
  """
  room = capacity(memory, state)
  if not room:
    raise UserError("the state has no room for a token: make it with `resize`")
  if isinstance(state.count, Tracer) or isinstance(valid, Tracer):
    return
  held = np.asarray(state.count, np.int64)
  if isinstance(state, ChunkedState):
    held = held + np.asarray(state.chunks, np.int64) * memory.refresh
    # An unfinished chunk needs no room yet.
    full = held + 1 >= room + memory.refresh
  else:
    full = held >= room
  if valid is not None:
    full &= np.asarray(valid)
  if full.any():
    raise UserError(
      f"row {int(np.argmax(full))} of the state is full, there is room for "
      f"{room} tokens: make more with `resize`"
    )


def _share(
  memory: ExponentialMemory, lam: Array | float, dtype: DTypeLike
) -> Float[Array, ""]:
  """lam as an array."""
  if not memory.attends and (not isinstance(lam, (int, float)) or lam != 1):
    raise UserError("only a memory with `attends` takes a lam other than 1")
  return jnp.asarray(lam, state_dtype(dtype))


def _check(
  memory: ExponentialMemory, state: State | None, implementation: str
) -> None:
  """Refuses what does not exist, and a state of another memory."""
  if implementation not in _IMPLEMENTATIONS:
    raise UserError(
      f"no implementation is called {implementation!r}: choose one of "
      f"{', '.join(_IMPLEMENTATIONS)}"
    )
  if state is None:
    return
  kind = OnceState if memory.chunk is None else ChunkedState
  if not isinstance(state, kind):
    raise UserError(
      f"the state is of {type(state).__name__}, but this memory has one of "
      f"{kind.__name__}: start from `init_state`"
    )
