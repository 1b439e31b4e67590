"""A scan whose every step sees what all earlier steps have put down.

`jax.lax.scan` with the growing list as part of the carry would keep a copy of
the whole list for every step of the backward pass. The list at a step is the
final list without its later rows, so one copy is enough.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Carry = TypeVar("Carry")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def append_scan(
  body: Callable[..., tuple[Any, Array, Any]],
  row: jax.ShapeDtypeStruct,
  shared: Any,
  carry: Carry,
  xs: Any,
) -> tuple[Carry, Float[Array, "N ..."], Any]:
  """Runs a body over the first axis of `xs`, with the rows of earlier steps.

  The backward pass computes every step again from its carry.

  Args:
    body: (shared, rows [N, ...], carry, x) -> (carry, row, y), where the rows
      of this and later steps are 0. It must not close over traced arrays.
    row: shape and type of a row.
    shared: a tree of floating-point arrays that every step sees.
    carry: a tree of floating-point arrays.
    xs: a tree of floating-point arrays [N, ...].

  Returns:
    the last carry, all rows, and all y.
  """
  (carry, rows, ys), _ = _forward(body, row, shared, carry, xs)
  return carry, rows, ys


def _forward(body, row, shared, carry, xs):
  steps = jax.tree.leaves(xs)[0].shape[0]
  rows = jnp.zeros((steps, *row.shape), row.dtype)

  def step(state, now):
    index, x = now
    carry, rows = state
    after, new, y = body(shared, rows, carry, x)
    rows = jax.lax.dynamic_update_index_in_dim(rows, new, index, 0)
    return (after, rows), (carry, y)

  index = jnp.arange(steps, dtype=jnp.int32)
  (last, rows), (carries, ys) = jax.lax.scan(step, (carry, rows), (index, xs))
  return (last, rows, ys), (shared, rows, carries, xs)


def _backward(body, row, kept, slopes):
  shared, rows, carries, xs = kept
  by_carry, by_rows, by_ys = slopes
  steps = rows.shape[0]
  place = jnp.arange(steps, dtype=jnp.int32).reshape(-1, *[1] * len(row.shape))

  def step(state, now):
    by_carry, by_rows, by_shared = state
    index, carry, x, by_y = now
    earlier = place < index
    before = jnp.where(earlier, rows, jnp.zeros((), rows.dtype))
    _, pull = jax.vjp(body, shared, before, carry, x)
    by_new = jax.lax.dynamic_index_in_dim(by_rows, index, 0, keepdims=False)
    more_shared, more_rows, by_carry, by_x = pull((by_carry, by_new, by_y))
    by_rows = by_rows + jnp.where(
      earlier, more_rows, jnp.zeros((), more_rows.dtype)
    )
    by_shared = jax.tree.map(jnp.add, by_shared, more_shared)
    return (by_carry, by_rows, by_shared), by_x

  start = (by_carry, by_rows, jax.tree.map(jnp.zeros_like, shared))
  index = jnp.arange(steps, dtype=jnp.int32)
  (by_carry, _, by_shared), by_xs = jax.lax.scan(
    step, start, (index, carries, xs, by_ys), reverse=True
  )
  return by_shared, by_carry, by_xs


append_scan.defvjp(_forward, _backward)
