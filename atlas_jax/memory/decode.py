"""Steps for a batch of rows, each at its own place in its chunk."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import dispatch
from atlas_jax.memory import step as steps
from atlas_jax.memory.chunk import chunk
from atlas_jax.memory.config import Memory
from atlas_jax.memory.factors import (
  Carry,
  Tokens,
  plain,
  prepare,
  prepare_heads,
)
from atlas_jax.memory.gates import Gates
from atlas_jax.memory.state import MemoryState, Pending, check_state, norm
from atlas_jax.memory.step import Head
from atlas_jax.memory.stream import Output, apply, check_inputs


def step(
  memory: Memory,
  params: dict[str, Any],
  query: Float[Array, "B H K"],
  key: Float[Array, "B H K"],
  value: Float[Array, "B H V"],
  gates: Gates,
  state: MemoryState,
  *,
  valid: Bool[Array, "B"] | None = None,
  implementation: str = "auto",
) -> Output:
  """Writes and reads one token per row; as `apply` on a length of one.

  The cost is constant in the context's length. A state that comes from
  `apply` has no cache yet; it is made here, or ahead by `with_cache`.

  Args:
    memory, params: as in `apply`.
    query, key, value, gates: one token, without the time axis.
    state: where to go on; rows may be at different places in their chunks.
    valid: rows that have a token now; others stay as they are. None is all.
    implementation: "auto", "reference" (token by token) or "xla".

  Returns:
    read-out [B, H, V], the state after the token (of the same type, with its
    cache) and the inner loss [B, H].

  Raises:
    UserError: shapes that do not fit, or a state of another memory.
  """
  with_time = lambda tree: jax.tree.map(lambda x: x[:, None], tree)
  tokens = (query, key, value, gates)
  if dispatch.resolve(implementation) == "reference":
    mask = None if valid is None else valid[:, None]
    out = apply(
      memory,
      params,
      *with_time(tokens),
      state=state,
      mask=mask,
      implementation=implementation,
    )
    return out._replace(y=out.y[:, 0], inner_loss=out.inner_loss[:, 0])
  check_inputs(memory, params, *jax.eval_shape(with_time, tokens))
  check_state(memory, params, state, query.shape[0], key.shape[-1])
  if valid is not None and valid.shape != query.shape[:1]:
    raise UserError(f"valid is {valid.shape} but must be {query.shape[:1]}")
  if state.cache is None:
    state = with_cache(memory, params, state)
  dtype = state.tail_key.dtype
  batch = query.shape[0]
  if valid is None:
    valid = jnp.ones((batch,), bool)
  keep = lambda x: jnp.where(
    valid.reshape(-1, *[1] * (x.ndim - 1)), x.astype(dtype), 0.0
  )
  tokens = jax.tree.map(keep, tokens)
  over_heads = _over_heads(memory, params, key.shape[-1], dtype)
  one = _step_of_large_chunk if memory.steps_once else _step
  state, y, loss = one(memory, over_heads, state, *tokens, valid=valid)
  return Output(y.astype(value.dtype), state, loss, norm(state.weights))


def with_cache(
  memory: Memory, params: dict[str, Any], state: MemoryState
) -> MemoryState:
  """Derives what `step` needs from a state, by replaying its open chunk."""
  if memory.steps_once:
    # Nothing is read from the open chunk before it is whole.
    return state._replace(cache=())
  dtype = state.tail_key.dtype
  over_heads = _over_heads(memory, params, state.tail_key.shape[-1], dtype)
  pending, count = state.pending, state.count
  empty = jax.tree.map(jnp.zeros_like, pending)
  state = state._replace(pending=empty, count=jnp.zeros_like(count))
  start = over_heads(steps.start_cache)
  state = state._replace(cache=start(_heads(state)))
  slots = pending.key.shape[1]
  if not slots:
    return state

  def replay(state, token):
    index, key, value, gates = token
    query = jnp.zeros_like(key)
    state, _, _ = _step(
      memory, over_heads, state, query, key, value, gates, index < count
    )
    return state, None

  by_time = lambda x: jnp.moveaxis(x, 1, 0)
  tokens = jax.tree.map(by_time, tuple(pending))
  index = jnp.arange(slots, dtype=jnp.int32)
  state, _ = jax.lax.scan(replay, state, (index, *tokens))
  return state


def without_cache(state: MemoryState) -> MemoryState:
  """The canonical state, as `apply` returns it."""
  return state._replace(cache=None)


def _step(memory: Memory, over_heads, state, query, key, value, gates, valid):
  """One token per valid row, with chunk and block ends for the whole batch.

  The conditions are outside of the loop over rows: inside, both branches would
  run and rewrite all weights at every token.
  """
  before = _heads(state)
  write = over_heads(steps.write_token)
  read = over_heads(steps.read_token)
  if memory.read == "before":
    y = read(before, query)
  heads = write(before, key, value, gates)
  heads = _where(valid, heads, before)
  count = state.count + valid.astype(jnp.int32)
  if memory.orthogonalises:
    at_end = valid & (count % memory.muon.every == 0)
    block = over_heads(steps.orthogonalised)
    heads = jax.lax.cond(
      jnp.any(at_end),
      lambda h: _where(at_end, block(h), h),
      lambda h: h,
      heads,
    )
  if memory.read == "after":
    y = read(heads, query)
  tail = state.tail_key.shape[1]
  here = (tail + state.count)[:, None, None]
  loss = jnp.take_along_axis(heads.cache.factor.loss, here, axis=2)[..., 0]

  full = valid & (count == memory.chunk)
  advance = over_heads(steps.next_chunk)
  reread = over_heads(steps.read_weights)

  def end_chunk(heads, y):
    after = advance(heads, key, value)
    if memory.read == "after":
      y = _where(full, reread(after, query), y)
    return _where(full, after, heads), y

  heads, y = jax.lax.cond(
    jnp.any(full), end_chunk, lambda heads, y: (heads, y), heads, y
  )
  pending = _put(state.pending.gates, gates, state.count, valid, full)
  silent = lambda x: _where(valid, x, jnp.zeros_like(x))
  return _state(heads, pending), silent(y), silent(loss)


def _step_of_large_chunk(
  memory: Memory, over_heads, state, query, key, value, gates, valid
):
  """As `_step`, where a chunk is read at its start and written at its end."""
  heads = _heads(state)
  y, loss = over_heads(_read_and_judge)(heads, query, key, value)
  before, new = tuple(state.pending), (key, value, gates)
  rows = jnp.arange(key.shape[0], dtype=jnp.int32)
  # The last token of a chunk finds no slot. All others go to theirs, so that a
  # step does not rewrite the thousands of tokens before it.
  place = jnp.where(valid, state.count, memory.chunk)
  put = lambda all_, one: all_.at[rows, place].set(one, mode="drop")
  pending = jax.tree.map(put, before, new)
  count = state.count + valid.astype(jnp.int32)
  full = valid & (count == memory.chunk)
  write = over_heads(_write_chunk)

  def end_chunk(heads: Head, pending):
    by_head = lambda x: jnp.moveaxis(x, 2, 1)
    joined = jax.tree.map(
      lambda old, one: by_head(jnp.concatenate([old, one[:, None]], axis=1)),
      before,
      new,
    )
    empty = jax.tree.map(jnp.zeros_like, pending)
    heads = _where(full, write(heads, *joined), heads)
    return heads, _where(full, empty, pending)

  heads, pending = jax.lax.cond(
    jnp.any(full),
    end_chunk,
    lambda heads, pending: (heads, pending),
    heads,
    pending,
  )
  silent = lambda x: _where(valid, x, jnp.zeros_like(x))
  after = state._replace(
    weights=heads.weights,
    momentum=heads.momentum,
    pending=Pending(*pending),
    count=jnp.where(full, jnp.zeros_like(count), count),
  )
  return after, silent(y), silent(loss)


def _read_and_judge(memory: Memory, shared, head: Head, query, key, value):
  """A read-out, and the inner loss of a token, at the chunk-start weights."""
  table = memory.entries(key.shape[-1], value.shape[-1])
  linear = plain(shared, table, head.weights)
  read = lambda x: memory.network.apply(linear, x, memory.features, shared)
  loss = memory.objective(read(key[None]), value[None])
  return read(query[None])[0], loss[0]


def _write_chunk(memory: Memory, shared, head: Head, key, value, gates) -> Head:
  """Writes a full chunk into the weights."""
  carry = Carry(
    head.weights, head.momentum, head.tail_key, head.tail_value, head.seen
  )
  tokens = Tokens(jnp.zeros_like(key), key, value, gates)
  after, _ = chunk(memory, shared, carry, tokens)
  return head._replace(weights=after.weights, momentum=after.momentum)


def _put(pending, new, count, valid, full):
  """A chunk's tokens with the newest one, or none after a full chunk.

  Args:
    pending: arrays [B, slots, ...].
    new: arrays [B, ...] for the slots `count` of valid rows.
    count: tokens so far.
    valid, full: rows that have a token, and whose chunk it fills.
  """

  def put(all_: Array, new: Array) -> Array:
    place = jax.lax.broadcasted_iota(jnp.int32, all_.shape[:2], 1)
    here = (place == count[:, None]) & valid[:, None]
    here = here.reshape(*here.shape, *[1] * (all_.ndim - 2))
    return _where(
      ~full, jnp.where(here, new[:, None], all_), jnp.zeros_like(all_)
    )

  return jax.tree.map(put, pending, new)


def _heads(state: MemoryState) -> Head:
  """The state with heads as a second leading axis of every leaf."""
  heads = jax.tree.leaves(state.weights)[0].shape[1]
  spread = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], heads))
  return Head(
    state.weights,
    state.momentum,
    state.tail_key.swapaxes(1, 2),
    state.tail_value.swapaxes(1, 2),
    spread(state.seen),
    spread(state.count),
    state.pending.key.swapaxes(1, 2),
    state.pending.value.swapaxes(1, 2),
    state.cache,
  )


def _state(heads: Head, gates: Gates) -> MemoryState:
  return MemoryState(
    heads.weights,
    heads.momentum,
    heads.tail_key.swapaxes(1, 2),
    heads.tail_value.swapaxes(1, 2),
    heads.seen[:, 0],
    Pending(heads.key.swapaxes(1, 2), heads.value.swapaxes(1, 2), gates),
    heads.count[:, 0],
    heads.cache,
  )


def _over_heads(memory: Memory, params, key_width: int, dtype):
  """Makes functions of one head, given the memory first, ones of [B, H]."""
  shared = prepare(memory, params, key_width, dtype)
  own = prepare_heads(memory, params, dtype)

  def over(function):
    def one_head(own, *arguments):
      return function(memory, {**shared, **own}, *arguments)

    def one_row(*arguments):
      return jax.vmap(one_head)(own, *arguments)

    return jax.vmap(one_row)

  return over


def _where(rows: Bool[Array, "B"], yes, no):
  """Chooses whole rows of two trees."""

  def choose(a, b):
    flag = rows.reshape(-1, *[1] * (a.ndim - 1))
    return jnp.where(flag, a, b)

  return jax.tree.map(choose, yes, no)
