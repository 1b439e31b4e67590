"""RWKV-7's memory: decay per key channel, and a rule that erases one key.

`M_t = M_{t-1} (Diag(w_t) - c_t (a_t * c_t)^T) + v_t k_t^T`, `y_t = M_t r_t`

(arXiv 2503.14456, Eq. 17, with column vectors): the state before the decay is
read at c_t, and what is found there is taken away at `a_t * c_t`. With w = 1,
c = k / |k| and equal rates a it is the delta rule.

With D[t, n] the products of w after n up to t, per channel, a chunk holds
`M_t = M_0 Diag(D[t, 0]) + sum_{n<=t} (v_n k_n^T - p_n (a_n c_n)^T)
Diag(D[t, n])`, and what is erased, `p_t = M_{t-1} c_t`, solves a triangular
system with entries `sum_i c_t,i D[t-1, n]_i (a_n c_n)_i`. These are the scores
of queries with decaying keys, which `decayed_scores` forms without ever
dividing by a decay: decays of any size keep float32's precision.

RWKV-7's own decays are `exp(-exp(-1/2))` = 0.545 a token at least. Where such a
bound is promised, scores are products of queries that carry all decays since
the chunk's start and keys that carry their inverses, one matrix product for all
of them. The exponents are then at most `chunk |bound|`, 19.4 for 32 tokens;
float32 rounds them by 1e-6, and so the scores, relative to their size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from atlas_jax.memory import state_dtype
from atlas_jax.memory.dispatch import resolve
from atlas_jax.memory.gates import lower_triangle
from atlas_jax.memory.numerics import HIGHEST, matmul
from atlas_jax.recurrences.affine import (
  AffineChunk,
  affine_delta_chunk,
  scan_affine,
)
from atlas_jax.recurrences.channel_decay import decayed_scores
from atlas_jax.recurrences.chunks import (
  check_chunk,
  check_shapes,
  marked_decay,
  without_padding,
)
from atlas_jax.recurrences.tokens import scan_tokens
from atlas_jax.recurrences.triangular import unit_lower_inverse


class _Tokens(NamedTuple):
  """Tokens [B, T, H, ...], or those of one chunk of one row [C, ...]."""

  query: Float[Array, "C K"]
  key: Float[Array, "C K"]
  value: Float[Array, "C V"]
  erased: Float[Array, "C K"]
  rate: Float[Array, "C K"]
  log_decay: Float[Array, "C K"]


# The largest exponent that a product of decays and inverse decays may have.
_LARGEST_EXPONENT = 40.0


def rwkv7(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  erased: Float[Array, "B T H K"],
  rate: Float[Array, "B T H K"],
  log_decay: Float[Array, "B T H K"],
  state: Float[Array, "B H V K"] | None = None,
  *,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  lowest_decay: float | None = None,
  chunk: int = 32,
  implementation: str = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H V K"]]:
  """Reads `y_t = M_t r_t` from the memory of RWKV-7.

  Args:
    query: r, of any float type, as all tokens.
    key: k, beside which the value is written.
    value: v.
    erased: c, the key that is erased; of length 1 at most.
    rate: a in [0, 1], how much of it is erased, per channel.
    log_decay: log w <= 0 per key channel; -inf forgets everything.
    state: M before the first token, at least float32; None: zeros.
    restart: Tokens that begin a document and see nothing before them.
    valid: False marks padding, which writes and forgets nothing.
    lowest_decay: A promise that no log decay lies below this; what does is
      taken for this much. Saves time if `chunk` times it is above -40. None:
      decays are what they are.
    chunk: Tokens per triangular system, best a power of two; the result does
      not depend on it.
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
  keys = (batch, length, heads, width)
  check_shapes(
    {
      "key": (key, keys),
      "value": (value, (batch, length, heads, values)),
      "erased": (erased, keys),
      "rate": (rate, keys),
      "log_decay": (log_decay, keys),
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
  tokens = _Tokens(
    *(
      without_padding(x, valid)
      for x in (query, key, value, erased, rate, log_decay.astype(dtype))
    )
  )
  if resolve(implementation) == "reference":
    return _recurrent(tokens, state, restart, valid)
  if restart is not None and valid is not None:
    restart &= valid
  if lowest_decay is not None and -lowest_decay * chunk <= _LARGEST_EXPONENT:
    log_decay = jnp.maximum(tokens.log_decay, lowest_decay)
    tokens = tokens._replace(log_decay=log_decay)
    begins = None
    if restart is not None:
      begins = jnp.broadcast_to(
        restart.astype(dtype)[..., None], (batch, length, heads)
      )
    y, state = scan_affine(state, (tokens, begins), chunk, _bounded)
    return y.astype(value.dtype), state
  log_decay = marked_decay(tokens.log_decay, restart, valid)
  tokens = tokens._replace(log_decay=log_decay)
  if restart is not None:
    # A document's first token forgets by its decay what came before; it must
    # not erase from it either, since that read precedes the decay.
    begins = restart[..., None, None]
    tokens = tokens._replace(
      erased=jnp.where(begins, jnp.zeros_like(erased), tokens.erased)
    )
  y, state = scan_affine(state, tokens, chunk, _unbounded)
  return y.astype(value.dtype), state


def _bounded(
  inputs: tuple[_Tokens, Float[Array, "C"] | None], dtype: DTypeLike
) -> AffineChunk:
  """`_unbounded` for decays whose products have an inverse.

  Where documents begin is not in the decays, which would have none: pairs of
  different documents are masked.
  """
  tokens, begins = inputs
  query, key, value, erased, rate, log_decay = (x.astype(dtype) for x in tokens)
  size = key.shape[0]
  lower = lower_triangle(size, dtype)
  strict = lower_triangle(size, dtype, offset=-1)
  total = matmul(lower, log_decay)
  before = matmul(strict, log_decay)
  # All at once, lest a compiler works them out for each of their uses.
  before, since_start, inverse, to_end = jnp.exp(
    jnp.stack([before, total, -total, total[-1:] - total])
  )
  # Reads that erase come before the token's own decay.
  rows = jnp.concatenate([erased * before, query * since_start])
  written = jnp.concatenate([key * inverse, rate * erased * inverse])
  scores = matmul(rows, written.T)
  decay = since_start[-1]
  if begins is not None:
    document = matmul(lower, begins[:, None])
    same = (document == document.T).astype(dtype)
    lower, strict = lower * same, strict * same
    first = (document == 0).astype(dtype)
    rows = rows * jnp.concatenate([first, first])
    decay = decay * first[-1]
    to_end = to_end * same[:, -1:]
  return _erasing_chunk(
    early=rows[:size],
    query=rows[size:],
    value=value,
    finds=strict * scores[:size, :size],
    lower=strict * scores[:size, size:],
    reads=lower * scores[size:, :size],
    rereads=lower * scores[size:, size:],
    key=key * to_end,
    replaced=rate * erased * to_end,
    decay=decay,
  )


def _unbounded(tokens: _Tokens, dtype: DTypeLike) -> AffineChunk:
  """One chunk of one row, with decays of any size."""
  query, key, value, erased, rate, log_decay = (x.astype(dtype) for x in tokens)
  replaced = rate * erased

  def shifted(x: Float[Array, "C n"]) -> Float[Array, "C n"]:
    """Row t - 1 at place t."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])

  def scores(query: Array, key: Array) -> tuple[Array, tuple[Array, ...]]:
    """Of all pairs of the chunk, and the decays that all scores share."""
    block = decayed_scores(query, key, log_decay)
    return block.scores[0], (block.prefix[0], block.suffix[0], block.total)

  # Token t erases what a query of token t - 1 would read.
  early = jnp.concatenate([erased[1:], jnp.zeros_like(erased[:1])])
  (reads, rereads, finds, lower), (prefix, suffix, total) = jax.vmap(
    scores, out_axes=(0, None)
  )(
    jnp.stack([query, query, early, early]),
    jnp.stack([key, replaced, key, replaced]),
  )
  to_end = jnp.exp(suffix)
  return _erasing_chunk(
    early=erased * jnp.exp(shifted(prefix)),
    query=query * jnp.exp(prefix),
    value=value,
    finds=shifted(finds),
    lower=shifted(lower),
    reads=reads,
    rereads=rereads,
    key=key * to_end,
    replaced=replaced * to_end,
    decay=jnp.exp(total[0]),
  )


def _erasing_chunk(
  *,
  early: Float[Array, "C K"],
  query: Float[Array, "C K"],
  value: Float[Array, "C V"],
  finds: Float[Array, "C C"],
  lower: Float[Array, "C C"],
  reads: Float[Array, "C C"],
  rereads: Float[Array, "C C"],
  key: Float[Array, "C K"],
  replaced: Float[Array, "C K"],
  decay: Float[Array, "K"],
) -> AffineChunk:
  """A chunk that writes its values and takes `p_t = M_{t-1} c_t` away.

  Args:
    early, query: c and r as they ask the memory before the chunk.
    value: v.
    finds, lower: What c finds of each value, and of each p taken away.
    reads, rereads: The same of r.
    key, replaced: Where values and p stand at the end of the chunk.
    decay: Of the memory, over the whole chunk.
  """
  solve = unit_lower_inverse(lower)
  chunk = affine_delta_chunk(
    query=query,
    scores=rereads,
    lookup=matmul(solve, early),
    inserted=-matmul(solve, matmul(finds, value)),
    key=replaced,
    decay=decay,
  )
  return chunk._replace(
    own=chunk.own + matmul(reads, value),
    write=chunk.write + matmul(key.T, value),
  )


def _recurrent(
  tokens: _Tokens,
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
    erased: Array,
    rate: Array,
    log_decay: Array,
  ) -> tuple[Array, Array]:
    found = jnp.einsum("bhvk,bhk->bhv", memory, erased, precision=HIGHEST)
    new = memory * jnp.exp(log_decay)[..., None, :]
    new = new - found[..., None] * (rate * erased)[..., None, :]
    new = new + value[..., None] * key[..., None, :]
    return new, jnp.einsum("bhvk,bhk->bhv", new, query, precision=HIGHEST)

  y, memory = scan_tokens(
    token,
    memory,
    tuple(tokens),
    restart=restart,
    valid=valid,
    dtype=memory.dtype,
  )
  return y.astype(tokens.value.dtype), memory
