"""A chunk that takes one step at its end and is read at its start.

No token's weights differ from those of the chunk's start, so nothing of the
size of the chunk squared is formed and chunks may have thousands of tokens
(arXiv 2505.23884):

  S <- m S + sum_i eta_i u_i map(x_i)^T,    W <- a W - NewtonSchulz(S),

with m the mean of the chunk's momentum gates and a the product of its decays.
"""

import jax.numpy as jnp

from atlas_jax.memory import gates
from atlas_jax.memory.config import Memory
from atlas_jax.memory.dual import handed_on, scale_rows
from atlas_jax.memory.factors import Carry, Factors, plain
from atlas_jax.memory.networks import Entry
from atlas_jax.memory.newton_schulz import newton_schulz
from atlas_jax.memory.numerics import matmul
from atlas_jax.memory.optimizers import ChunkMuon


def large_chunk(
  memory: Memory,
  shared,
  table: dict[str, Entry],
  carry: Carry,
  gate: gates.Gates,
  factor: Factors,
):
  """State after the chunk, and the read-out at its start's weights."""
  optimizer = memory.optimizer
  if not isinstance(optimizer, ChunkMuon) or gate.matrix_rate is None:
    raise TypeError(f"{optimizer} does not step once a chunk")
  keep = jnp.mean(jnp.exp(gate.log_momentum))
  token = gate.rate * gate.window[:, 0]
  weights, momentum = {}, {}
  for place, (name, entry) in enumerate(table.items()):
    features = entry.lift.map(factor.x[name], shared["features"])
    share = token * gate.matrix_rate[:, place]
    moved = matmul((share[:, None] * factor.u[name]).T, features)
    momentum[name] = keep * carry.momentum[name] + moved
    kept = carry.weights[name]
    if memory.retention.groups:
      log_decay = jnp.maximum(gate.log_decay, gates.LOWEST_LOG)
      kept = scale_rows(jnp.exp(jnp.sum(log_decay, axis=0)), kept)
    weights[name] = kept - newton_schulz(momentum[name], optimizer)
  weights, momentum = handed_on(
    memory, shared, weights, momentum, carry.tail_value.shape[-1]
  )
  return weights, momentum, plain(shared, table, carry.weights)
