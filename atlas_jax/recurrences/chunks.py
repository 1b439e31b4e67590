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
) -> tuple[Carry, Any]:
  """Runs a chunk of one row after the other, all rows in parallel.

  Chunks are recomputed in the backward pass: what is stored for it is one carry
  per chunk, and the inputs. A sequence of one chunk has no loop around it. On a
  CPU rows go in groups, see `dispatch.rows_at_once`.

  Args:
    body: Takes the carry of one row and the tokens of one chunk, leaves
      [C, ...], to the carry after them and an output, leaves [C, ...]. C is
      `chunk`, or T where the sequence is shorter. Tokens of zeros, which fill
      up the last chunk, must leave the carry as it is.
    carry: The state before the first token, leaves [B, H, ...].
    tokens: Leaves [B, T, H, ...], T at least 1.
    chunk: Largest number of tokens in a chunk.

  Returns:
    The state after the last token, and outputs [B, T, H, ...].
  """
  batch, length, heads = jax.tree.leaves(tokens)[0].shape[:3]
  size = min(chunk, length)
  count = -(-length // size)
  rows = batch * heads
  leaves = jax.tree.leaves(carry)
  row_bytes = sum(x.size * x.dtype.itemsize for x in leaves) // rows
  group = dispatch.rows_at_once(rows, row_bytes)

  def cut(x: Float[Array, "B T H ..."]) -> Float[Array, "N B H C ..."]:
    fill = [(0, 0)] * x.ndim
    fill[1] = (0, count * size - length)
    x = jnp.pad(x, fill).reshape(batch, count, size, heads, *x.shape[3:])
    return jnp.moveaxis(x, (1, 3), (0, 2))

  def joined(x: Float[Array, "N B H C ..."]) -> Float[Array, "B T H ..."]:
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(batch, count * size, heads, *x.shape[4:])[:, :length]

  in_rows = jax.checkpoint(jax.vmap(jax.vmap(body)))

  def run(carry: Carry, chunks: Any) -> tuple[Carry, Any]:
    if count > 1:
      return jax.lax.scan(in_rows, carry, chunks)
    carry, out = in_rows(carry, jax.tree.map(lambda x: x[0], chunks))
    return carry, jax.tree.map(lambda x: x[None], out)

  chunks = jax.tree.map(cut, tokens)
  if group == rows:
    carry, out = run(carry, chunks)
    return carry, jax.tree.map(joined, out)

  def grouped(x: Array, axis: int) -> Array:
    shape = (*x.shape[:axis], rows // group, 1, group, *x.shape[axis + 2 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  def ungrouped(x: Array, axis: int) -> Array:
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], batch, heads, *x.shape[axis + 3 :])

  inputs = (
    jax.tree.map(lambda x: grouped(x, 0), carry),
    jax.tree.map(lambda x: grouped(x, 1), chunks),
  )
  carry, out = jax.lax.map(lambda pair: run(*pair), inputs)
  carry = jax.tree.map(lambda x: ungrouped(x, 0), carry)
  return carry, jax.tree.map(lambda x: joined(ungrouped(x, 1)), out)


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
