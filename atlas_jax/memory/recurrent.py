"""Token by token: the definition that every faster form is tested against.

Plain loops, materialised gradients by `jax.grad`, one token after another. It
knows the networks and feature maps (what a memory computes) and nothing of the
chunk algebra (how it is computed fast). With `chunk = 1` this is the exact
recurrence of arXiv 2505.23735, Eq. 8-10, 32-33; with a larger chunk gradients
are taken at the weights of the last chunk start (Eq. 15-16).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.memory.config import Memory
from atlas_jax.memory.gates import Gates
from atlas_jax.memory.optimizers import Momentum, Muon
from atlas_jax.memory.state import MemoryState, Pending

_HIGHEST = jax.lax.Precision.HIGHEST


class _Running(NamedTuple):
  """State of one head between two tokens."""

  weights: dict[str, Array]  # at the chunk's start
  momentum: dict[str, Array]
  kept_weights: dict[str, Array]  # what is left of those now
  kept_momentum: dict[str, Array]
  wrote_weights: dict[str, Array]  # what the chunk has written so far
  wrote_momentum: dict[str, Array]
  block_rate: Float[Array, "rows_groups"]  # Muon: write gates of the block
  keys: Float[Array, "columns K"]  # the tail, then the chunk's tokens
  values: Float[Array, "columns V"]
  gates: Gates  # of the chunk's tokens
  written: Float[Array, "columns"]  # write gates so far, per token
  scale: Float[Array, ""]
  seen: Int[Array, ""]
  count: Int[Array, ""]


def recurrent(
  memory: Memory,
  params: dict[str, Any],
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  gates: Gates,
  state: MemoryState,
  valid: Bool[Array, "B T"],
  restart: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T H V"], MemoryState, Float[Array, "B T H"]]:
  """Runs a memory token by token.

  Args:
    memory, params: the memory and its outer parameters.
    query, key, value, gates: inputs in the state's type.
    state: where to start from.
    valid: False marks padding, which changes nothing at all.
    restart: True makes the memory fresh before this token.

  Returns:
    outputs (0 at padding), the state after the last token, and each token's
    inner loss at the weights of its chunk's start.
  """
  features = params["features"]
  shared = {"features": memory.features.prepare(features, key.shape[-1])}
  if "norm" in params:
    shared["norm"] = params["norm"]
  dtype = key.dtype
  shared = jax.tree.map(lambda p: p.astype(dtype), shared)

  def one_head(state, start, query, key, value, gates, valid, restart):
    begin = _begin(memory, state)
    fresh = _begin(memory, _fresh(memory, state, start))

    def token(running, inputs):
      *inputs, is_valid, is_restart = inputs
      running = _choose(is_restart & is_valid, fresh, running)
      after, y, loss = _token(memory, shared, running, *inputs)
      running = _choose(is_valid, after, running)
      return running, (
        jnp.where(is_valid, y, 0.0),
        jnp.where(is_valid, loss, 0.0),
      )

    # The tokens of the unfinished chunk come first, to fill it again.
    slots = memory.chunk - 1
    pending = (
      jnp.zeros((slots, query.shape[-1]), query.dtype),
      *state.pending,
      jnp.arange(slots, dtype=jnp.int32) < state.count,
      jnp.zeros((slots,), bool),
    )
    inputs = jax.tree.map(
      lambda *x: jnp.concatenate(x),
      pending,
      (query, key, value, gates, valid, restart),
    )
    running, (y, loss) = jax.lax.scan(token, begin, inputs)
    y, loss = y[slots:], loss[slots:]
    return y, _end(memory, running), loss

  # Where the heads are in every part of a state.
  one: Any = 1
  places: list[Any] = [0, 0, 1, 1, None, Pending(one, one, one), None, None]
  axes = MemoryState(*places)
  by_head = jax.vmap(
    one_head,
    in_axes=(axes, 0, 1, 1, 1, 1, None, None),
    out_axes=(1, axes, 1),
  )
  by_row = jax.vmap(by_head, in_axes=(0, None, 0, 0, 0, 0, 0, 0))
  start = jax.tree.map(lambda w: w.astype(dtype), params["start"])
  state = state._replace(cache=None)
  return by_row(state, start, query, key, value, gates, valid, restart)


def _token(memory: Memory, shared, run: _Running, query, key, value, gate):
  """One token of one head: write, then (or after) read."""
  window, columns = memory.window, run.keys.shape[0]
  here = window - 1 + run.count
  keys = run.keys.at[here].set(key)
  values = run.values.at[here].set(value)
  gates = jax.tree.map(lambda g, x: g.at[run.count].set(x), run.gates, gate)
  column = jnp.arange(columns, dtype=jnp.int32)
  real = (column >= window - 1 - run.seen) & (column <= here)
  # gamma of the token `age` positions back.
  age = here - column
  in_window = real & (age >= 0) & (age < window)
  gamma = jnp.where(in_window, gate.window[jnp.clip(age, 0, window - 1)], 0.0)

  read_before = _read(memory, shared, _current(run), query)
  gradient, error, loss = _gradients(memory, shared, run.weights, keys, values)
  bound, width = memory.bound, values.shape[-1]
  clip = jnp.ones((columns,), keys.dtype)
  muon = isinstance(memory.optimizer, Muon)
  if bound is not None and bound.error_clip is not None and not muon:
    limit = bound.error_clip * math.sqrt(width)
    clip = limit / jnp.maximum(_length(gradient, 1), limit)
  rate = gate.rate
  written = run.written + rate * gamma
  scale = run.scale
  if bound is not None and bound.budget is not None:
    if memory.objective.curvature and not muon:
      overlap = memory.objective.curvature * _overlap(gradient, error, clip)
      if bound.budget == "full":
        growth = jnp.matmul(written, overlap, precision=_HIGHEST)
        growth = jnp.max(jnp.where(real, growth, 0.0))
        scale = jnp.maximum(scale, jnp.maximum(1.0, growth))
      else:
        own = jnp.diagonal(overlap)
        scale = jnp.maximum(1.0, jnp.sum(written * own))

  step = jax.tree.map(
    lambda g: jnp.einsum("t,tnd->nd", gamma * clip, g, precision=_HIGHEST),
    gradient,
  )
  keep = jnp.exp(gate.log_momentum)
  decay = jnp.exp(gate.log_decay)
  if not memory.retention.groups:
    decay = jnp.ones((1,), keys.dtype)

  def decayed(w: Array) -> Array:
    return jnp.repeat(decay, w.shape[0] // decay.shape[0])[:, None] * w

  kept_s, wrote_s = run.kept_momentum, run.wrote_momentum
  kept_w = {n: decayed(w) for n, w in run.kept_weights.items()}
  wrote_w = {n: decayed(w) for n, w in run.wrote_weights.items()}
  block_rate = decay * run.block_rate + rate
  if isinstance(memory.optimizer, Momentum):
    if bound is not None and bound.damp_momentum:
      rate = rate * (1.0 - keep)
    kept_s = {n: keep * s for n, s in kept_s.items()}
    wrote_s = {n: keep * wrote_s[n] + rate * step[n] for n in step}
    kept_w = {n: kept_w[n] - kept_s[n] for n in kept_w}
    wrote_w = {n: wrote_w[n] + wrote_s[n] for n in wrote_w}
  elif muon:
    kept_s = {n: keep * s for n, s in kept_s.items()}
    wrote_s = {n: keep * wrote_s[n] + step[n] for n in step}
    at_end = (run.count + 1) % memory.muon.every == 0
    for name in wrote_w:
      s = kept_s[name] + wrote_s[name]
      rows = jnp.repeat(block_rate, s.shape[0] // block_rate.shape[0])
      moved = wrote_w[name] + rows[:, None] * _newton_schulz(s, memory.muon)
      wrote_w[name] = jnp.where(at_end, moved, wrote_w[name])
    block_rate = jnp.where(at_end, 0.0, block_rate)
  else:
    wrote_w = {n: wrote_w[n] + rate * step[n] for n in wrote_w}

  run = run._replace(
    kept_weights=kept_w,
    kept_momentum=kept_s,
    wrote_weights=wrote_w,
    wrote_momentum=wrote_s,
    block_rate=block_rate,
    keys=keys,
    values=values,
    gates=gates,
    written=written,
    scale=scale,
    count=run.count + 1,
  )
  run = _choose(run.count == memory.chunk, _next_chunk(memory, run), run)
  if memory.read == "before":
    y = read_before
  else:
    y = _read(memory, shared, _current(run), query)
  return run, y, loss[here]


def _current(run: _Running) -> dict[str, Array]:
  """The weights now: what is left of the start, less what was written."""
  return {
    name: run.kept_weights[name] - run.wrote_weights[name] / run.scale
    for name in run.weights
  }


def _read(memory: Memory, shared, weights, x: Float[Array, "K"]):
  table = memory.entries(x.shape[-1], _value_width(memory, weights))

  def linear(name: str, x: Array) -> Array:
    features = table[name].lift.map(x, shared["features"])
    return jnp.matmul(features, weights[name].T, precision=_HIGHEST)

  y = memory.network.apply(linear, x[None], memory.features, shared)
  return y[0]


def _value_width(memory: Memory, weights) -> int:
  return weights["matrix" if "matrix" in weights else "out"].shape[0]


def _gradients(memory: Memory, shared, weights, keys, values):
  """Gradient of every column's objective, its output error and its value."""

  def loss(weights, key, value):
    return memory.objective(_read(memory, shared, weights, key), value)

  def error(key, value):
    y = _read(memory, shared, weights, key)
    return jax.grad(memory.objective)(y, value)

  gradient = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(
    weights, keys, values
  )
  return (
    gradient,
    jax.vmap(error)(keys, values),
    jax.vmap(loss, in_axes=(None, 0, 0))(weights, keys, values),
  )


