"""The Mesa layer's memory: the best matrix for all tokens so far.

`y_t = H_t (G_t + Diag(l))^{-1} q_t`, `G_t = a_t G_{t-1} + b_t k_t k_t^T`,
`H_t = a_t H_{t-1} + b_t v_t k_t^T`

(arXiv 2506.05233, Eq. 7 and 8, where G is called H and H is G) reads at q_t the
M that minimises `sum_i w_i |M k_i - v_i|^2 + tr(M Diag(l) M^T)` over all tokens
up to t, w_i being b_i decayed since i. G_t is never formed for each token:
within a chunk its product with a vector is `G_0 x` decayed plus one pass of
linear attention, and conjugate gradients need nothing else.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import state_dtype
from atlas_jax.memory.dispatch import resolve
from atlas_jax.memory.gates import decay_from_start, decay_products
from atlas_jax.memory.numerics import HIGHEST, matmul
from atlas_jax.recurrences.chunks import (
  check_chunk,
  check_shapes,
  marked_decay,
  scan_chunks,
  without_padding,
)
from atlas_jax.recurrences.conjugate_gradients import solve_symmetric
from atlas_jax.recurrences.tokens import scan_tokens


class MesaState(NamedTuple):
  """What later tokens need of all earlier ones; rows are independent.

  Attributes:
    covariance: G, of keys.
    correlation: H, of values with keys.
  """

  covariance: Float[Array, "B H K K"]
  correlation: Float[Array, "B H V K"]


class _Tokens(NamedTuple):
  """Tokens [B, T, H, ...], or those of one chunk of one row [C, ...]."""

  query: Float[Array, "C K"]
  key: Float[Array, "C K"]
  value: Float[Array, "C V"]
  rate: Float[Array, "C"]
  log_decay: Float[Array, "C"]


def mesa(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  rate: Float[Array, "B T H"],
  log_decay: Float[Array, "B T H"],
  ridge: Float[Array, "H K"],
  state: MesaState | None = None,
  *,
  restart: Bool[Array, "B T"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  chunk: int = 64,
  tolerance: float | None = None,
  iterations: int | None = None,
  implementation: str = "auto",
) -> tuple[Float[Array, "B T H V"], MesaState]:
  """Reads, at every token, the least-squares map from keys to values.

  Args:
    query, key, value: Tokens, of any float type.
    rate: b >= 0, the weight of each token.
    log_decay: log a <= 0; -inf forgets everything.
    ridge: l > 0, per head and key channel.
    state: G and H before the first token; None: zeros.
    restart: Tokens that begin a document and see nothing before them.
    valid: False marks padding, which writes and forgets nothing.
    chunk: Tokens that are solved side by side; changes no numbers beyond the
      tolerance.
    tolerance: Of the residual's length, relative to that of q (for gradients,
      to that of the slope). None: 1e-6, in float64 1e-13. Rounding keeps
      float32 above about 1e-7 (|G| + l) / l, as it does a direct solve.
    iterations: The most for one solve; what has not converged by then stays
      as it is. None: 2 K. (Exact arithmetic needs K at most.)
    implementation: "reference" goes token by token and solves directly, "xla"
      chunk by chunk; "auto" is "xla".

  Returns:
    y in value's type, 0 at padding, and the state after the last token, at
    least float32.

  Raises:
    UserError: A shape is wrong, a limit is not positive, or there is no such
      implementation.
  """
  batch, length, heads, width = query.shape
  values = value.shape[-1]
  leading = (batch, length, heads)
  shapes = ((batch, heads, width, width), (batch, heads, values, width))
  covariance, correlation = (None, None) if state is None else state
  check_shapes(
    {
      "key": (key, (*leading, width)),
      "value": (value, (*leading, values)),
      "rate": (rate, leading),
      "log_decay": (log_decay, leading),
      "ridge": (ridge, (heads, width)),
      "state.covariance": (covariance, shapes[0]),
      "state.correlation": (correlation, shapes[1]),
      "restart": (restart, (batch, length)),
      "valid": (valid, (batch, length)),
    }
  )
  check_chunk(chunk)
  dtype = state_dtype(value.dtype)
  if tolerance is None:
    tolerance = 1e-13 if dtype == jnp.float64 else 1e-6
  if iterations is None:
    iterations = 2 * width
  if tolerance <= 0 or iterations < 1:
    raise UserError(
      f"tolerance {tolerance} and iterations {iterations}: use positive numbers"
    )
  if state is None:
    state = MesaState(*(jnp.zeros(shape, dtype) for shape in shapes))
  state = MesaState(*(x.astype(dtype) for x in state))
  if length == 0:
    return value, state
  ridge = jnp.broadcast_to(ridge.astype(dtype)[None], (batch, heads, width))
  tokens = _Tokens(
    *(
      without_padding(x, valid)
      for x in (query, key, value, rate, log_decay.astype(dtype))
    )
  )
  if resolve(implementation) == "reference":
    return _recurrent(tokens, state, ridge, restart, valid)
  log_decay = marked_decay(tokens.log_decay, restart, valid)
  tokens = tokens._replace(log_decay=log_decay)

  def body(
    carry: tuple[MesaState, Array], chunk: _Chunk
  ) -> tuple[tuple[MesaState, Array], Array]:
    state, ridge = carry
    state, y = _apply(state, ridge, chunk, tolerance, iterations)
    return (state, ridge), y

  (state, _), y = scan_chunks(
    body, (state, ridge), tokens, chunk, prepare=partial(_prepare, dtype=dtype)
  )
  return y.astype(value.dtype), state


class _Chunk(NamedTuple):
  """One chunk of one row.

  Attributes:
    weight: Of each token in the sums of each.
    since_start: Weight of the sums before the chunk in those of each token.
    squares: Its tokens' share of the diagonals of G.
    state: What its tokens add to the sums.
  """

  query: Float[Array, "C K"]
  key: Float[Array, "C K"]
  value: Float[Array, "C V"]
  weight: Float[Array, "C C"]
  since_start: Float[Array, "C 1"]
  squares: Float[Array, "C K"]
  state: MesaState


def _prepare(tokens: _Tokens, dtype: DTypeLike) -> _Chunk:
  """All of a chunk that does not depend on tokens before it."""
  query, key, value, rate, log_decay = (x.astype(dtype) for x in tokens)
  weight = decay_products(log_decay) * rate[None]
  written = weight[-1][:, None] * key
  return _Chunk(
    query=query,
    key=key,
    value=value,
    weight=weight,
    since_start=decay_from_start(log_decay)[:, None],
    squares=matmul(weight, key * key),
    state=MesaState(matmul(written.T, key), matmul(value.T, written)),
  )


def _apply(
  before: MesaState,
  ridge: Float[Array, "K"],
  chunk: _Chunk,
  tolerance: float,
  iterations: int,
) -> tuple[MesaState, Float[Array, "C V"]]:
  """The state after a chunk, and its read-outs."""
  covariance, correlation = before

  def attend(x: Float[Array, "C K"], start: Array, value: Array) -> Array:
    """`(sum_n w_n value_n k_n^T) x_t`, tokens before the chunk included."""
    own = matmul(chunk.weight * matmul(x, chunk.key.T), value)
    return chunk.since_start * matmul(x, start.T) + own

  def operator(x: Float[Array, "C K"]) -> Float[Array, "C K"]:
    return attend(x, covariance, chunk.key) + ridge[None] * x

  diagonal = chunk.since_start * jnp.diagonal(covariance)[None]
  diagonal = diagonal + chunk.squares + ridge[None]
  solution = solve_symmetric(
    operator, chunk.query, diagonal, tolerance=tolerance, iterations=iterations
  )
  y = attend(solution, correlation, chunk.value)
  kept = chunk.since_start[-1:]
  return MesaState(
    *(kept * b + w for b, w in zip(before, chunk.state, strict=True))
  ), y


def _recurrent(
  tokens: _Tokens,
  state: MesaState,
  ridge: Float[Array, "B H K"],
  restart: Bool[Array, "B T"] | None,
  valid: Bool[Array, "B T"] | None,
) -> tuple[Float[Array, "B T H V"], MesaState]:
  """The definition, one token after the other, each solved directly."""
  dtype = ridge.dtype
  lambdas = jnp.eye(ridge.shape[-1], dtype=dtype)[None, None] * ridge[..., None]

  def token(
    state: MesaState,
    query: Array,
    key: Array,
    value: Array,
    rate: Array,
    log_decay: Array,
  ) -> tuple[MesaState, Array]:
    keep = jnp.exp(log_decay)[..., None, None]

    def after(old: Array, left: Array) -> Array:
      write = (rate[..., None] * left)[..., None] * key[..., None, :]
      return keep * old + write

    state = MesaState(after(state[0], key), after(state[1], value))
    solution = jnp.linalg.solve(state.covariance + lambdas, query[..., None])
    y = jnp.matmul(state.correlation, solution, precision=HIGHEST)
    return state, y[..., 0]

  y, state = scan_tokens(
    token,
    state,
    tuple(tokens),
    restart=restart,
    valid=valid,
    dtype=dtype,
  )
  return y.astype(tokens.value.dtype), state
