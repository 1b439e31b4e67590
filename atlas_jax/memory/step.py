"""One token at a time: the same numbers as `apply`, for generation.

The weights change once per chunk. Between two chunk borders a step computes
the new token's factors at the weights of the chunk's start, updates one row of
the matrices A and C, and reads in dual form, so no matrix of weights is
written. What it needs for that is derived from the canonical state and kept
beside it (`Cache`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory.coefficients import (
  has_budget,
  momentum_rate,
  overlap,
  own_overlap,
  position_factors,
)
from atlas_jax.memory.config import Memory
from atlas_jax.memory.dual import by_rows, combine, handed_on, scale_rows
from atlas_jax.memory.factors import (
  Factors,
  factors,
  plain,
  working,
  write_scales,
)
from atlas_jax.memory.gates import Gates
from atlas_jax.memory.newton_schulz import newton_schulz
from atlas_jax.memory.numerics import matmul


class Cache(NamedTuple):
  """Derived quantities of the unfinished chunk, per row and head.

  Attributes:
    factor: gradients of tail and pending tokens at the chunk-start weights.
    overlap: their overlap (the full matrix or its diagonal), if the bound has
      a budget.
    written: write gates so far, per token.
    momentum, weight: the current rows of A and C, not yet divided.
    momentum_start, weight_start, weight_momentum: shares of S_0, W_0, and of
      S_0 in W.
    current: Muon: the weights after the last orthogonalised step.
    since: Muon: decay since then.
    block_rate: Muon: write gates collected since then.
    frozen: the weights at the chunk's start, where they are not what is stored.
    write_scale: how the chunk's own writes show in them, likewise.
  """

  factor: Factors
  overlap: Float[Array, "t #t"] | None
  written: Float[Array, "t"]
  momentum: Float[Array, "t"]
  weight: Float[Array, "g t"]
  momentum_start: Float[Array, ""]
  weight_start: Float[Array, "g"]
  weight_momentum: Float[Array, "g"]
  current: dict[str, Float[Array, "n d"]]
  since: Float[Array, "g"]
  block_rate: Float[Array, "g"]
  frozen: dict[str, Float[Array, "n d"]]
  write_scale: dict[str, Float[Array, ""]]


class Head(NamedTuple):
  """State of one head, as a step sees it.

  Attributes:
    weights, momentum: at the start of the chunk, as they are stored.
    tail_key, tail_value: tokens before the chunk.
    seen, count: real tokens of the tail; tokens of the chunk so far.
    key, value: tokens of the chunk so far.
    cache: derived quantities.
  """

  weights: dict[str, Float[Array, "n d"]]
  momentum: dict[str, Float[Array, "n d"]]
  tail_key: Float[Array, "tail k"]
  tail_value: Float[Array, "tail v"]
  seen: Array
  count: Array
  key: Float[Array, "slots k"]
  value: Float[Array, "slots v"]
  cache: Any


def start_cache(memory: Memory, shared, head: Head) -> Cache:
  """The cache of a chunk of which no token has come yet."""
  tail = head.tail_key.shape[0]
  dtype = head.tail_key.dtype
  columns = tail + memory.chunk
  groups = max(1, memory.retention.groups)
  # The chunk's own columns are filled by the steps; here they hold zeros.
  keys = jnp.pad(head.tail_key, ((0, memory.chunk), (0, 0)))
  values = jnp.pad(head.tail_value, ((0, memory.chunk), (0, 0)))
  frozen = working(memory, head.weights)
  threshold = None
  if memory.objective.gated:
    threshold = jnp.zeros((columns,), dtype)
  scale = write_scales(memory, head.weights)
  factor = factors(memory, shared, frozen, keys, values, threshold, scale)
  table = memory.entries(keys.shape[-1], values.shape[-1])
  pairs = None
  if has_budget(memory):
    if memory.limits.budget == "full":
      pairs = overlap(shared, table, factor, factor)
    else:
      pairs = own_overlap(shared, table, factor)[:, None]
  return Cache(
    factor=factor,
    overlap=pairs,
    written=jnp.zeros((columns,), dtype),
    momentum=jnp.zeros((columns,), dtype),
    weight=jnp.zeros((groups, columns), dtype),
    momentum_start=jnp.ones((), dtype),
    weight_start=jnp.ones((groups,), dtype),
    weight_momentum=jnp.zeros((groups,), dtype),
    current=head.weights if memory.orthogonalises else {},
    since=jnp.ones((groups,), dtype),
    block_rate=jnp.zeros((groups,), dtype),
    frozen={} if memory.retention.linear else frozen,
    write_scale=scale,
  )


def write_token(
  memory: Memory, shared, head: Head, key: Array, value: Array, gate: Gates
) -> Head:
  """Adds one token to the chunk: its factors, and new rows of A and C."""
  cache = head.cache
  tail, columns = head.tail_key.shape[0], cache.written.shape[0]
  here = tail + head.count
  threshold = None
  if gate.threshold is not None:
    threshold = gate.threshold[None]
  new = factors(
    memory,
    shared,
    _frozen(head),
    key[None],
    value[None],
    threshold,
    cache.write_scale,
  )
  put = lambda all_, one: jax.lax.dynamic_update_slice_in_dim(
    all_, one, here, 0
  )
  factor = jax.tree.map(put, cache.factor, new)
  column = jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)[0]
  real = (column >= tail - head.seen) & (column <= here)
  age = here - column
  in_window = real & (age >= 0) & (age < memory.window)
  gamma = gate.window[jnp.clip(age, 0, memory.window - 1)]
  gamma = jnp.where(in_window, gamma, jnp.zeros_like(gamma))

  keep = jnp.exp(gate.log_momentum)
  decay = jnp.exp(gate.log_decay)
  if not memory.retention.groups:
    decay = jnp.ones_like(cache.since)
  if memory.orthogonalises:
    momentum = keep * cache.momentum + gamma
  elif memory.has_momentum:
    momentum = keep * cache.momentum + momentum_rate(memory, gate) * gamma
  else:
    momentum = gate.rate * gamma
  momentum_start = keep * cache.momentum_start
  weight_momentum = cache.weight_momentum
  if memory.has_momentum:
    weight_momentum = decay * weight_momentum + momentum_start
  pairs = cache.overlap
  if pairs is not None:
    table = memory.entries(key.shape[-1], value.shape[-1])
    if memory.limits.budget == "full":
      row = overlap(shared, table, new, factor)
      pairs = put(pairs, row)
      pairs = jax.lax.dynamic_update_slice_in_dim(pairs, row.T, here, 1)
    else:
      pairs = put(pairs, own_overlap(shared, table, new)[:, None])
  cache = cache._replace(
    factor=factor,
    overlap=pairs,
    written=cache.written + gate.rate * gamma,
    momentum=momentum,
    weight=decay[:, None] * cache.weight + momentum[None, :],
    momentum_start=momentum_start,
    weight_start=decay * cache.weight_start,
    weight_momentum=weight_momentum,
    since=decay * cache.since,
    block_rate=decay * cache.block_rate + gate.rate,
  )
  slots = head.key.shape[0]
  # The last token of a chunk finds no slot: the chunk is written at once.
  slot = jax.lax.broadcasted_iota(jnp.int32, (slots, 1), 0) == head.count
  return head._replace(
    cache=cache,
    count=head.count + 1,
    key=jnp.where(slot, key[None], head.key),
    value=jnp.where(slot, value[None], head.value),
  )


def read_token(memory: Memory, shared, head: Head, query: Array) -> Array:
  """Reads at the weights of the newest token, without forming them."""
  cache = head.cache
  table = memory.entries(query.shape[-1], head.tail_value.shape[-1])
  share = _share(memory, shared, head)
  frozen = _frozen(head)

  def linear(name: str, x: Array) -> Array:
    lift = table[name].lift
    features = lift.map(x, shared["features"])
    if memory.orthogonalises:
      out = matmul(features, cache.current[name].T)
      return by_rows(cache.since[:, None], out)
    out = by_rows(cache.weight_start[:, None], matmul(features, frozen[name].T))
    kernel = lift.kernel(x, cache.factor.x[name], shared["features"])
    moved = combine(
      (cache.weight * share)[:, None, :], kernel, cache.factor.u[name]
    )
    if memory.has_momentum:
      carried = matmul(features, head.momentum[name].T)
      moved = moved + by_rows(cache.weight_momentum[:, None], carried)
    if name in cache.write_scale:
      moved = cache.write_scale[name] * moved
    return out - moved

  y = memory.network.apply(linear, query[None], memory.features, shared)
  return y[0]


def read_weights(memory: Memory, shared, head: Head, query: Array) -> Array:
  """Reads at the chunk-start weights."""
  table = memory.entries(query.shape[-1], head.tail_value.shape[-1])
  linear = plain(shared, table, _frozen(head))
  y = memory.network.apply(linear, query[None], memory.features, shared)
  return y[0]


def orthogonalised(memory: Memory, shared, head: Head) -> Head:
  """Muon's step at the end of a block."""
  cache = head.cache
  momentum = _momentum_now(memory, shared, head)
  current = {}
  for name, w in cache.current.items():
    step = newton_schulz(momentum[name], memory.muon)
    current[name] = scale_rows(cache.since, w) - scale_rows(
      cache.block_rate, step
    )
  return head._replace(
    cache=cache._replace(
      current=current,
      since=jnp.ones_like(cache.since),
      block_rate=jnp.zeros_like(cache.block_rate),
    )
  )