def _length(tree, leading: int):
  """Norm over all but the `leading` axes of all leaves, differentiable at 0."""
  leaves = [x.reshape(*x.shape[:leading], -1) for x in jax.tree.leaves(tree)]
  flat = jnp.concatenate(leaves, -1)
  top = jnp.max(jnp.abs(flat), axis=-1, keepdims=True)
  top = jax.lax.stop_gradient(jnp.maximum(top, 1e-12))
  square = jnp.sum(jnp.square(flat / top), axis=-1)
  return top[..., 0] * jnp.sqrt(square + 1e-12)


def _overlap(gradient, error, clip) -> Float[Array, "columns columns"]:
  """Overlap of every two columns' writes, from their gradients alone.

  A gradient is u x^T, so |g_i g_j^T| = |u_i| |u_j| |x_i . x_j|.
  """
  total = jnp.zeros((), error.dtype)
  for g in gradient.values():
    pair = jnp.einsum("iad,jbd->ijab", g, g, precision=_HIGHEST)
    total = total + _length(pair, 2)
  error = jnp.sqrt(jnp.square(_length(error, 1)) + 1e-8)
  weight = jnp.sqrt(clip) / error
  return weight[:, None] * weight[None, :] * total


def _newton_schulz(s: Array, muon: Muon) -> Array:
  """s / sqrt(|s|^2 + epsilon^2), orthogonalised on its short side."""
  top = jnp.max(jnp.abs(s))
  top = jax.lax.stop_gradient(jnp.maximum(top, muon.epsilon))
  square = jnp.sum(jnp.square(s / top)) + jnp.square(muon.epsilon / top)
  x = s / top / jnp.sqrt(square)
  tall = x.shape[0] > x.shape[1]
  x = x.T if tall else x
  operand = muon.dtype or x.dtype

  def product(a, b):
    a, b = a.astype(operand), b.astype(operand)
    return jnp.matmul(a, b, precision=_HIGHEST, preferred_element_type=s.dtype)

  for i in range(muon.steps):
    a, b, c = muon.coefficients[min(i, len(muon.coefficients) - 1)]
    gram = product(x, x.T)
    x = a * x + product(b * gram + c * product(gram, gram), x)
  return x.T if tall else x


