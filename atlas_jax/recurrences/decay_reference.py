"""The definition of matrix memories with decay, one token at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def decay_reference(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  log_decay: Float[Array, "B T H K or 1"],
  state: Float[Array, "B H V K"],
  *,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H V K"]]:
  """`M_t = M_{t-1} Diag(a_t) + v_t k_t^T`, `y_t = M_t q_t`, as it is written.

  Args:
    query, key, value: Of every token.
    log_decay: log a_t of every key channel, or of all at once (last axis 1).
    state: M before the first token; its type is that of all sums.
    restart: Tokens before which M is made 0.
    valid: Tokens that count; at others M stays and y is 0. None: all.

  Returns:
    y in value's type, and the last M.
  """
  batch, length = value.shape[:2]
  if restart is None:
    restart = jnp.zeros((batch, length), jnp.bool_)
  if valid is None:
    valid = jnp.ones((batch, length), jnp.bool_)

  def token(memory: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    q, k, v, log_a, begins, counts = inputs
    counts = counts[:, None, None]
    q, k, v, log_a = (
      jnp.where(counts, x.astype(memory.dtype), jnp.zeros((), memory.dtype))
      for x in (q, k, v, log_a)
    )
    begins = begins[:, None, None, None]
    kept = jnp.where(begins & counts[..., None], jnp.zeros_like(memory), memory)
    memory = kept * jnp.exp(log_a)[:, :, None, :] + v[..., None] * k[:, :, None]
    return memory, jnp.sum(memory * q[:, :, None], axis=-1)

  by_time = lambda x: jnp.moveaxis(x, 1, 0)
  inputs = (query, key, value, log_decay, restart, valid)
  state, y = jax.lax.scan(token, state, tuple(map(by_time, inputs)))
  return by_time(y).astype(value.dtype), state