def next_chunk(memory: Memory, shared, head: Head, key, value) -> Head:
  """Writes a full chunk into the weights and starts the next one.

  Args:
    head: state whose last token is `key`, `value` (it has no pending slot).
  """
  cache = head.cache
  momentum = {}
  if memory.has_momentum:
    momentum = _momentum_now(memory, shared, head)
  if memory.orthogonalises:
    weights = cache.current
  else:
    weights = _weights_now(memory, shared, head)
  weights, momentum = handed_on(
    memory, shared, weights, momentum, head.tail_value.shape[-1]
  )
  keys = jnp.concatenate([head.tail_key, head.key, key[None]])
  values = jnp.concatenate([head.tail_value, head.value, value[None]])
  tail = head.tail_key.shape[0]
  head = Head(
    weights=weights,
    momentum=momentum,
    tail_key=keys[memory.chunk :],
    tail_value=values[memory.chunk :],
    seen=jnp.minimum(head.seen + memory.chunk, tail),
    count=jnp.zeros_like(head.count),
    key=jnp.zeros_like(head.key),
    value=jnp.zeros_like(head.value),
    cache=None,
  )
  return head._replace(cache=start_cache(memory, shared, head))


def _frozen(head: Head) -> dict[str, Array]:
  """The weights at the chunk's start."""
  return head.cache.frozen or head.weights


