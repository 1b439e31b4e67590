"""One block of tokens of one head: its writes, and what its queries read.

Nothing of size tokens x tokens exists beyond the block's own rows. What earlier
tokens wrote is in two forms: `Columns` of the exponential part, each with its
share `amount * exp(log)` that all rows see, times the row's decay since the
block began; and the running sum of the outer matrix.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.attention.exponential_config import ExponentialMemory
from atlas_jax.memory import gates
from atlas_jax.memory.config import state_dtype
from atlas_jax.memory.networks import ACTIVATIONS
from atlas_jax.memory.numerics import HIGHEST, matmul, safe_norm

# A column whose log share is below this has been forgotten altogether, by a
# decay of exactly 0 or by the beginning of another document.
GONE = gates.LOWEST_LOG / 2

# Largest exponent relative to the largest share of a row. It is reached by
# columns of amount 0 only, whose share is 0 at any exponent: it limits the
# slope by the amount. The other is beyond any float32 amount worth the name.
_LARGEST_CLOSED = 20.0
_LARGEST_OPEN = 80.0


class Vectors(NamedTuple):
  """What a memory writes of tokens; with it slopes can be taken anew.

  Attributes:
    key, value: what is to be remembered.
    score_key: the vector of the kernel.
  """

  key: Float[Array, "*batch E K"]
  score_key: Float[Array, "*batch E K"]
  value: Float[Array, "*batch E V"]


class Columns(NamedTuple):
  """What tokens wrote into the exponential part.

  Attributes:
    key: vectors of the kernel.
    payload: what a token adds to z (and, with `attends`, its value).
    log: log of the decays since the token's last write, as of now [M] or by
      row [n, M]; below `GONE` it is forgotten.
    amount: its writes, decayed up to the last of them; of the same shape.
  """

  key: Float[Array, "M K"]
  payload: Float[Array, "M D"]
  log: Float[Array, "*n M"]
  amount: Float[Array, "*n M"]


class Factors(NamedTuple):
  """The rank-one writes of tokens at some weights: u h^T and g phi*(k)^T.

  Attributes:
    payload: g, with `attends` followed by the value; u if linear.
    error: u, the negative slope of the objective by the prediction.
    hidden: h; of width 0 if linear.
  """

  payload: Float[Array, "E D"]
  error: Float[Array, "E V"]
  hidden: Float[Array, "E h"]


class Fast(NamedTuple):
  """Running sums over all tokens of a document.

  Attributes:
    matrix: sum of C u h^T.
    mass: sum of C.
    log_kept: log of what is left of the starting weights; 0 where they stay.
  """

  matrix: Float[Array, "V h"]
  mass: Float[Array, ""]
  log_kept: Float[Array, ""]


class Tables(NamedTuple):
  """The shares of the writes of one block's tokens, from gates alone.

  Columns are the window - 1 tokens before the block, for what this block's
  steps write of them, and its n tokens.

  Attributes:
    log, amount: as of `Columns`, after each row.
    share: `amount * exp(log)`, the C of this block's steps.
    head: log of the decays from the block's start to each row, included.
  """

  log: Float[Array, "n E"]
  amount: Float[Array, "n E"]
  share: Float[Array, "n E"]
  head: Float[Array, "n"]


def tables(
  log_decay: Float[Array, "n"],
  rate: Float[Array, "n"],
  window: Float[Array, "n W"],
) -> Tables:
  """The shares of one block.

  Args:
    log_decay: log alpha; `LOWEST_LOG` where nothing before is seen.
    rate: eta.
    window: gamma, 0 where it would look before the document's first token.
  """
  size, width = window.shape
  columns = size + width - 1
  log_decay = jnp.maximum(log_decay, gates.LOWEST_LOG)
  between = gates.log_decay_products(log_decay)
  lower = gates.lower_triangle(size, log_decay.dtype)
  gamma = gates.window_matrix(window, jnp.int32(width - 1))
  share = matmul(jnp.exp(between) * lower, rate[:, None] * gamma)
  # Column c is the token width - 1 - c places before the block's first, whose
  # last write is that of row c: it only decays from there on.
  row = jax.lax.broadcasted_iota(jnp.int32, (size, columns), 0)
  column = jax.lax.broadcasted_iota(jnp.int32, (size, columns), 1)
  settled = jnp.pad(jnp.diagonal(share), (0, width - 1))
  amount = jnp.where(column <= row, settled[None], share)
  log = jnp.pad(between, ((0, 0), (0, width - 1)))
  log = jnp.where(column > row + width - 1, gates.LOWEST_LOG, log)
  head = matmul(lower, log_decay[:, None])[:, 0]
  return Tables(log, amount, share, head)


def weighted(
  memory: ExponentialMemory,
  query: Float[Array, "n G K"],
  columns: Sequence[Columns],
) -> Float[Array, "n G D"]:
  """`sum_i p_i payload_i` for every query; 0 where there is nothing.

  Args:
    memory: says whether shares are divided by their sum.
    query: vectors of the kernel.
    columns: all that a query may see, with logs and amounts by row.
  """
  dtype = state_dtype(query.dtype)
  scores = [
    jnp.einsum(
      "ngk,mk->ngm",
      query,
      some.key.astype(query.dtype),
      precision=HIGHEST,
      preferred_element_type=dtype,
    )
    + some.log[:, None]
    for some in columns
  ]
  if memory.normalised:
    peak = jnp.full(query.shape[:2], -jnp.inf, dtype)
    for some, score in zip(columns, scores, strict=True):
      seen = (some.amount > 0) & (some.log > GONE)
      size = jnp.log(jnp.where(some.amount > 0, some.amount, 1.0))
      top = jnp.where(seen[:, None], score + size[:, None], -jnp.inf)
      peak = jnp.maximum(peak, jnp.max(top, axis=-1, initial=-jnp.inf))
    peak = jax.lax.stop_gradient(jnp.where(peak > -jnp.inf, peak, 0.0))
    scores = [score - peak[..., None] for score in scores]
  total = jnp.zeros(query.shape[:2], dtype)
  out = jnp.zeros((), dtype)
  for some, score in zip(columns, scores, strict=True):
    if memory.normalised:
      limit = jnp.where(some.amount > 0, _LARGEST_OPEN, _LARGEST_CLOSED)
      score = jnp.minimum(score, limit.astype(dtype)[:, None])
    share = some.amount[:, None] * jnp.exp(score)
    share = jnp.where((some.log > GONE)[:, None], share, 0.0)
    total = total + jnp.sum(share, axis=-1)
    out = out + jnp.einsum(
      "ngm,md->ngd",
      share,
      some.payload.astype(dtype),
      precision=HIGHEST,
    )
  if memory.normalised:
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
  return out


def factors(
  memory: ExponentialMemory,
  params: dict[str, Array],
  vectors: Vectors,
  past: Sequence[Columns] = (),
  fast: Fast | None = None,
) -> Factors:
  """What each token writes, at weights that all of them share.

  Args:
    memory: which memory.
    params: starting weights of the head.
    vectors: the tokens.
    past: the exponential part of the weights; none: that of the start.
    fast: their sums; None: those of the start.
  """
  key, score_key, value = vectors
  dtype = state_dtype(value.dtype)
  wide_value = value.astype(dtype)
  z = jnp.zeros((), dtype)
  if past:
    now = jnp.zeros((key.shape[0],), dtype)
    z = weighted(memory, score_key[:, None], _by_row(past, now))[:, 0]
  if memory.linear:
    y = jnp.broadcast_to(z, wide_value.shape)
    error = _slope(memory, y, wide_value)
    hidden = jnp.zeros((value.shape[0], 0), dtype)
    slope = error
  else:
    kept = _kept(memory, None if fast is None else fast.log_kept, dtype)
    if past:
      z = z[:, : params["in"].shape[0]]
    z = z + kept * _first(params, key.astype(dtype))
    hidden, pull = jax.vjp(ACTIVATIONS[memory.activation], z)
    matrix = kept * params["out"].astype(dtype)
    if fast is not None:
      matrix = matrix + fast.matrix / _divisor(memory, fast.mass)
    y = key.astype(dtype) + matmul(hidden, matrix.T)
    error = _slope(memory, y, wide_value)
    (slope,) = pull(matmul(error, matrix))
  if memory.error_clip is not None:
    limit = memory.error_clip * math.sqrt(value.shape[-1])
    length = _write_length(memory, score_key, error, hidden, slope)
    shrink = limit / jnp.maximum(length, limit)
    error, slope = error * shrink, slope * shrink
  payload = slope
  if memory.attends:
    payload = jnp.concatenate([slope, wide_value], axis=-1)
  return Factors(payload.astype(value.dtype), error, hidden)


def read(
  memory: ExponentialMemory,
  params: dict[str, Array],
  lam: Float[Array, ""],
  query: Float[Array, "n G K"],
  score_query: Float[Array, "n G K"],
  past: Sequence[Columns],
  score_key: Float[Array, "E K"],
  own: Factors,
  table: Tables,
  fast: Fast,
  log_kept: Float[Array, "n"],
) -> Float[Array, "n G V"]:
  """Outputs of a block's tokens, each after its own write.

  Args:
    memory: which memory.
    params: starting weights of the head.
    lam: with `attends`, the share of the deep part.
    query, score_query: the queries.
    past: what earlier blocks wrote, as of the block's start.
    score_key, own, table: what this block writes.
    fast: sums before the block.
    log_kept: log of what is left of the starting weights at each row.
  """
  dtype = fast.matrix.dtype
  columns = _by_row(past, table.head)
  columns.append(Columns(score_key, own.payload, table.log, table.amount))
  z = weighted(memory, score_query, columns)
  if memory.linear:
    return z
  hidden = params["in"].shape[0]
  z, mean = z[..., :hidden], z[..., hidden:]
  kept = _kept(memory, log_kept, dtype)
  kept = jnp.broadcast_to(kept, log_kept.shape)[:, None, None]
  wide_query = query.astype(dtype)
  z = z + kept * _first(params, wide_query)
  h = ACTIVATIONS[memory.activation](z)
  since = jnp.exp(table.head)
  mass = since * fast.mass + jnp.sum(table.share, axis=-1)
  kernel = jnp.einsum("ngh,eh->nge", h, own.hidden, precision=HIGHEST)
  written = since[:, None, None] * matmul(h, fast.matrix.T) + matmul(
    table.share[:, None] * kernel, own.error
  )
  written = written / _divisor(memory, mass)[..., None, None]
  y = wide_query + written
  y = y + kept * matmul(h, params["out"].astype(dtype).T)
  if not memory.attends:
    return y
  return (1 - lam) * mean + lam * y


def advance(
  fast: Fast,
  own: Factors,
  share: Float[Array, "E"],
  head: Float[Array, ""],
  log_kept: Float[Array, ""],
) -> Fast:
  """The sums after a block, given its last row of shares and decays."""
  since = jnp.exp(head)
  matrix = since * fast.matrix + matmul(
    (share[:, None] * own.error).T, own.hidden
  )
  return Fast(matrix, since * fast.mass + jnp.sum(share), log_kept)


def _by_row(past: Sequence[Columns], head: Float[Array, "n"]) -> list[Columns]:
  """Columns as of a block's start for rows that are so much later."""
  return [
    some._replace(
      log=head[:, None] + some.log[None],
      amount=jnp.broadcast_to(
        some.amount[None], (head.shape[0], some.amount.shape[0])
      ),
    )
    for some in past
  ]


