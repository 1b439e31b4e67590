"""Chunks of tokens: what every chunk-parallel recurrence here has in common.

A recurrence is written for one chunk of one row (a head of a sequence). This
module cuts the sequence into chunks, runs the rows side by side, carries the
state from chunk to chunk and says where documents begin and padding lies.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import dispatch, state_dtype
from atlas_jax.memory.gates import LOWEST_LOG

Carry = TypeVar("Carry")

# Chunks that are prepared together. More are hardly faster and take more room.
SIDE_BY_SIDE = 8


def without_padding(
  x: Float[Array, "B T ..."], valid: Bool[Array, "B T"] | None
) -> Float[Array, "B T ..."]:
  """x with 0 at padding, whatever stood there; its gradient there is 0."""
  if valid is None:
    return x
  kept = valid.reshape(*valid.shape, *[1] * (x.ndim - 2))
  return jnp.where(kept, x, jnp.zeros((), x.dtype))


def marked_decay(
  log_decay: Float[Array, "B T ..."],
  restart: Bool[Array, "B T"] | None,
  valid: Bool[Array, "B T"] | None,
) -> Float[Array, "B T ..."]:
  """Decays that also say where documents begin and where padding lies.

  The token that begins a document forgets everything before it; padding keeps
  all. Adding up chunks of the result never reaches -inf: log 0, given as -inf
  as well, becomes `LOWEST_LOG`, whose exponential is exactly 0.

  Args:
    log_decay: Logs of decays, <= 0.
    restart: Tokens that begin a document; None: none does.
    valid: False marks padding; None: there is none.

  Returns:
    The logs, at least float32.
  """
  log_decay = log_decay.astype(state_dtype(log_decay.dtype))
  lowest = jnp.asarray(LOWEST_LOG, log_decay.dtype)
  if restart is not None:
    begins = restart.reshape(*restart.shape, *[1] * (log_decay.ndim - 2))
    log_decay = jnp.where(begins, lowest, log_decay)
  return without_padding(jnp.maximum(log_decay, lowest), valid)


def scan_chunks(
  body: Callable[[Carry, Any], tuple[Carry, Any]],
  carry: Carry,
  tokens: Any,
  chunk: int,
  *,
  prepare: Callable[[Any], Any],
) -> tuple[Carry, Any]:
  """Runs a chunk of one row after the other, all rows in parallel.

  What a chunk can work out without the state, `prepare` does for several chunks
  side by side, so that few and small products are left to wait for each other.
  Chunks are recomputed in the backward pass: what is stored for it is one carry
  per `SIDE_BY_SIDE` chunks, and the inputs. What needs no loop has none. On a
  CPU rows go in groups, see `dispatch.rows_at_once`.

  Args:
    body: Takes the carry of one row and one prepared chunk to the carry after
      it and an output, leaves [C, ...]. C is `chunk`, or T where the sequence
      is shorter.
    carry: The state before the first token, leaves [B, H, ...].
    tokens: Leaves [B, T, H, ...], T at least 1.
    chunk: Largest number of tokens in a chunk.
    prepare: Takes the tokens of one chunk of one row, leaves [C, ...], to what
      `body` wants. Tokens of zeros, which fill up the last chunks, must leave
      the carry as it is.

  Returns:
    The state after the last token, and outputs [B, T, H, ...].
  """
  batch, length, heads = jax.tree.leaves(tokens)[0].shape[:3]
  size = min(chunk, length)
  spans = -(-length // (size * SIDE_BY_SIDE))
  count = -(-length // (size * spans))
  padded = spans * count * size
  rows = batch * heads
  leaves = jax.tree.leaves(carry)
  row_bytes = sum(x.size * x.dtype.itemsize for x in leaves) // rows
  group = dispatch.rows_at_once(rows, row_bytes)

  def cut(x: Float[Array, "B T H ..."]) -> Float[Array, "S N R C ..."]:
    fill = [(0, 0)] * x.ndim
    fill[1] = (0, padded - length)
    x = jnp.pad(x, fill).reshape(batch, spans, count, size, *x.shape[2:])
    x = jnp.moveaxis(x, (1, 2, 4), (0, 1, 3))
    return x.reshape(spans, count, rows, size, *x.shape[5:])

  def joined(x: Float[Array, "S N R C ..."]) -> Float[Array, "B T H ..."]:
    x = x.reshape(spans, count, batch, heads, size, *x.shape[4:])
    x = jnp.moveaxis(x, (0, 1, 3), (1, 2, 4))
    return x.reshape(batch, padded, heads, *x.shape[5:])[:, :length]

  # One axis of rows, not two: XLA's kernels for CPUs take few axes.
  in_rows = jax.vmap(body)
  prepare_all = jax.vmap(jax.vmap(prepare))

  @jax.checkpoint
  def run_span(carry: Carry, chunks: Any) -> tuple[Carry, Any]:
    return _scan(in_rows, carry, prepare_all(chunks), count)

  def run(carry: Carry, chunks: Any) -> tuple[Carry, Any]:
    return _scan(run_span, carry, chunks, spans)

  def grouped(x: Array, axis: int) -> Array:
    shape = (*x.shape[:axis], rows // group, group, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  def ungrouped(x: Array, axis: int) -> Array:
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], rows, *x.shape[axis + 2 :])

  chunks = jax.tree.map(cut, tokens)
  state = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), carry)
  if group == rows:
    state, out = run(state, chunks)
  else:
    inputs = (
      jax.tree.map(lambda x: grouped(x, 0), state),
      jax.tree.map(lambda x: grouped(x, 2), chunks),
    )
    state, out = jax.lax.map(lambda pair: run(*pair), inputs)
    state = jax.tree.map(lambda x: ungrouped(x, 0), state)
    out = jax.tree.map(lambda x: ungrouped(x, 2), out)
  after = jax.tree.map(lambda x, old: x.reshape(old.shape), state, carry)
  return after, jax.tree.map(joined, out)


def _scan(
  body: Callable[[Carry, Any], tuple[Carry, Any]],
  carry: Carry,
  inputs: Any,
  count: int,
) -> tuple[Carry, Any]:
  """`jax.lax.scan`, without a loop where `count` is 1."""
  if count > 1:
    return jax.lax.scan(body, carry, inputs)
  carry, out = body(carry, jax.tree.map(lambda x: x[0], inputs))
  return carry, jax.tree.map(lambda x: x[None], out)


def check_shapes(
  shapes: dict[str, tuple[Array | None, tuple[int, ...]]],
) -> None:
  """Refuses arrays of the wrong shape.

  Args:
    shapes: By the name of an argument its array, None where it was left out,
      and the shape that it must have.

  Raises:
    UserError: names the first one that differs.
  """
  for name, (array, shape) in shapes.items():
    if array is not None and array.shape != shape:
      raise UserError(f"{name} is {array.shape} but must be {shape}")


def check_chunk(chunk: int) -> None:
  """Refuses chunks without tokens.

  Raises:
    UserError: says how many there must be.
  """
  if chunk < 1:
    raise UserError(f"chunk {chunk}: use 1 or more tokens")
