"""The matrices that turn a chunk's gradients into its momenta and weights.

With decays `La`, `Lt` (products of alpha, theta between two tokens) and the
banded window matrix `Gamma`, the shares of token i's gradient in the momentum
and the weights after token t are `A = Lt diag(eta) Gamma` and `C = La A`
(arXiv 2505.23735, Eq. 16 and 34-39).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.memory import bounds, gates
from atlas_jax.memory.config import Memory
from atlas_jax.memory.factors import Factors
from atlas_jax.memory.networks import Entry
from atlas_jax.memory.numerics import matmul, safe_norm


class Coefficients(NamedTuple):
  """How much of everything is in the state after each token of the chunk.

  Attributes:
    momentum: A, share of token i's gradient in S_t.
    momentum_start: share of S_0 in S_t.
    weight: C, share of token i's gradient in W_t, per decay group.
    weight_start: share of W_0 in W_t, per decay group.
    weight_momentum: share of S_0 in W_t, per decay group (f).
    decay: products of decays between two tokens, per decay group.
    position: what `rate_by_position` multiplies A and C by (already done).
    scale: what the bound's budget divides A and C by (already done).
  """

  momentum: Float[Array, "b t"]
  momentum_start: Float[Array, "b"]
  weight: Float[Array, "g b t"]
  weight_start: Float[Array, "g b"]
  weight_momentum: Float[Array, "g b"]
  decay: Float[Array, "g b b"]
  position: Float[Array, "b"]
  scale: Float[Array, "b"]


def coefficients(
  memory: Memory,
  shared,
  table: dict[str, Entry],
  gate: gates.Gates,
  seen: Int[Array, ""],
  factor: Factors,
) -> Coefficients:
  """The matrices A and C of one chunk, with the bound's budget applied."""
  window = gates.window_matrix(gate.window, seen)
  if memory.retention.groups:
    log_decay = gate.log_decay.T
  else:
    log_decay = jnp.zeros((1, gate.rate.shape[0]), gate.rate.dtype)
  decay = jax.vmap(gates.decay_products)(log_decay)
  weight_start = jax.vmap(gates.decay_from_start)(log_decay)
  if memory.has_momentum:
    keep = gates.decay_products(gate.log_momentum)
    momentum_start = gates.decay_from_start(gate.log_momentum)
    if memory.orthogonalises:
      momentum = matmul(keep, window)
    else:
      rate = momentum_rate(memory, gate)
      momentum = matmul(keep, rate[:, None] * window)
    weight_momentum = matmul(decay, momentum_start[:, None])[..., 0]
  else:
    momentum = gate.rate[:, None] * window
    momentum_start = jnp.zeros_like(gate.rate)
    weight_momentum = jnp.zeros_like(weight_start)
  weight = matmul(decay, momentum)
  position = jnp.ones_like(gate.rate)
  if memory.rate_by_position:
    position = position_factors(shared["position"])
    momentum = position[:, None] * momentum
    weight = position[None, :, None] * weight
  if has_budget(memory):
    growth = _growth(memory, shared, table, gate.rate, window, seen, factor)
    scale = jnp.maximum(1.0, position * growth)
    momentum = momentum / scale[:, None]
    weight = weight / scale[None, :, None]
  else:
    scale = jnp.ones_like(gate.rate)
  return Coefficients(
    momentum,
    momentum_start,
    weight,
    weight_start,
    weight_momentum,
    decay,
    position,
    scale,
  )


def position_factors(learned: Float[Array, "b"]) -> Float[Array, "b"]:
  """`max(0, 1 / i + p_i)` for the i-th token of a chunk, from 1 on."""
  place = jax.lax.broadcasted_iota(learned.dtype, (1, *learned.shape), 1)[0]
  return jnp.maximum(1.0 / (place + 1.0) + learned, 0.0)


def has_budget(memory: Memory) -> bool:
  """Whether the summed step of a chunk is limited (see `bounds`)."""
  bound = memory.bound
  limited = bound is not None and bound.budget is not None
  return limited and not memory.orthogonalises and memory.objective.curved


def momentum_rate(memory: Memory, gate: gates.Gates) -> Float[Array, "b"]:
  """Step sizes inside the momentum: damped by 1 - theta under the bound."""
  if memory.bound is None or not memory.bound.damp_momentum:
    return gate.rate
  return gate.rate * (1.0 - jnp.exp(gate.log_momentum))


def _growth(
  memory, shared, table, rate, window, seen, factor
) -> Float[Array, "b"]:
  """`s_t` of every row, see `bounds`."""
  size, columns = window.shape
  written = matmul(
    gates.lower_triangle(size, rate.dtype), rate[:, None] * window
  )
  if memory.bound.budget == "diagonal":
    own = own_overlap(shared, table, factor)
    return matmul(written, own[:, None])[:, 0]
  pairs = overlap(shared, table, factor, factor)
  # Token t may see every filled column up to its own, which is t + tail.
  tail = columns - size
  row = jax.lax.broadcasted_iota(jnp.int32, (size, columns), 0)
  column = jax.lax.broadcasted_iota(jnp.int32, (size, columns), 1)
  reach = (column <= row + tail) & (column >= tail - seen)
  return bounds.growth(written, pairs, reach.astype(rate.dtype))


def own_overlap(shared, table, factor: Factors) -> Float[Array, "t"]:
  """The diagonal of `overlap`."""
  total = jnp.zeros_like(factor.clip)
  for name, entry in table.items():
    features = entry.lift.map(factor.x[name], shared["features"])
    length = safe_norm(features, -1)[..., 0] * factor.gain[name]
    total = total + jnp.square(length)
  return factor.stiffness * total


def overlap(shared, table, one: Factors, two: Factors) -> Float[Array, "n t"]:
  """`G[i, j]`: how much a unit write at token i can move token j's error.

  For every matrix the products of the tokens' features, times the sizes of
  their error factors per unit of output error, times the objective's
  curvature (see `bounds`).
  """
  total = jnp.zeros((one.clip.shape[0], two.clip.shape[0]), one.clip.dtype)
  for name, entry in table.items():
    kernel = entry.lift.kernel(one.x[name], two.x[name], shared["features"])
    gains = one.gain[name][:, None] * two.gain[name][None, :]
    total = total + jnp.abs(kernel) * gains
  root = jnp.sqrt(one.stiffness)[:, None] * jnp.sqrt(two.stiffness)[None, :]
  return root * total
