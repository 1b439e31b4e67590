"""A matrix memory whose key channels decay: `M_t = M_{t-1} Diag(a_t) + v k^T`.

Gated linear attention (arXiv 2312.06635 Eq. 3). Within a chunk a query q_t
meets a key k_n as `sum_i q_ti k_ni exp(P_i)`, P_i being the sum of log a_i over
the tokens after n up to t. A product of two factors that meet at the chunk's
start, as in the paper's section 4.3, would divide by decays and overflow. Here
every pair meets at the middle of the smallest aligned block of 2, 4, 8, ...
tokens that holds both: one factor holds the decays from the middle to t, one
those from n to the middle, and both are at most 1. The exponents are sums of
logs that are at most 0; nothing is subtracted.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from atlas_jax.memory import dispatch, state_dtype
from atlas_jax.memory.numerics import matmul
from atlas_jax.recurrences.affine import AffineChunk, scan_affine
from atlas_jax.recurrences.chunks import (
  check_chunk,
  check_shapes,
  marked_decay,
  without_padding,
)
from atlas_jax.recurrences.decay_reference import decay_reference

# Products of blocks with fewer tokens are summed up one by one: they are not
# worth a matmul each.
SMALLEST_MATMUL = 4


class _Tokens(NamedTuple):
  """Tokens of one chunk and head."""

  query: Float[Array, "C K"]
  key: Float[Array, "C K"]
  value: Float[Array, "C V"]
  log_decay: Float[Array, "C K"]


class Blocks(NamedTuple):
  """Aligned blocks of S tokens, each looked at by itself.

  Attributes:
    scores: What query t (row) takes from key n (column) of its block.
    prefix: Logs of decays summed from the block's start up to each token.
    suffix: The same after each token up to the block's end.
    total: The same over the whole block.
  """

  scores: Float[Array, "N S S"]
  prefix: Float[Array, "N S K"]
  suffix: Float[Array, "N S K"]
  total: Float[Array, "N K"]


def channel_decay(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  log_decay: Float[Array, "B T H K"],
  state: Float[Array, "B H V K"] | None = None,
  *,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  chunk: int = 32,
  implementation: str = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H V K"]]:
  """Writes every token and reads after the write: `y_t = M_t q_t`.

  Args:
    query, key, value: Of every token and head.
    log_decay: log a_t <= 0 of every key channel; -inf forgets it.
    state: M before the first token; None: 0.
    restart: Tokens that begin a document and see nothing before them.
    valid: False marks padding: it writes nothing, decays nothing and reads 0,
      whatever it holds.
    chunk: Tokens that are worked out side by side, best a power of two; changes
      no numbers beyond rounding.
    implementation: "auto", "xla", or "reference": token by token.

  Returns:
    y in value's type, and M after the last token, at least float32.

  Raises:
    UserError: A shape that does not fit, or an unknown implementation.
  """
  batch, length, heads, width = value.shape
  shape = (batch, heads, width, query.shape[-1])
  check_shapes(
    {
      "query": (query, (batch, length, heads, query.shape[-1])),
      "key": (key, query.shape),
      "log_decay": (log_decay, query.shape),
      "state": (state, shape),
      "restart": (restart, (batch, length)),
      "valid": (valid, (batch, length)),
    }
  )
  check_chunk(chunk)
  dtype = state_dtype(value.dtype)
  state = jnp.zeros(shape, dtype) if state is None else state.astype(dtype)
  if length == 0:
    return value, state
  log_decay = log_decay.astype(dtype)
  if dispatch.resolve(implementation) == "reference":
    return decay_reference(
      query, key, value, log_decay, state, restart=restart, valid=valid
    )
  query, key, value = (without_padding(x, valid) for x in (query, key, value))
  tokens = _Tokens(query, key, value, marked_decay(log_decay, restart, valid))
  y, state = scan_affine(state, tokens, chunk, _prepare)
  return y.astype(value.dtype), state


def _prepare(tokens: _Tokens, dtype: DTypeLike) -> AffineChunk:
  """The tokens of a chunk in each other's sight."""
  query, key, value = (x.astype(dtype) for x in tokens[:3])
  block = decayed_scores(query, key, tokens.log_decay)
  return AffineChunk(
    reads=query * jnp.exp(block.prefix[0]),
    own=matmul(block.scores[0], value),
    decay=jnp.exp(block.total[0]),
    write=matmul((key * jnp.exp(block.suffix[0])).T, value),
  )


def decayed_scores(
  query: Float[Array, "C K"],
  key: Float[Array, "C K"],
  log_decay: Float[Array, "C K"],
) -> Blocks:
  """All pairs of a chunk, by joining blocks to blocks of twice the size.

  Args:
    query, key: Of every token, at least float32.
    log_decay: Logs of decays, <= 0 and finite.

  Returns:
    One block (N = 1) of all C tokens.
  """
  size = query.shape[0]
  # Behind the end nothing is written, and nothing decays.
  fill = ((0, (1 << (size - 1).bit_length()) - size), (0, 0))
  query, key, log_decay = (jnp.pad(x, fill) for x in (query, key, log_decay))
  blocks = Blocks(
    scores=jnp.sum(query * key, axis=-1)[:, None, None],
    prefix=log_decay[:, None],
    suffix=jnp.zeros_like(log_decay)[:, None],
    total=log_decay,
  )
  while blocks.total.shape[0] > 1:
    blocks = _join(query, key, blocks)
  return Blocks(
    scores=blocks.scores[:, :size, :size],
    prefix=blocks.prefix[:, :size],
    suffix=blocks.suffix[:, :size],
    total=blocks.total,
  )


def _join(
  query: Float[Array, "C K"], key: Float[Array, "C K"], blocks: Blocks
) -> Blocks:
  """Joins every two neighbouring blocks to one."""
  count, size = blocks.prefix.shape[:2]
  first, second = (
    Blocks(*(x.reshape(count // 2, 2, *x.shape[1:])[:, half] for x in blocks))
    for half in (0, 1)
  )
  halves = (count // 2, 2, size, -1)
  later = query.reshape(halves)[:, 1] * jnp.exp(second.prefix)
  earlier = key.reshape(halves)[:, 0] * jnp.exp(first.suffix)
  across = _products(later, earlier)
  above = jnp.concatenate([first.scores, jnp.zeros_like(across)], axis=2)
  below = jnp.concatenate([across, second.scores], axis=2)
  return Blocks(
    scores=jnp.concatenate([above, below], axis=1),
    prefix=jnp.concatenate(
      [first.prefix, second.prefix + first.total[:, None]], axis=1
    ),
    suffix=jnp.concatenate(
      [first.suffix + second.total[:, None], second.suffix], axis=1
    ),
    total=first.total + second.total,
  )


def _products(
  query: Float[Array, "N S K"], key: Float[Array, "N S K"]
) -> Float[Array, "N S S"]:
  """`query key^T` of every block."""
  size = query.shape[1]
  if size < SMALLEST_MATMUL:
    # Column by column: in one array of all products, under several vmaps, there
    # are more axes than XLA's kernels for CPUs take.
    columns = (jnp.sum(query * key[:, j, None], axis=-1) for j in range(size))
    return jnp.stack([*columns], axis=-1)
  return matmul(query, jnp.swapaxes(key, 1, 2))
