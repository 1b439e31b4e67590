"""Exponential-kernel memories token by token, from their definition.

Everything else is tested against this. It keeps the list of all writes with
their shares, takes slopes by `jax.grad`, and shares no code with the blocks.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.attention.cache import LOST
from atlas_jax.attention.exponential_chunked import ChunkedState, Pending
from atlas_jax.attention.exponential_config import ExponentialMemory
from atlas_jax.attention.exponential_once import OnceState
from atlas_jax.attention.exponential_read import Columns, Fast, Vectors
from atlas_jax.attention.exponential_tokens import Tokens
from atlas_jax.memory.networks import ACTIVATIONS

_HIGHEST = jax.lax.Precision.HIGHEST
_FORGOTTEN = -1e29


class _Weights(NamedTuple):
  """The memory's weights after a token.

  Attributes:
    log, amount: shares `amount * exp(log)` of all writes in the inner matrix.
    fast: what was added to the outer one.
  """

  log: Float[Array, "M"]
  amount: Float[Array, "M"]
  fast: Fast


class _Running(NamedTuple):
  """What goes from token to token.

  Attributes:
    key, payload, error, hidden: the writes, one place each.
    now: weights after the last token.
    start: weights at the start of the chunk.
    recent: the last window - 1 tokens, oldest first.
    recent_start: those before the chunk.
    pending: the tokens of the chunk.
    count: tokens of the document.
  """

  key: Float[Array, "M K"]
  payload: Float[Array, "M D"]
  error: Float[Array, "M V"]
  hidden: Float[Array, "M h"]
  now: _Weights
  start: _Weights
  recent: Vectors
  recent_start: Vectors
  pending: Pending
  count: Int[Array, ""]


def run(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  tokens: Tokens,
  state: OnceState | ChunkedState,
  restart: Bool[Array, "B T"],
  valid: Bool[Array, "B T"],
  *,
  grow: bool = True,
) -> tuple[Float[Array, "B N T G V"], Any]:
  """Outputs, at least float32, and the state after.

  Args:
    memory: which memory.
    params: starting weights.
    lam: with `attends`, the share of the deep part.
    tokens: all tokens.
    state: what stands before, without a cache.
    restart: tokens that begin a document.
    valid: tokens that count.
    grow: adds room for T tokens.
  """
  one = lambda *arguments: _one(memory, grow, *arguments)
  by_head = jax.vmap(one, in_axes=(0, None, None, None, None, 0, 0))
  by_row = jax.vmap(by_head, in_axes=(None, None, 0, 0, 0, 0, 0))
  once = isinstance(state, OnceState)
  counts = state.count[:, None]
  if not once:
    counts = jnp.stack([state.chunks, state.count], axis=1)
  pending = None if once else state.pending
  parts: Any = (state.columns, state.fast, state.before, pending)
  y, parts, count = by_row(params, lam, restart, valid, counts, tokens, parts)
  columns, fast, before, pending = parts
  count = count[:, 0]  # the same for all heads
  room = columns.log.shape[-1]
  if once:
    lost = count > room
    count = jnp.where(lost, LOST, count)
    after = OnceState(columns, fast, before, count)
  else:
    size = memory.refresh
    chunks = count // size
    # A row that was lost before has no count to go by.
    lost = (chunks > room // memory.columns) | (state.chunks == LOST)
    chunks = jnp.where(lost, LOST, chunks)
    after = ChunkedState(columns, fast, before, pending, chunks, count % size)
  return jnp.where(lost[:, None, None, None, None], jnp.nan, y), after


def _one(
  memory: ExponentialMemory,
  grow: bool,
  params: dict[str, Array],
  lam: Float[Array, ""],
  restart: Bool[Array, "T"],
  valid: Bool[Array, "T"],
  counts: Int[Array, "n"],
  tokens: Tokens,
  parts: Any,
):
  """One row and head: outputs, the parts of the state, and the count."""
  columns, fast, before, waiting = parts
  length, width = restart.shape[0], memory.window
  size = memory.chunk
  if size is None:
    room = columns.log.shape[0] + (length if grow else 0)
    places = room + width
    count = counts[0]
    pending = Pending(
      jax.tree.map(lambda x: x[:0], tokens.vectors),
      *(x[:0] for x in (tokens.log_decay, tokens.rate, tokens.window)),
    )
  else:
    region = width - 1 + size
    new = -(-(size - 1 + length) // size) if grow else 0
    room = columns.log.shape[0] + new * region
    places = room + region
    count = counts[0] * size
    # The tokens of the unfinished chunk come first, to fill it again.
    none = jnp.zeros((size - 1, *tokens.query.shape[1:]), tokens.query.dtype)
    tokens = jax.tree.map(
      lambda a, b: jnp.concatenate([a, b]),
      Tokens(
        none,
        none,
        waiting.vectors,
        waiting.log_decay,
        waiting.rate,
        waiting.window,
      ),
      tokens,
    )
    place = jnp.arange(size - 1, dtype=jnp.int32)
    valid = jnp.concatenate([place < counts[1], valid])
    restart = jnp.concatenate([jnp.zeros((size - 1,), bool), restart])
    pending = jax.tree.map(
      lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), waiting
    )

  def longer(x: Array) -> Array:
    more = places - x.shape[0]
    return jnp.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)))

  dtype = fast.matrix.dtype
  columns = jax.tree.map(longer, columns)
  place = jnp.arange(places, dtype=jnp.int32)
  filled = place < count
  if size is not None:
    filled = _in_chunks(memory, place, count)
  # Empty places are out of sight until something is written there.
  log = jnp.where(filled, columns.log, -1e30)
  columns = columns._replace(log=log)
  value_width, hidden = fast.matrix.shape
  weights = _Weights(columns.log, columns.amount, fast)
  running = _Running(
    columns.key,
    columns.payload,
    jnp.zeros((places, value_width), dtype),
    jnp.zeros((places, hidden), dtype),
    weights,
    weights,
    before,
    before,
    pending,
    count,
  )
  if size is None and width > 1:
    running = _recall(memory, params, running, count - width + 1)

  def token(running: _Running, now):
    token, begins, counts = now
    after, y = _token(memory, params, lam, running, token, begins)
    after = jax.tree.map(
      lambda new, old: jnp.where(counts, new, old), after, running
    )
    return after, y

  running, y = jax.lax.scan(token, running, (tokens, restart, valid))
  y = y[y.shape[0] - length :]
  if size is None:
    filled = jnp.arange(room, dtype=jnp.int32) < running.count
    weights, recent, waiting = running.now, running.recent, None
  else:
    place = jnp.arange(room, dtype=jnp.int32)
    filled = _in_chunks(memory, place, running.count)
    at_border = running.count % size == 0
    choose = lambda a, b: jnp.where(at_border, a, b)
    weights, recent = jax.tree.map(
      choose,
      (running.now, running.recent),
      (running.start, running.recent_start),
    )
    place = jnp.arange(size - 1, dtype=jnp.int32) < running.count % size
    waiting = jax.tree.map(lambda x: _only(place, x[:-1]), running.pending)
  columns = Columns(running.key, running.payload, weights.log, weights.amount)
  columns = jax.tree.map(lambda x: _only(filled, x[:room]), columns)
  return y, (columns, weights.fast, recent, waiting), running.count


def _in_chunks(
  memory: ExponentialMemory, place: Int[Array, "M"], count: Int[Array, ""]
) -> Bool[Array, "M"]:
  """Places of tokens in the finished chunks of a document of so many tokens."""
  size, width = memory.refresh, memory.window
  region = width - 1 + size
  token = place // region * size + place % region - width + 1
  return (place < count // size * region) & (token >= 0)


def _token(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  run: _Running,
  token: Tokens,
  begins: Bool[Array, ""],
) -> tuple[_Running, Float[Array, "G V"]]:
  """One token: write, then read."""
  run = jax.tree.map(lambda x: jnp.where(begins, jnp.zeros_like(x), x), run)
  width, size = memory.window, memory.chunk
  place = run.count
  if size is not None:
    slot = run.count % size
    place = (run.count // size) * (width - 1 + size) + width - 1 + slot
    begun = run._replace(start=run.now, recent_start=run.recent)
    begun = _recall(memory, params, begun, place - width + 1)
    run = jax.tree.map(
      lambda new, old: jnp.where(slot == 0, new, old), begun, run
    )
    own = Pending(token.vectors, token.log_decay, token.rate, token.window)
    run = run._replace(
      pending=jax.tree.map(lambda x, new: x.at[slot].set(new), run.pending, own)
    )
  run = _put(
    run, place, token.vectors, _factors(memory, params, run, token.vectors)
  )
  decay = jnp.exp(token.log_decay)
  age = place - jnp.arange(run.key.shape[0], dtype=jnp.int32)
  near = (age >= 0) & (age < width) & (age <= run.count)
  write = jnp.where(
    near,
    token.rate * token.window[jnp.clip(age, 0, width - 1)],
    0.0,
  )
  log, amount, fast = run.now
  log = jnp.where(near, 0.0, jnp.maximum(log + token.log_decay, -1e30))
  amount = jnp.where(near, decay * amount + write, amount)
  fast = Fast(
    decay * fast.matrix
    + jnp.einsum(
      "m,mv,mh->vh", write, run.error, run.hidden, precision=_HIGHEST
    ),
    decay * fast.mass + jnp.sum(write),
    _kept(memory, fast.log_kept, token.log_decay),
  )

  def moved(old: Array, new: Array) -> Array:
    return jnp.concatenate([old, new[None]])[1:]

  run = run._replace(
    now=_Weights(log, amount, fast),
    recent=jax.tree.map(moved, run.recent, token.vectors),
    count=run.count + 1,
  )
  read = lambda query, score: _read(memory, params, lam, run, query, score)
  return run, jax.vmap(read)(token.query, token.score_query)


def _recall(
  memory: ExponentialMemory,
  params: dict[str, Array],
  run: _Running,
  place: Int[Array, ""],
) -> _Running:
  """Puts the recent tokens down from a place on, with slopes as of now."""
  reach = memory.window - 1
  for j in range(reach):
    vectors = jax.tree.map(lambda x, j=j: x[j], run.recent)
    factors = _factors(memory, params, run, vectors)
    there = (place + j >= 0) & (run.count >= reach - j)
    put = _put(run, place + j, vectors, factors, fresh=memory.chunk is not None)
    run = jax.tree.map(
      lambda new, old, there=there: jnp.where(there, new, old), put, run
    )
  return run


def _put(
  run: _Running,
  place: Int[Array, ""],
  vectors: Vectors,
  factors: Any,
  fresh: bool = True,
) -> _Running:
  payload, error, hidden = factors
  run = run._replace(
    key=run.key.at[place].set(vectors.score_key),
    payload=run.payload.at[place].set(payload.astype(run.payload.dtype)),
    error=run.error.at[place].set(error),
    hidden=run.hidden.at[place].set(hidden),
  )
  if not fresh:
    return run
  now = run.now
  log, amount = now.log.at[place].set(0.0), now.amount.at[place].set(0.0)
  return run._replace(now=now._replace(log=log, amount=amount))


def _inner(
  memory: ExponentialMemory,
  run: _Running,
  weights: _Weights,
  score: Float[Array, "K"],
) -> Float[Array, "D"]:
  """`sum_i p_i payload_i`."""
  dtype = weights.log.dtype
  exponent = weights.log + jnp.einsum(
    "mk,k->m", run.key.astype(dtype), score.astype(dtype), precision=_HIGHEST
  )
  known = weights.log > _FORGOTTEN
  if memory.normalised:
    top = jnp.where(known & (weights.amount > 0), exponent, -jnp.inf)
    top = jnp.max(top)
    top = jax.lax.stop_gradient(jnp.where(top > -jnp.inf, top, 0.0))
    exponent = exponent - top
  share = weights.amount * jnp.exp(jnp.where(known, exponent, 0.0))
  share = jnp.where(known, share, 0.0)
  if memory.normalised:
    total = jnp.sum(share)
    share = share / jnp.where(total > 0, total, 1.0)
  payload = run.payload.astype(dtype)
  return jnp.einsum("m,md->d", share, payload, precision=_HIGHEST)


def _start_weights(
  memory: ExponentialMemory, params: dict[str, Array], kept: Float[Array, ""]
):
  """The starting weights as they are now: in, bias, out."""
  factor = 1.0 if memory.normalised else kept
  return tuple(
    params[name].astype(kept.dtype) * factor for name in ("in", "bias", "out")
  )


def _outer(
  memory: ExponentialMemory, out: Float[Array, "V h"], fast: Fast
) -> Float[Array, "V h"]:
  if memory.normalised:
    return out + fast.matrix / jnp.maximum(fast.mass, 1.0)
  return out + fast.matrix


def _factors(
  memory: ExponentialMemory,
  params: dict[str, Array],
  run: _Running,
  vectors: Vectors,
):
  """payload, u and h of a token at the weights of the chunk's start."""
  key, score, value = vectors
  dtype = run.now.log.dtype
  key, score, value = (x.astype(dtype) for x in (key, score, value))
  weights = run.start
  z = jnp.zeros((run.payload.shape[1],), dtype)
  if memory.chunk is not None:
    z = _inner(memory, run, weights, score)
  by_prediction = jax.grad(memory.objective)
  if memory.linear:
    error = -by_prediction(z, value)
    hidden = jnp.zeros((0,), dtype)
    slope, parts = error, []
  else:
    kept = jnp.exp(weights.fast.log_kept)
    fast = weights.fast
    if memory.chunk is None:
      kept = jnp.ones_like(kept)
      fast = jax.tree.map(jnp.zeros_like, fast)
    inner, bias, out = _start_weights(memory, params, kept)
    matrix = _outer(memory, out, fast)
    act = ACTIVATIONS[memory.activation]
    z = z[: inner.shape[0]] + jnp.matmul(inner, key, precision=_HIGHEST) + bias

    def predict(z: Array) -> Array:
      return key + jnp.matmul(matrix, act(z), precision=_HIGHEST)

    slope = -jax.grad(lambda z: memory.objective(predict(z), value))(z)
    error = -by_prediction(predict(z), value)
    hidden = act(z)
    parts = [_length(error) * _length(hidden)]
  if memory.error_clip is not None:
    limit = memory.error_clip * math.sqrt(value.shape[0])
    features = 1.0
    if not memory.normalised:
      features = jnp.exp(jnp.vdot(score, score, precision=_HIGHEST) / 2)
    parts = jnp.stack([*parts, _length(slope) * features])
    shrink = limit / jnp.maximum(_length(parts), limit)
    error, slope = error * shrink, slope * shrink
  payload = jnp.concatenate([slope, value]) if memory.attends else slope
  return payload, error, hidden