def _next_chunk(memory: Memory, run: _Running) -> _Running:
  """What a full chunk hands to the next one."""
  weights = _current(run)
  momentum = {
    name: s + run.wrote_momentum[name] / run.scale
    for name, s in run.kept_momentum.items()
  }
  bound = memory.bound
  if bound is not None and bound.weight_cap is not None:

    def cap(w: Array, limit: float) -> Array:
      return w * (limit / jnp.maximum(_length(w, 0), limit))

    weights = {
      n: cap(w, bound.weight_cap * math.sqrt(min(w.shape)))
      for n, w in weights.items()
    }
    if bound.error_clip is not None:
      limit = bound.error_clip * math.sqrt(run.values.shape[-1])
      momentum = {n: cap(s, limit) for n, s in momentum.items()}
  tail = memory.window - 1
  return _start_chunk(
    memory,
    weights,
    momentum,
    run.keys[memory.chunk :],
    run.values[memory.chunk :],
    jax.tree.map(jnp.zeros_like, run.gates),
    jnp.minimum(run.seen + memory.chunk, tail).astype(run.seen.dtype),
  )


def _start_chunk(memory, weights, momentum, tail_key, tail_value, gates, seen):
  pad = ((0, memory.chunk), (0, 0))
  dtype = tail_key.dtype
  columns = memory.window - 1 + memory.chunk
  return _Running(
    weights=weights,
    momentum=momentum,
    kept_weights=weights,
    kept_momentum=momentum,
    wrote_weights=jax.tree.map(jnp.zeros_like, weights),
    wrote_momentum=jax.tree.map(jnp.zeros_like, momentum),
    block_rate=jnp.zeros((max(1, memory.retention.groups),), dtype),
    keys=jnp.pad(tail_key, pad),
    values=jnp.pad(tail_value, pad),
    gates=gates,
    written=jnp.zeros((columns,), dtype),
    scale=jnp.ones((), dtype),
    seen=seen,
    count=jnp.zeros((), jnp.int32),
  )