def _share(memory: Memory, shared, head: Head) -> Array:
  """What the chunk's own writes are multiplied by: position over budget."""
  cache = head.cache
  position = jnp.ones((), cache.written.dtype)
  if memory.rate_by_position:
    # Before the chunk's first token nothing is written, whatever the factor.
    place = jnp.maximum(head.count - 1, 0)
    position = position_factors(shared["position"])[place]
  if cache.overlap is None:
    return position
  growth = matmul(cache.written[None], cache.overlap)[0]
  if memory.limits.budget == "full":
    tail = head.tail_key.shape[0]
    column = jax.lax.broadcasted_iota(jnp.int32, (1, growth.shape[0]), 1)[0]
    real = (column >= tail - head.seen) & (column < tail + head.count)
    growth = jnp.where(real, growth, jnp.zeros_like(growth))
  return position / jnp.maximum(1.0, position * jnp.max(growth))


def _weights_now(memory: Memory, shared, head: Head):
  cache, share = head.cache, _share(memory, shared, head)
  table = memory.entries(head.tail_key.shape[-1], head.tail_value.shape[-1])
  weights = {}
  for name, entry in table.items():
    features = entry.lift.map(cache.factor.x[name], shared["features"])
    start = scale_rows(cache.weight_start, head.weights[name])
    if memory.has_momentum:
      carried = scale_rows(cache.weight_momentum, head.momentum[name])
      start = start - carried
    u = by_rows(cache.weight * share, cache.factor.u[name])
    weights[name] = start - matmul(u.T, features)
  return weights


def _momentum_now(memory: Memory, shared, head: Head):
  cache, share = head.cache, _share(memory, shared, head)
  table = memory.entries(head.tail_key.shape[-1], head.tail_value.shape[-1])
  momentum = {}
  for name, entry in table.items():
    features = entry.lift.map(cache.factor.x[name], shared["features"])
    u = (cache.momentum * share)[:, None] * cache.factor.u[name]
    momentum[name] = cache.momentum_start * head.momentum[name] + matmul(
      u.T, features
    )
  return momentum