def _slope(
  memory: ExponentialMemory, y: Float[Array, "E V"], value: Float[Array, "E V"]
) -> Float[Array, "E V"]:
  """u: the negative slope of every token's objective by its prediction."""
  return -jax.grad(lambda y: jnp.sum(memory.objective(y, value)))(y)


def _first(
  params: dict[str, Array], x: Float[Array, "*n K"]
) -> Float[Array, "*n h"]:
  """z_0, the starting weights on the features of degree 0 and 1."""
  bias = params["bias"].astype(x.dtype)
  product = matmul(x, params["in"].astype(x.dtype).T)
  return product + jnp.broadcast_to(bias, product.shape)


def _kept(memory: ExponentialMemory, log_kept: Array | None, dtype) -> Array:
  """What is left of the starting weights."""
  if not memory.forgets_start or log_kept is None:
    return jnp.ones((), dtype)
  return jnp.exp(log_kept)


def _divisor(
  memory: ExponentialMemory, mass: Float[Array, "*n"]
) -> Float[Array, "*n"]:
  """What the outer matrix's sum is divided by."""
  return jnp.maximum(mass, 1.0) if memory.normalised else jnp.ones_like(mass)


def _write_length(
  memory: ExponentialMemory,
  score_key: Float[Array, "E K"],
  error: Float[Array, "E V"],
  hidden: Float[Array, "E h"],
  slope: Float[Array, "E D"],
) -> Float[Array, "E 1"]:
  """Length of each token's write over both matrices, [E, 1].

  Normalised, the features count as of length 1: no share is above 1.
  """
  inner = slope
  if not memory.normalised:
    wide = score_key.astype(slope.dtype)
    inner = slope * jnp.exp(jnp.sum(jnp.square(wide), -1, keepdims=True) / 2)
  if memory.linear:
    return safe_norm(inner, -1)
  outer = error * safe_norm(hidden, -1)
  return safe_norm(jnp.concatenate([inner, outer], axis=-1), -1)