def _begin(memory: Memory, state: MemoryState) -> _Running:
  """The running state of one head at the start of its unfinished chunk."""
  gates = jax.tree.map(
    lambda g: jnp.zeros((memory.chunk, *g.shape[1:]), g.dtype),
    state.pending.gates,
  )
  return _start_chunk(
    memory,
    state.weights,
    state.momentum,
    state.tail_key,
    state.tail_value,
    gates,
    state.seen,
  )


def _fresh(memory: Memory, state: MemoryState, start) -> MemoryState:
  return jax.tree.map(jnp.zeros_like, state)._replace(weights=start)


def _end(memory: Memory, run: _Running) -> MemoryState:
  """The canonical state: chunk-start weights and the tokens since."""
  tail, slots = memory.window - 1, memory.chunk - 1
  filled = jnp.arange(slots, dtype=jnp.int32) < run.count

  def masked(x: Array) -> Array:
    return jnp.where(filled.reshape(-1, *[1] * (x.ndim - 1)), x[:slots], 0.0)

  return MemoryState(
    run.weights,
    run.momentum,
    run.keys[:tail],
    run.values[:tail],
    run.seen,
    Pending(
      masked(run.keys[tail:]),
      masked(run.values[tail:]),
      jax.tree.map(masked, run.gates),
    ),
    run.count,
  )


def _choose(condition, yes, no):
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
