"""A matrix memory with one decay per head: `M_t = a_t M_{t-1} + v_t k_t^T`.

Linear attention (a = 1, arXiv 2006.16236 Eq. 18-20 without its normaliser),
RetNet (a fixed, arXiv 2307.08621 Eq. 6) and Mamba-2 (a_t from the token, arXiv
2405.21060 Eq. 2 and section 6, whose chunked algorithm this is).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import dispatch, state_dtype
from atlas_jax.memory.gates import (
  decay_from_start,
  decay_products,
  lower_triangle,
)
from atlas_jax.memory.numerics import matmul
from atlas_jax.recurrences.affine import AffineChunk, apply_chunk, scan_affine
from atlas_jax.recurrences.chunks import (
  check_chunk,
  check_shapes,
  marked_decay,
  without_padding,
)
from atlas_jax.recurrences.decay_reference import decay_reference


class _Tokens(NamedTuple):
  """Tokens of one chunk, R heads with common queries and keys."""

  query: Float[Array, "C K"]
  key: Float[Array, "C K"]
  value: Float[Array, "C R V"]
  log_decay: Float[Array, "C R"] | None


def scalar_decay(
  query: Float[Array, "B T G K"],
  key: Float[Array, "B T G K"],
  value: Float[Array, "B T H V"],
  log_decay: Float[Array, "B T H"] | None = None,
  state: Float[Array, "B H V K"] | None = None,
  *,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  chunk: int = 64,
  implementation: str = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H V K"]]:
  """Writes every token and reads after the write: `y_t = M_t q_t`.

  Args:
    query, key: One for each of G groups of H / G heads that follow each other.
    value: What is written.
    log_decay: log a_t <= 0; -inf forgets all. None: nothing decays.
    state: M before the first token; None: 0.
    restart: Tokens that begin a document and see nothing before them.
    valid: False marks padding: it writes nothing, decays nothing and reads 0,
      whatever it holds.
    chunk: Tokens that are worked out side by side; changes no numbers beyond
      rounding.
    implementation: "auto", "xla", or "reference": token by token.

  Returns:
    y in value's type, and M after the last token, at least float32.

  Raises:
    UserError: A shape that does not fit, or an unknown implementation.
  """
  batch, length, heads, width = value.shape
  groups, key_width = query.shape[2:]
  if groups < 1 or heads % groups:
    raise UserError(f"{groups} groups of keys do not divide {heads} heads")
  check_shapes(
    {
      "query": (query, (batch, length, groups, key_width)),
      "key": (key, query.shape),
      "log_decay": (log_decay, (batch, length, heads)),
      "state": (state, (batch, heads, width, key_width)),
      "restart": (restart, (batch, length)),
      "valid": (valid, (batch, length)),
    }
  )
  check_chunk(chunk)
  dtype = state_dtype(value.dtype)
  if state is None:
    state = jnp.zeros((batch, heads, width, key_width), dtype)
  state = state.astype(dtype)
  if length == 0:
    return value, state
  reference = dispatch.resolve(implementation) == "reference"
  if log_decay is None and (reference or restart is not None):
    log_decay = jnp.zeros((batch, length, heads), dtype)
  if reference:
    assert log_decay is not None
    repeats = heads // groups
    return decay_reference(
      jnp.repeat(query, repeats, axis=2),
      jnp.repeat(key, repeats, axis=2),
      value,
      log_decay[..., None],
      state,
      restart=restart,
      valid=valid,
    )
  query, key, value = (without_padding(x, valid) for x in (query, key, value))
  if log_decay is not None:
    log_decay = marked_decay(log_decay.astype(dtype), restart, valid)
    log_decay = log_decay.reshape(batch, length, groups, -1)
  by_group = value.reshape(batch, length, groups, -1, width)
  y, state = scan_affine(
    state.reshape(batch, groups, -1, width, key_width),
    _Tokens(query, key, by_group, log_decay),
    chunk,
    _prepare,
    _apply,
  )
  return (
    y.reshape(value.shape).astype(value.dtype),
    state.reshape(batch, heads, width, key_width),
  )


def _apply(
  memory: Float[Array, "R K V"], chunk: AffineChunk
) -> tuple[Float[Array, "R K V"], Float[Array, "C R V"]]:
  """`apply_chunk` for the R heads of a row."""
  memory, y = jax.vmap(apply_chunk)(memory, chunk)
  return memory, jnp.moveaxis(y, 0, 1)


def _prepare(tokens: _Tokens, dtype: DTypeLike) -> AffineChunk:
  """The tokens of a chunk in each other's sight, leaves [R, ...]."""
  query, key = tokens.query.astype(dtype), tokens.key.astype(dtype)
  value = jnp.moveaxis(tokens.value.astype(dtype), 1, 0)
  heads, size = value.shape[:2]
  written = value
  if tokens.log_decay is None:
    decay = lower_triangle(size, dtype)[None]
    query = jnp.broadcast_to(query[None], (heads, *query.shape))
    total = jnp.ones((heads, 1), dtype)
  else:
    log_decay = tokens.log_decay.T
    decay = jax.vmap(decay_products)(log_decay)
    start = jax.vmap(decay_from_start)(log_decay)[..., None]
    written = decay[:, -1][..., None] * value
    query, total = start * query[None], start[:, -1]
  scores = matmul(tokens.query.astype(dtype), key.T)[None] * decay
  return AffineChunk(
    reads=query,
    own=matmul(scores, value),
    decay=total,
    write=matmul(key.T[None], written),
  )