def _read(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  run: _Running,
  query: Float[Array, "K"],
  score: Float[Array, "K"],
) -> Float[Array, "V"]:
  z = _inner(memory, run, run.now, score)
  if memory.linear:
    return z
  fast = run.now.fast
  inner, bias, out = _start_weights(memory, params, jnp.exp(fast.log_kept))
  query = query.astype(z.dtype)
  z, mean = z[: inner.shape[0]], z[inner.shape[0] :]
  z = z + jnp.matmul(inner, query, precision=_HIGHEST) + bias
  h = ACTIVATIONS[memory.activation](z)
  y = query + jnp.matmul(_outer(memory, out, fast), h, precision=_HIGHEST)
  return (1 - lam) * mean + lam * y if memory.attends else y


def _length(x: Float[Array, "n"]) -> Float[Array, ""]:
  """Euclidean length, with a slope at zero."""
  top = jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(x)), 1e-12))
  return top * jnp.sqrt(jnp.sum(jnp.square(x / top)) + 1e-12)


def _kept(
  memory: ExponentialMemory, log_kept: Array, log_decay: Array
) -> Array:
  """Log of what is left of the starting weights; 0 where they stay."""
  if memory.normalised or memory.linear:
    return log_kept
  return jnp.maximum(log_kept + log_decay, -1e30)


def _only(keep: Bool[Array, "M"], x: Array) -> Array:
  keep = keep.reshape(-1, *[1] * (x.ndim - 1))
  return jnp.where(keep, x, jnp.zeros((), x.dtype))
