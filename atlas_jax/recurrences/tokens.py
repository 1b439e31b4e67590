"""The loop of every definition: one token after the other.

A definition says what one token does to the state. Where documents begin and
what padding leaves alone is said here, once. The fast forms share none of it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

State = TypeVar("State")


def scan_tokens(
  token: Callable[..., tuple[State, Float[Array, "B H V"]]],
  state: State,
  inputs: tuple[Float[Array, "B T ..."], ...],
  *,
  restart: Bool[Array, "B T"] | None,
  valid: Bool[Array, "B T"] | None,
  dtype: DTypeLike,
) -> tuple[Float[Array, "B T H V"], State]:
  """Runs a definition over a sequence.

  Args:
    token: From the state and the inputs of one token [B, ...], in `dtype`, to
      the state after it and what is read.
    state: Before the first token; arrays whose first axis is the row.
    inputs: Of every token.
    restart: Tokens before which the state is made 0. None: there are none.
    valid: Tokens that count; at others the state stays and 0 is read. None:
      all.
    dtype: Of all sums.

  Returns:
    What is read, and the state after the last token.
  """
  lengths = inputs[0].shape[:2]
  if restart is None:
    restart = jnp.zeros(lengths, jnp.bool_)
  if valid is None:
    valid = jnp.ones(lengths, jnp.bool_)

  def choose(flag: Bool[Array, "B"], yes: Array, no: Array) -> Array:
    return jnp.where(flag.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)

  def body(before: State, now: Any) -> tuple[State, Array]:
    one, begins, counts = now
    zero = jnp.zeros((), dtype)
    one = [choose(counts, x.astype(dtype), zero) for x in one]
    start = jax.tree.map(lambda x: choose(~begins, x, zero), before)
    after, y = token(start, *one)
    after = jax.tree.map(
      lambda new, old: choose(counts, new, old), after, before
    )
    return after, choose(counts, y, zero)

  by_time = lambda x: jnp.moveaxis(x, 1, 0)
  steps = jax.tree.map(by_time, (inputs, restart, valid))
  state, y = jax.lax.scan(body, state, steps)
  return by_time(y), state
