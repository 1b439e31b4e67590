"""The memory as an operation on sequences: any length, any split, any padding.

`apply` reads any number of tokens and returns outputs and a state from which
later tokens go on. A call on T tokens and calls on its pieces give the same
numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.errors import UserError
from atlas_jax.memory import dispatch
from atlas_jax.memory import layout as layouts
from atlas_jax.memory.config import Memory, state_dtype
from atlas_jax.memory.factors import (
  Carry,
  Tokens,
  prepare,
  prepare_heads,
)
from atlas_jax.memory.gates import Gates
from atlas_jax.memory.recurrent import recurrent
from atlas_jax.memory.scan import scan_chunks
from atlas_jax.memory.state import (
  MemoryState,
  Pending,
  check_state,
  init_state,
  norm,
)


class Output(NamedTuple):
  """What a memory gives for its inputs.

  Attributes:
    y: read-outs, in the type of `value`; 0 at masked places.
    state: the state after the last token; None with `aligned`.
    inner_loss: each token's objective at the weights of its chunk's start,
      which is how much it surprised the memory; 0 at masked places.
    weight_norm: Frobenius norm of each head's weights at the last chunk border.
  """

  y: Float[Array, "B T H V"]
  state: MemoryState | None
  inner_loss: Float[Array, "B T H"]
  weight_norm: Float[Array, "B H"]


def apply(
  memory: Memory,
  params: dict[str, Any],
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  gates: Gates,
  state: MemoryState | None = None,
  *,
  mask: Bool[Array, "B T"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  max_segments: int | None = None,
  aligned: bool = False,
  layout: layouts.Layout | None = None,
  implementation: str = "auto",
  form: str = "dual",
) -> Output:
  """Writes and reads a memory over a sequence.

  Args:
    memory: the memory's value.
    params: outer parameters (`init_params`).
    query, key, value: per-head vectors of any floating-point type. The carry,
      the gates and all sums are at least float32.
    gates: decays, momentum, rates and window weights of every token.
    state: where to go on; None is a fresh memory.
    mask: False marks padding anywhere. It writes nothing, decays nothing,
      moves no window; its inputs may hold anything.
    segment_ids: documents of a row, 0 for padding. Each further document has
      a memory of its own; the first goes on with `state`.
    max_segments: largest number of documents in a row; needed inside jit,
      where a row that holds more has NaN as its outputs.
    aligned: promises that documents start at multiples of the chunk (checked
      outside jit only). No state is given or returned then.
    layout: a layout computed once for many layers, for inputs that are already
      compact; `mask` and `segment_ids` must then be absent.
    implementation: "auto", "reference" (token by token) or "xla".
    form: inside a chunk "dual", or "associative" (same numbers).

  Returns:
    read-outs, state, inner losses and the norm of the weights.

  Raises:
    UserError: shapes that do not fit, contradictory arguments, or an
      implementation that does not exist.
  """
  check_inputs(memory, params, query, key, value, gates)
  if form not in dispatch.FORMS:
    raise UserError(f"form {form!r}: use one of {', '.join(dispatch.FORMS)}")
  for name, given in (("mask", mask), ("segment_ids", segment_ids)):
    if given is not None and jnp.shape(given) != key.shape[:2]:
      raise UserError(
        f"{name} is {jnp.shape(given)} but must be {key.shape[:2]}"
      )
  implementation = dispatch.resolve(implementation)
  batch, length = key.shape[:2]
  if layout is not None and (
    mask is not None or segment_ids is not None or aligned
  ):
    raise UserError("a layout already holds mask and documents: give it alone")
  if aligned:
    if state is not None:
      raise UserError("aligned documents start fresh: give no state")
    if segment_ids is None:
      raise UserError("aligned documents need segment_ids")
    if mask is not None:
      raise UserError(
        "aligned documents mark padding by segment 0: give no mask"
      )
    layouts.check_aligned(segment_ids, memory.chunk)
  dtype = state_dtype(value.dtype)
  if state is None and not aligned:
    state_in = init_state(
      memory, params, batch, key_width=key.shape[-1], dtype=dtype
    )
  else:
    state_in = state
  if state is not None:
    check_state(memory, params, state, batch, key.shape[-1])
    dtype = state.tail_key.dtype
  mask = layouts.valid_mask(mask, segment_ids)
  tokens = Tokens(query, key, value, gates)
  tokens = jax.tree.map(lambda x: x.astype(dtype), tokens)
  if mask is not None:
    # First of all, so that garbage in padding reaches neither value nor slope.
    tokens = jax.tree.map(lambda x: _masked(mask, x), tokens)

  if implementation == "reference":
    y, state, loss = _reference(
      memory, params, tokens, state_in, mask, segment_ids, layout
    )
    weights = state.weights
  elif aligned:
    y, weights, loss = _aligned(
      memory, params, tokens, segment_ids, form, dtype
    )
  else:
    compaction = None
    if mask is not None:
      compaction = layouts.compact(mask)
      tokens = jax.tree.map(compaction.gather, tokens)
      if segment_ids is not None:
        segment_ids = compaction.gather(segment_ids)
    if layout is None and (state is not None or compaction is not None):
      layout = layouts.plan(
        length,
        memory.chunk,
        batch,
        count=None if state is None else state.count,
        lengths=None if compaction is None else compaction.lengths,
        segment_ids=segment_ids,
        max_segments=max_segments,
      )
    y, state, loss = _chunked(memory, params, tokens, state_in, layout, form)
    if compaction is not None:
      y, loss = compaction.scatter(y), compaction.scatter(loss)
    weights = state.weights
  if mask is not None:
    y, loss = _masked(mask, y), _masked(mask, loss)
  if layout is not None and layout.fits is not None:
    # Too many documents, found inside jit: no number rather than a wrong one.
    y = jnp.where(layout.fits[:, None, None, None], y, jnp.nan)
  return Output(
    y.astype(value.dtype), None if aligned else state, loss, norm(weights)
  )


def _chunked(memory: Memory, params, tokens: Tokens, state, layout, form):
  """Compact tokens through whole chunks, with the state before and after."""
  batch, length = tokens.key.shape[:2]
  chunk = memory.chunk
  if layout is None:
    slots = -(-length // chunk) * chunk
    pad = lambda x: jnp.pad(
      x, ((0, 0), (0, slots - length), *[(0, 0)] * (x.ndim - 2))
    )
    placed = jax.tree.map(pad, tokens)
    commit = None
    if slots != length:
      commit = (
        jnp.arange(1, slots // chunk + 1, dtype=jnp.int32) * chunk <= length
      )
      commit = jnp.broadcast_to(commit, (batch, slots // chunk))
    restart = None
  else:
    pending = state.pending
    pending = Tokens(jnp.zeros_like(pending.key), *pending)
    placed = jax.tree.map(
      lambda p, x: layouts.to_slots(layout, p, x), pending, tokens
    )
    commit, restart = layout.commit, layout.restart
  carry = Carry(
    state.weights,
    state.momentum,
    state.tail_key.swapaxes(1, 2),
    state.tail_value.swapaxes(1, 2),
    state.seen,
  )
  chunks = placed.key.shape[1] // chunk
  by_chunk = lambda x: x.reshape(batch, chunks, chunk, *x.shape[2:])
  carry, (y, loss) = _scan(
    memory,
    params,
    carry,
    jax.tree.map(by_chunk, placed),
    restart=restart,
    commit=commit,
    form=form,
  )
  flat = lambda x: x.reshape(batch, -1, *x.shape[3:])
  y, loss = flat(y), flat(loss)
  rest = Pending(placed.key, placed.value, placed.gates)
  if layout is None:
    y, loss = y[:, :length], loss[:, :length]
    left = length // chunk * chunk
    count = jnp.full((batch,), length - left, jnp.int32)
    grow = chunk - 1 - (length - left)
    rest = jax.tree.map(
      lambda x: jnp.pad(
        x[:, left:length], ((0, 0), (0, grow), *[(0, 0)] * (x.ndim - 2))
      ),
      rest,
    )
  else:
    y = layouts.from_slots(layout, y)
    loss = layouts.from_slots(layout, loss)
    rest = jax.tree.map(lambda x: layouts.left_over(layout, x), rest)
    count = layout.count
  state = MemoryState(
    carry.weights,
    carry.momentum,
    carry.tail_key.swapaxes(1, 2),
    carry.tail_value.swapaxes(1, 2),
    carry.seen,
    rest,
    count,
  )
  return y, state, loss


def _aligned(memory: Memory, params, tokens: Tokens, segment_ids, form, dtype):
  """Documents that start at chunk borders: no slots to move, no state."""
  batch, length = tokens.key.shape[:2]
  chunk = memory.chunk
  slots = -(-length // chunk) * chunk
  grow = lambda x: jnp.pad(
    x, ((0, 0), (0, slots - length), *[(0, 0)] * (x.ndim - 2))
  ).reshape(batch, slots // chunk, chunk, *x.shape[2:])
  state = init_state(
    memory, params, batch, key_width=tokens.key.shape[-1], dtype=dtype
  )
  carry = Carry(
    state.weights,
    state.momentum,
    state.tail_key.swapaxes(1, 2),
    state.tail_value.swapaxes(1, 2),
    state.seen,
  )
  carry, (y, loss) = _scan(
    memory,
    params,
    carry,
    jax.tree.map(grow, tokens),
    restart=layouts.aligned_restarts(segment_ids, chunk),
    commit=None,
    form=form,
  )
  flat = lambda x: x.reshape(batch, -1, *x.shape[3:])[:, :length]
  return flat(y), carry.weights, flat(loss)


def _scan(memory: Memory, params, carry: Carry, tokens: Tokens, **options):
  dtype = tokens.key.dtype
  start = jax.tree.map(lambda w: w.astype(dtype), params["start"])
  shared = prepare(memory, params, tokens.key.shape[-1], dtype)
  rows = tokens.key.shape[0] * tokens.key.shape[3]
  state_size = memory.state_size(tokens.key.shape[-1], tokens.value.shape[-1])
  row_bytes = state_size * dtype.itemsize
  return scan_chunks(
    memory,
    shared,
    prepare_heads(memory, params, dtype),
    start,
    carry,
    tokens,
    rows_at_once=dispatch.rows_at_once(rows, row_bytes),
    **options,
  )


def _reference(
  memory, params, tokens, state, mask, segment_ids, layout
) -> tuple[Array, MemoryState, Array]:
  """Token by token, with padding and documents as flags."""
  batch, length = tokens.key.shape[:2]
  if layout is not None:
    index = jnp.arange(length, dtype=jnp.int32)[None]
    valid = index < layout.lengths[:, None]
    restart = valid & (layout.history == 0)
    restart &= index > 0
  else:
    valid = jnp.ones((batch, length), bool) if mask is None else mask
    restart = jnp.zeros((batch, length), bool)
    if segment_ids is not None:
      compaction = layouts.compact(valid)
      ids = compaction.gather(segment_ids)
      restart = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
      restart = compaction.scatter(restart)
  if state is None:
    state = init_state(
      memory,
      params,
      batch,
      key_width=tokens.key.shape[-1],
      dtype=tokens.key.dtype,
    )
  return recurrent(
    memory, params, *tokens, state=state, valid=valid, restart=restart
  )


def _masked(mask: Bool[Array, "B T"], x: Array) -> Array:
  flag = mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
  return jnp.where(flag, x, jnp.zeros((), x.dtype))


def check_inputs(
  memory: Memory, params, query, key, value, gates: Gates
) -> None:
  """Refuses inputs [B, T, ...] that fit neither each other nor the memory.

  Raises:
    UserError: names the first that does not fit.
  """
  if key.ndim != 4 or query.shape != key.shape:
    raise UserError(
      f"query {query.shape} and key {key.shape} must both be [B, T, H, K]"
    )
  if value.ndim != 4 or value.shape[:3] != key.shape[:3]:
    raise UserError(
      f"value {value.shape} must be [B, T, H, V] like key {key.shape}"
    )
  if key.shape[0] < 1 or key.shape[1] < 1:
    raise UserError("a memory needs one row and one token or more")
  for name, x in {"query": query, "key": key, "value": value}.items():
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise UserError(f"{name} is {x.dtype}: give floating-point numbers")
  table = memory.entries(key.shape[-1], value.shape[-1])
  heads = key.shape[2]
  for name, entry in table.items():
    have = params["start"][name].shape if name in params["start"] else None
    if have != (heads, *entry.shape):
      raise UserError(
        f"start weights {name!r} are {have}, but {heads} heads of this memory "
        f"need {(heads, *entry.shape)}: make them with init_params"
      )
  leading = key.shape[:3]
  expected = {
    "log_decay": (*leading, memory.retention.groups),
    "log_momentum": leading,
    "rate": leading,
    "window": (*leading, memory.window),
    "threshold": leading if memory.objective.gated else None,
    "matrix_rate": (*leading, len(table)) if memory.steps_once else None,
  }
  for name, shape in expected.items():
    gate = getattr(gates, name)
    have = None if gate is None else gate.shape
    if have != shape:
      raise UserError(f"gate {name} is {have} but must be {shape}")
