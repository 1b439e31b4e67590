"""The textbook parallel form of a chunk, by associative scans.

Every token's momentum and weights are materialised and combined by
`jax.lax.associative_scan`, as Titans describes it (arXiv 2501.00663, section
3.2). The numbers equal those of `dual.py`; the memory is the chunk's length
times the weights. XLA only.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory import gates
from atlas_jax.memory.coefficients import Coefficients, momentum_rate
from atlas_jax.memory.config import Memory
from atlas_jax.memory.dual import block_rates, handed_on
from atlas_jax.memory.factors import Carry, Factors, Weights, working
from atlas_jax.memory.networks import Entry
from atlas_jax.memory.newton_schulz import newton_schulz
from atlas_jax.memory.numerics import matmul


def associative(
  memory: Memory,
  shared,
  table: dict[str, Entry],
  carry: Carry,
  frozen: Weights,
  gate: gates.Gates,
  factor: Factors,
  c: Coefficients,
):
  """State after the chunk, and the read-out at every token's weights."""
  every_token, stored, momentum = {}, {}, {}
  for name, entry in table.items():
    features = entry.lift.map(factor.x[name], shared["features"])
    gradient = factor.u[name][:, :, None] * features[:, None, :]
    kept, moved, momentum[name] = _matrix(
      memory, carry, name, gate, gradient, c
    )
    stored[name] = kept[-1] * carry.weights[name] - moved[-1]
    scale = memory.retention.write_scale(carry.weights[name])
    every_token[name] = kept * frozen[name][None] - scale * moved
  if not memory.has_momentum:
    momentum = {}
  weights, momentum = handed_on(
    memory, shared, stored, momentum, carry.tail_value.shape[-1]
  )
  last = working(memory, weights)
  for name, w in every_token.items():
    if memory.read == "before":
      w = jnp.concatenate([frozen[name][None], w[:-1]])
    else:
      w = jnp.concatenate([w[:-1], last[name][None]])
    every_token[name] = w

  def linear(name: str, x: Array) -> Array:
    features = table[name].lift.map(x, shared["features"])
    return matmul(every_token[name], features[:, :, None])[..., 0]

  return weights, momentum, linear


def _matrix(
  memory: Memory,
  carry: Carry,
  name: str,
  gate: gates.Gates,
  gradient: Float[Array, "t n d"],
  c: Coefficients,
) -> tuple[
  Float[Array, "b n #d"], Float[Array, "b n d"], Float[Array, "n d"] | None
]:
  """Kept fractions and moves of one matrix at every token, and its momentum.

  The weights are what is kept of those at the chunk's start, less the move.
  """
  start = carry.weights[name]
  window = gates.window_matrix(gate.window, carry.seen)
  summed = matmul(window, gradient.reshape(gradient.shape[0], -1))
  summed = summed.reshape(-1, *start.shape)
  decay = _row_decay(memory, gate, start.shape[0])
  keep = jnp.exp(jnp.maximum(gate.log_momentum, gates.LOWEST_LOG))
  keep = keep[:, None, None]
  share = (c.position / c.scale)[:, None, None]
  if not memory.has_momentum:
    own = gate.rate[:, None, None] * summed
    kept, written = _recur(decay, own)
    return kept, share * written, None
  if memory.orthogonalises:
    kept, s = _recur(keep, summed)
    s = s + kept * carry.momentum[name][None]
    kept, written = _recur(decay, _muon_steps(memory, gate, c, s))
    return kept, written, s[-1]
  own = momentum_rate(memory, gate)[:, None, None] * summed
  kept, s_own = _recur(keep, own)
  s_start = kept * carry.momentum[name][None]
  # The budget divides what the chunk itself writes, so that part is scanned
  # apart from what the chunk found.
  kept, written = _recur(decay, s_own)
  _, carried = _recur(decay, s_start)
  return kept, carried + share * written, (s_start + share * s_own)[-1]


def _recur(
  decay: Float[Array, "b n #d"], add: Float[Array, "b n d"]
) -> tuple[Float[Array, "b n #d"], Float[Array, "b n d"]]:
  """`x_t = decay_t x_{t-1} + add_t` from zero, and the products of decays."""

  def combine(left, right):
    a, x = left
    b, y = right
    return a * b, b * x + y

  decay = jnp.broadcast_to(decay, (add.shape[0], *decay.shape[1:]))
  return jax.lax.associative_scan(combine, (decay, add))


def _row_decay(
  memory: Memory, gate: gates.Gates, rows: int
) -> Float[Array, "b n 1"]:
  """Kept fraction of every output row at every token."""
  groups = memory.retention.groups
  if not groups:
    return jnp.ones((gate.rate.shape[0], 1, 1), gate.rate.dtype)
  decay = jnp.exp(jnp.maximum(gate.log_decay, gates.LOWEST_LOG))
  return jnp.repeat(decay, rows // groups, axis=1)[..., None]


def _muon_steps(
  memory: Memory, gate: gates.Gates, c: Coefficients, s: Float[Array, "b n d"]
) -> Float[Array, "b n d"]:
  """The orthogonalised step at block ends, zero at the tokens between."""
  every = memory.muon.every
  rate = jnp.repeat(block_rates(memory, c, gate.rate), every, axis=1)
  groups, size = rate.shape
  ends = (jnp.arange(size, dtype=jnp.int32) % every == every - 1).astype(
    s.dtype
  )
  rows = jnp.repeat(rate.T, s.shape[1] // groups, axis=1)[..., None]
  return rows * ends[:, None, None] * newton_schulz(s, memory.muon)
