"""The delta rule: a matrix memory that writes only what it lacks.

`M_t = a_t M_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T`, `y_t = M_t q_t`

is one step of gradient descent on `|M k_t - v_t|^2 / 2` per token, taken at
`M_{t-1}` exactly: DeltaNet (arXiv 2406.06484, Eq. 3) with a = 1, Gated DeltaNet
(arXiv 2412.06464, Eq. 10) with a decay. Longhorn (arXiv 2407.14207) solves for
the step instead: it is the delta rule whose rates are `b / (1 + b |k|^2)`, one
for every row of M.

Inside a chunk the memory is `M_t = s_t M_0 + sum_{n<=t} D[t, n] u_n k_n^T`, D
being products of decays after n, s those from the start. What a token writes
beside its key, `u_t = b_t (v_t - a_t M_{t-1} k_t)`, solves a triangular system
(the UT transform, arXiv 2406.06484, Eq. 10), and all else are products of
matrices.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from atlas_jax.memory import state_dtype
from atlas_jax.memory.dispatch import resolve
from atlas_jax.memory.gates import (
  decay_from_start,
  decay_products,
  lower_triangle,
)
from atlas_jax.memory.numerics import HIGHEST, matmul, safe_norm
from atlas_jax.recurrences.affine import (
  AffineChunk,
  affine_delta_chunk,
  scan_affine,
)
from atlas_jax.recurrences.chunks import (
  check_chunk,
  check_shapes,
  marked_decay,
  without_padding,
)
from atlas_jax.recurrences.tokens import scan_tokens
from atlas_jax.recurrences.triangular import solve_columns, unit_lower_inverse

# Below this length a key of Longhorn is no longer stretched to length 1; the
# result does not depend on it.
_SHORTEST = 1e-6


class _Tokens(NamedTuple):
  """Tokens [B, T, H, ...], or those of one chunk of one row [C, ...]."""

  query: Float[Array, "C K"]
  key: Float[Array, "C K"]
  value: Float[Array, "C V"]
  rate: Float[Array, "C n"]
  log_decay: Float[Array, "C"] | None


def delta_rule(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  rate: Float[Array, "B T H"] | Float[Array, "B T H V"],
  log_decay: Float[Array, "B T H"] | None = None,
  state: Float[Array, "B H V K"] | None = None,
  *,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  chunk: int = 64,
  implementation: str = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H V K"]]:
  """Reads `y_t = M_t q_t` from a memory that the delta rule writes.

  Stays bounded where `rate * |key|^2 <= 2`.

  Args:
    query, key, value: Tokens, of any float type.
    rate: b >= 0, one per head, or one per row of the head's matrix.
    log_decay: log a <= 0; -inf forgets everything. None: no decay.
    state: M before the first token, at least float32; None: zeros.
    restart: Tokens that begin a document and see nothing before them.
    valid: False marks padding, which writes and forgets nothing.
    chunk: Tokens per triangular system; the result does not depend on it.
      Rates per row are solved token by token: use about 16.
    implementation: "reference" goes token by token, "xla" chunk by chunk;
      "auto" is "xla".

  Returns:
    y in value's type, 0 at padding, and M after the last token, at least
    float32.

  Raises:
    UserError: A shape is wrong or there is no such implementation.
  """
  batch, length, heads, width = query.shape
  values = value.shape[-1]
  leading = (batch, length, heads)
  check_shapes(
    {
      "key": (key, (*leading, width)),
      "value": (value, (*leading, values)),
      "rate": (rate, (*leading, values) if rate.ndim == 4 else leading),
      "log_decay": (log_decay, leading),
      "state": (state, (batch, heads, values, width)),
      "restart": (restart, (batch, length)),
      "valid": (valid, (batch, length)),
    }
  )
  check_chunk(chunk)
  dtype = state_dtype(value.dtype)
  if state is None:
    state = jnp.zeros((batch, heads, values, width), dtype)
  state = state.astype(dtype)
  if length == 0:
    return value, state
  reference = resolve(implementation) == "reference"
  if log_decay is None and (reference or restart is not None):
    log_decay = jnp.zeros(leading, dtype)
  if rate.ndim == 3:
    rate = rate[..., None]
  query, key, value, rate = (
    without_padding(x, valid) for x in (query, key, value, rate)
  )
  if log_decay is not None:
    log_decay = without_padding(log_decay.astype(dtype), valid)
  if reference:
    assert log_decay is not None
    inputs = (query, key, value, rate, log_decay)
    return _recurrent(inputs, state, restart, valid)
  if log_decay is not None:
    log_decay = marked_decay(log_decay, restart, valid)
  tokens = _Tokens(query, key, value, rate, log_decay)
  if rate.shape[-1] == 1:
    y, state = scan_affine(state, tokens, chunk, _affine)
  else:
    y, state = scan_affine(state, tokens, chunk, _by_column, _apply_by_column)
  return y.astype(value.dtype), state


def longhorn(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  rate: Float[Array, "B T H"] | Float[Array, "B T H V"],
  state: Float[Array, "B H V K"] | None = None,
  *,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  chunk: int = 16,
  implementation: str = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H V K"]]:
  """Longhorn's memory in its exact form (arXiv 2407.14207, Eq. 6).

  Row i of M_t minimises `|m - m_{t-1}|^2 + b_i (m k_t - v_i)^2`: with
  `d_i = b_i / (1 + b_i |k|^2)` it is `m_{t-1} (I - d_i k k^T) + d_i v_i k^T`.
  (The paper's layer then replaces `k k^T` by its diagonal, which this does
  not.) Never expands, whatever the length of the keys.

  Args:
    query, key, value: Tokens, of any float type; keys of any length.
    rate: b >= 0, one per head, or one per row of the head's matrix.
    state, restart, valid, chunk, implementation: See `delta_rule`.

  Returns:
    y in value's type, 0 at padding, and M after the last token, at least
    float32.

  Raises:
    UserError: A shape is wrong or there is no such implementation.
  """
  check_shapes({"key": (key, query.shape)})
  kind, dtype = value.dtype, state_dtype(value.dtype)
  key, value, rate = (
    without_padding(x.astype(dtype), valid) for x in (key, value, rate)
  )
  per_head = rate.ndim == 3
  rate = rate[..., None] if per_head else rate
  if resolve(implementation) == "reference":
    square = jnp.sum(key * key, axis=-1, keepdims=True)
    step = rate / (1 + rate * square)
  else:
    # The same rule with keys of length 1, which neither overflow nor mix
    # large with small numbers in one system: (k, v) -> (k, v) / n and
    # d -> d n^2, whatever n is.
    length = jnp.maximum(safe_norm(key, axis=-1), _SHORTEST)
    key, value = key / length, value / length
    square = jnp.sum(key * key, axis=-1, keepdims=True)
    step = rate / (jnp.square(1 / length) + rate * square)
  y, state = delta_rule(
    query,
    key,
    value,
    step[..., 0] if per_head else step,
    None,
    state,
    restart=restart,
    valid=valid,
    chunk=chunk,
    implementation=implementation,
  )
  return y.astype(kind), state


def _affine(tokens: _Tokens, dtype: DTypeLike) -> AffineChunk:
  """One chunk of one row, with one rate for the whole matrix."""
  chunk = _by_column(tokens, dtype)
  value = tokens.value.astype(dtype)
  solve = unit_lower_inverse(chunk.rate * chunk.overlap) * chunk.rate.T
  return affine_delta_chunk(
    query=chunk.query,
    scores=chunk.scores,
    lookup=matmul(solve, chunk.lookup),
    inserted=matmul(solve, value),
    key=chunk.key,
    decay=chunk.decay,
  )


class _Chunk(NamedTuple):
  """One chunk of one row, before its triangular systems are solved.

  Attributes:
    query: What each token asks of the memory before the chunk.
    lookup: What it compares its value with there.
    overlap: How much of each write a later token finds at its key.
    scores: How much of each write a token reads.
    key: Where each write stands at the end of the chunk.
    decay: Of the memory, over the whole chunk.
  """

  query: Float[Array, "C K"]
  lookup: Float[Array, "C K"]
  overlap: Float[Array, "C C"]
  scores: Float[Array, "C C"]
  key: Float[Array, "C K"]
  value: Float[Array, "C V"]
  rate: Float[Array, "C n"]
  decay: Float[Array, "1"]


def _by_column(tokens: _Tokens, dtype: DTypeLike) -> _Chunk:
  """All that does not depend on the memory or on the rates."""
  query, key, value, rate = (x.astype(dtype) for x in tokens[:4])
  size = key.shape[0]
  if tokens.log_decay is None:
    between = lower_triangle(size, dtype)
    since_start = jnp.ones((size, 1), dtype)
  else:
    between = decay_products(tokens.log_decay)
    since_start = decay_from_start(tokens.log_decay)[:, None]
  strict = lower_triangle(size, dtype, offset=-1)
  return _Chunk(
    query=since_start * query,
    lookup=since_start * key,
    overlap=between * strict * matmul(key, key.T),
    scores=between * matmul(query, key.T),
    key=between[-1][:, None] * key,
    value=value,
    rate=rate,
    decay=since_start[-1],
  )


def _apply_by_column(
  memory: Float[Array, "K V"], chunk: _Chunk
) -> tuple[Float[Array, "K V"], Float[Array, "C V"]]:
  """One chunk of one row: the memory after it, and its read-outs."""
  size = chunk.query.shape[0]
  found = matmul(jnp.concatenate([chunk.query, chunk.lookup]), memory)
  right = chunk.value - found[size:]
  written = solve_columns(chunk.overlap, chunk.rate, right)
  y = found[:size] + matmul(chunk.scores, written)
  return chunk.decay[:, None] * memory + matmul(chunk.key.T, written), y


def _recurrent(
  inputs: tuple[Array, ...],
  memory: Float[Array, "B H V K"],
  restart: Bool[Array, "B T"] | None,
  valid: Bool[Array, "B T"] | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H V K"]]:
  """The rule as it is written, one token after the other."""

  def token(
    memory: Array,
    query: Array,
    key: Array,
    value: Array,
    rate: Array,
    log_decay: Array,
  ) -> tuple[Array, Array]:
    old = jnp.exp(log_decay)[..., None, None] * memory
    found = jnp.einsum("bhvk,bhk->bhv", old, key, precision=HIGHEST)
    error = rate * (value - found)
    new = old + error[..., None] * key[..., None, :]
    return new, jnp.einsum("bhvk,bhk->bhv", new, query, precision=HIGHEST)

  y, memory = scan_tokens(
    token,
    memory,
    inputs,
    restart=restart,
    valid=valid,
    dtype=memory.dtype,
  )
  return y.astype(inputs[2].dtype), memory
