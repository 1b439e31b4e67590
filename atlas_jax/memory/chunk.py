"""One chunk of one head: the only place where the update is written.

Gradients of all tokens of a chunk, and of the W - 1 tokens before it, are taken
at the weights of the chunk's start (arXiv 2505.23735, section 3.3), where each
is a rank-one pair: error factor u_i times feature vector of x_i. With the
matrices A and C of `Coefficients` the momentum and weights after token t are

  S_t = bt_t S_0 + sum_i A[t, i] u_i map(x_i)^T
  W_t = aa_t W_0 - f_t S_0 - sum_i C[t, i] u_i map(x_i)^T      (no Muon)

and a query is read without ever forming W_t (`dual`):

  W_t map(q) = aa_t W_0 map(q) - f_t S_0 map(q) - sum_i C[t, i] k(q, x_i) u_i.

Muon's step is not linear in S, so one matrix per orthogonalised step is formed.
A chunk that steps only once is simpler (`large_chunk`). Where the retention
stores something else than the weights, W_0 above are those it stands for.
Everything here is matmuls, iota masks and elementwise functions.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory.associative import associative
from atlas_jax.memory.coefficients import coefficients
from atlas_jax.memory.config import Memory
from atlas_jax.memory.dual import dual, dual_muon
from atlas_jax.memory.factors import (
  Carry,
  Tokens,
  factors,
  working,
  write_scales,
)
from atlas_jax.memory.large_chunk import large_chunk


def chunk(
  memory: Memory, shared, carry: Carry, tokens: Tokens, form: str = "dual"
) -> tuple[Carry, tuple[Float[Array, "b v"], Float[Array, "b"]]]:
  """Reads and writes one chunk.

  Args:
    memory: the memory's value.
    shared: prepared outer parameters (`prepare`), with those of the head
      (`prepare_heads`).
    carry: state at the chunk's start.
    tokens: one chunk of inputs in the state's type.
    form: "dual" or "associative" (same numbers; the latter materialises every
      token's weights).

  Returns:
    the carry after the chunk; the outputs, and the inner loss of each token
    before the chunk was written.
  """
  size, tail = tokens.key.shape[0], carry.tail_key.shape[0]
  table = memory.entries(tokens.key.shape[-1], tokens.value.shape[-1])
  keys, values = tokens.key, tokens.value
  if tail:  # a kernel knows no empty arrays
    keys = jnp.concatenate([carry.tail_key, keys])
    values = jnp.concatenate([carry.tail_value, values])
  gate = tokens.gates
  frozen = working(memory, carry.weights)
  shown = write_scales(memory, carry.weights)
  factor = factors(memory, shared, frozen, keys, values, gate.threshold, shown)
  if memory.steps_once:
    weights, momentum, linear = large_chunk(
      memory, shared, table, carry, gate, factor
    )
  else:
    c = coefficients(memory, shared, table, gate, carry.seen, factor)
    if form == "associative":
      run = associative
    else:
      run = dual_muon if memory.orthogonalises else dual
    weights, momentum, linear = run(
      memory, shared, table, carry, frozen, gate, factor, c
    )
  y = memory.network.apply(linear, tokens.query, memory.features, shared)
  after = carry._replace(weights=weights, momentum=momentum)
  if tail:
    after = after._replace(
      tail_key=keys[size:],
      tail_value=values[size:],
      seen=jnp.minimum(carry.seen + size, tail),
    )
  return after, (y, factor.loss[tail:])
