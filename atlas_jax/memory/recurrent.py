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
from atlas_jax.memory.optimizers import ChunkMuon, Momentum, Muon
from atlas_jax.memory.recurrent_parts import (
  gradients,
  handed_on,
  length,
  newton_schulz,
  overlap,
  read,
  stands_for,
)
from atlas_jax.memory.state import MemoryState, Pending

_HIGHEST = jax.lax.Precision.HIGHEST


class _Running(NamedTuple):
  """State of one head between two tokens."""

  weights: dict[str, Array]  # at the chunk's start, as they are stored
  momentum: dict[str, Array]
  frozen: dict[str, Array]  # the weights that gradients are taken at
  visible: dict[str, Array]  # how much of a change of stored ones is seen
  kept_weights: dict[str, Array]  # what is left of the stored ones now
  kept_frozen: dict[str, Array]  # and of the others
  kept_momentum: dict[str, Array]
  wrote_weights: dict[str, Array]  # what the chunk has written so far
  wrote_momentum: dict[str, Array]
  kept_sum: Float[Array, ""]  # ChunkMuon: momentum gates so far
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
  if "position" in params:
    shared["position"] = params["position"]
  dtype = key.dtype
  to_state = lambda p: p.astype(dtype)
  shared = jax.tree.map(to_state, shared)
  norm = jax.tree.map(to_state, params.get("norm", {}))

  def one_head(state, start, norm, query, key, value, gates, valid, restart):
    # Beside what all heads share, a head has a layer norm and a start.
    own = {**shared, "norm": norm, "start": start}
    begin = _begin(memory, state)
    fresh = _begin(memory, _fresh(memory, state, start))

    def token(running, inputs):
      *inputs, is_valid, is_restart = inputs
      running = _choose(is_restart & is_valid, fresh, running)
      after, y, loss = _token(memory, own, running, *inputs)
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
    in_axes=(axes, 0, 0, 1, 1, 1, 1, None, None),
    out_axes=(1, axes, 1),
  )
  by_row = jax.vmap(by_head, in_axes=(0, None, None, 0, 0, 0, 0, 0, 0))
  start = jax.tree.map(lambda w: w.astype(dtype), params["start"])
  state = state._replace(cache=None)
  return by_row(state, start, norm, query, key, value, gates, valid, restart)


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

  read_before = read(memory, shared, _visible(memory, shared, run), query)
  thresholds = jnp.zeros((columns,), keys.dtype)
  if gates.threshold is not None:
    thresholds = gates.threshold
  gradient, error, loss, curvature = gradients(
    memory, shared, run.frozen, keys, values, thresholds
  )
  bound, width = memory.bound, values.shape[-1]
  clip = jnp.ones((columns,), keys.dtype)
  muon = isinstance(memory.optimizer, (Muon, ChunkMuon))
  if bound is not None and bound.error_clip is not None and not muon:
    limit = bound.error_clip * math.sqrt(width)
    clip = limit / jnp.maximum(length(gradient, 1), limit)
  rate = gate.rate
  written = run.written + rate * gamma
  scale = run.scale
  if bound is not None and bound.budget is not None:
    if memory.objective.curved and not muon:
      pairs = overlap(gradient, error, clip * curvature, run.visible)
      if bound.budget == "full":
        growth = jnp.matmul(written, pairs, precision=_HIGHEST)
        growth = jnp.max(jnp.where(real, growth, 0.0))
      else:
        growth = jnp.sum(written * jnp.diagonal(pairs))
      position = _position(memory, shared, run.count + 1)
      scale = jnp.maximum(1.0, position * growth)

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
  kept_f = {n: decayed(w) for n, w in run.kept_frozen.items()}
  wrote_w = {n: decayed(w) for n, w in run.wrote_weights.items()}
  block_rate = decay * run.block_rate + rate
  if isinstance(memory.optimizer, Momentum):
    if bound is not None and bound.damp_momentum:
      rate = rate * (1.0 - keep)
    kept_s = {n: keep * s for n, s in kept_s.items()}
    wrote_s = {n: keep * wrote_s[n] + rate * step[n] for n in step}
    kept_w = {n: kept_w[n] - kept_s[n] for n in kept_w}
    kept_f = {n: kept_f[n] - run.visible[n] * kept_s[n] for n in kept_f}
    wrote_w = {n: wrote_w[n] + wrote_s[n] for n in wrote_w}
  elif isinstance(memory.optimizer, ChunkMuon):
    table = memory.entries(keys.shape[-1], width)
    rates = dict(zip(table, rate * gate.matrix_rate, strict=True))
    wrote_s = {n: wrote_s[n] + rates[n] * step[n] for n in wrote_s}
  elif isinstance(memory.optimizer, Muon):
    kept_s = {n: keep * s for n, s in kept_s.items()}
    wrote_s = {n: keep * wrote_s[n] + step[n] for n in step}
    at_end = (run.count + 1) % memory.muon.every == 0
    for name in wrote_w:
      s = kept_s[name] + wrote_s[name]
      rows = jnp.repeat(block_rate, s.shape[0] // block_rate.shape[0])
      moved = wrote_w[name] + rows[:, None] * newton_schulz(s, memory.muon)
      wrote_w[name] = jnp.where(at_end, moved, wrote_w[name])
    block_rate = jnp.where(at_end, 0.0, block_rate)
  else:
    wrote_w = {n: wrote_w[n] + rate * step[n] for n in wrote_w}

  run = run._replace(
    kept_weights=kept_w,
    kept_frozen=kept_f,
    kept_momentum=kept_s,
    wrote_weights=wrote_w,
    wrote_momentum=wrote_s,
    kept_sum=run.kept_sum + keep,
    block_rate=block_rate,
    keys=keys,
    values=values,
    gates=gates,
    written=written,
    scale=scale,
    count=run.count + 1,
  )
  read_start = read(memory, shared, run.frozen, query)
  run = _choose(
    run.count == memory.chunk, _next_chunk(memory, shared, run), run
  )
  if memory.read == "start":
    y = read_start
  elif memory.read == "before":
    y = read_before
  else:
    y = read(memory, shared, _visible(memory, shared, run), query)
  return run, y, loss[here]


def _position(memory: Memory, shared, count) -> Array | float:
  """Factor on what a chunk has written up to its `count`-th token."""
  if not memory.rate_by_position:
    return 1.0
  # Before the first token nothing is written, whatever the factor.
  learned = shared["position"]
  count = jnp.maximum(count, 1)
  return jnp.maximum(1 / count.astype(learned.dtype) + learned[count - 1], 0)


def _share(memory: Memory, shared, run: _Running) -> Array:
  """What the chunk's own writes are multiplied by."""
  return _position(memory, shared, run.count) / run.scale


def _current(memory: Memory, shared, run: _Running) -> dict[str, Array]:
  """What is stored now: what is left of the start, less what was written."""
  share = _share(memory, shared, run)
  return {
    name: run.kept_weights[name] - share * run.wrote_weights[name]
    for name in run.weights
  }


def _visible(memory: Memory, shared, run: _Running) -> dict[str, Array]:
  """The weights to read: those of the chunk's start, less what was written."""
  share = _share(memory, shared, run)
  return {
    name: run.kept_frozen[name]
    - run.visible[name] * share * run.wrote_weights[name]
    for name in run.weights
  }


def _next_chunk(memory: Memory, shared, run: _Running) -> _Running:
  """What a full chunk hands to the next one."""
  weights = _current(memory, shared, run)
  share = _share(memory, shared, run)
  momentum = {
    name: s + share * run.wrote_momentum[name]
    for name, s in run.kept_momentum.items()
  }
  if isinstance(memory.optimizer, ChunkMuon):
    mean = run.kept_sum / memory.chunk
    momentum = {
      n: mean * run.momentum[n] + run.wrote_momentum[n] for n in run.momentum
    }
    weights = {
      n: w - newton_schulz(momentum[n], memory.optimizer)
      for n, w in weights.items()
    }
  weights, momentum = handed_on(
    memory, shared["start"], weights, momentum, run.values.shape[-1]
  )
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
  frozen, visible = {}, {}
  for name, w in weights.items():
    frozen[name], visible[name] = stands_for(memory, w)
  return _Running(
    weights=weights,
    momentum=momentum,
    frozen=frozen,
    visible=visible,
    kept_weights=weights,
    kept_frozen=frozen,
    kept_momentum=momentum,
    wrote_weights=jax.tree.map(jnp.zeros_like, weights),
    wrote_momentum=jax.tree.map(jnp.zeros_like, momentum),
    kept_sum=jnp.zeros((), dtype),
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
