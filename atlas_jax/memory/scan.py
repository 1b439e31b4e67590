"""Chunks to sequence: one scan over chunks, batch and heads in parallel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlas_jax.memory.chunk import chunk
from atlas_jax.memory.config import Memory
from atlas_jax.memory.factors import Carry, Tokens


def scan_chunks(
  memory: Memory,
  shared,
  own,
  start: dict[str, Float[Array, "H n d"]],
  carry: Carry,
  tokens: Tokens,
  *,
  restart: Bool[Array, "B N"] | None = None,
  commit: Bool[Array, "B N"] | None = None,
  form: str = "dual",
  rows_at_once: int | None = None,
) -> tuple[Carry, tuple[Float[Array, "B N C H V"], Float[Array, "B N C H"]]]:
  """Runs whole chunks in order.

  Each chunk is recomputed in the backward pass, so that what is stored is one
  carry per chunk (weights and momentum) and the inputs.

  Args:
    memory, shared, own: the memory and its prepared outer parameters: those of
      all heads, and those of each [H, ...].
    start: learned start weights, used where a document restarts.
    carry: state with leading axes [B, H] (`seen`: [B]).
    tokens: leaves [B, N, C, H, ...].
    restart: chunks before which the memory is made fresh.
    commit: chunks whose end becomes the carry; others are only read.
    form: "dual" or "associative".
    rows_at_once: rows (batch x heads) that run together; the others follow in
      a sequential loop. None is all at once. It must divide their number.

  Returns:
    the carry after the last committed chunk; outputs and inner losses.
  """
  batch, heads = jax.tree.leaves(carry.weights)[0].shape[:2]
  rows = batch * heads
  group = rows_at_once or rows

  def by_head(x: Array) -> Array:
    return jnp.broadcast_to(x[:, None], (batch, heads, *x.shape[1:])).reshape(
      rows, *x.shape[1:]
    )

  def flatten(x: Array) -> Array:
    return x.reshape(rows, *x.shape[2:])

  rows_carry = jax.tree.map(flatten, carry._replace(seen=None))
  rows_carry = rows_carry._replace(seen=by_head(carry.seen))
  # [B, N, C, H, ...] to [B * H, N, C, ...].
  xs = jax.tree.map(lambda x: flatten(jnp.moveaxis(x, 3, 1)), tokens)
  flags = [None if f is None else by_head(f) for f in (restart, commit)]

  def by_row(x: Array) -> Array:
    return jnp.broadcast_to(x, (batch, *x.shape)).reshape(rows, *x.shape[1:])

  own = jax.tree.map(by_row, own)
  fresh = None if restart is None else jax.tree.map(by_row, start)

  def one_row(carry: Carry, own, fresh, tokens: Tokens, flags):
    """One chunk of one row."""
    is_restart, is_commit = flags
    if is_restart is not None:
      carry = _choose(is_restart, _fresh(carry, fresh), carry)
    after, out = chunk(memory, {**shared, **own}, carry, tokens, form)
    if is_commit is not None:
      after = _choose(is_commit, after, carry)
    return after, out

  def some_rows(inputs: Any):
    carry, own, fresh, xs, flags = inputs

    @jax.checkpoint
    def body(carry, x):
      tokens, flags = x
      return jax.vmap(one_row)(carry, own, fresh, tokens, flags)

    by_chunk = lambda x: jnp.moveaxis(x, 1, 0)
    carry, out = jax.lax.scan(body, carry, jax.tree.map(by_chunk, (xs, flags)))
    return carry, jax.tree.map(by_chunk, out)

  inputs = (rows_carry, own, fresh, xs, flags)
  if group == rows:
    carry_after, out = some_rows(inputs)
  else:
    split = lambda x: x.reshape(rows // group, group, *x.shape[1:])
    join = lambda x: x.reshape(rows, *x.shape[2:])
    carry_after, out = jax.tree.map(
      join, jax.lax.map(some_rows, jax.tree.map(split, inputs))
    )

  unflatten = lambda x: x.reshape(batch, heads, *x.shape[1:])
  seen = unflatten(carry_after.seen)[:, 0]
  carry_after = jax.tree.map(unflatten, carry_after._replace(seen=None))
  y, loss = jax.tree.map(lambda x: jnp.moveaxis(unflatten(x), 1, 3), out)
  return carry_after._replace(seen=seen), (y, loss)


def _fresh(carry: Carry, start) -> Carry:
  return jax.tree.map(jnp.zeros_like, carry)._replace(weights=start)


def _choose(condition, yes, no):
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
