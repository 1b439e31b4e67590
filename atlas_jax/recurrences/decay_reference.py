"""The definition of matrix memories with decay, one token at a time."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlas_jax.recurrences.tokens import scan_tokens


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

  def token(
    memory: Array, q: Array, k: Array, v: Array, log_a: Array
  ) -> tuple[Array, Array]:
    memory = memory * jnp.exp(log_a)[:, :, None, :]
    memory = memory + v[..., None] * k[:, :, None]
    return memory, jnp.sum(memory * q[:, :, None], axis=-1)

  y, state = scan_tokens(
    token,
    state,
    (query, key, value, log_decay),
    restart=restart,
    valid=valid,
    dtype=state.dtype,
  )
  return y.astype(value.dtype), state
