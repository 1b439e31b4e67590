"""Per-token gradients at fixed weights, as rank-one factors.

For every matrix of the network the gradient of token i's objective is
`u_i map(x_i)^T`: an error factor times a feature vector. Both come from one
pass through the network with a recording `linear` and one pull-back, so no
gradient of the size of the weights is formed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.memory import bounds, gates
from atlas_jax.memory.config import Memory
from atlas_jax.memory.numerics import matmul, safe_norm

Weights = dict[str, Float[Array, "n d"]]


class Carry(NamedTuple):
  """What one head hands from chunk to chunk.

  Attributes:
    weights, momentum: at the chunk's start; momentum is empty without one.
    tail_key, tail_value: the W - 1 tokens before the chunk.
    seen: how many of them are real, counted from the newest.
  """

  weights: Weights
  momentum: Weights
  tail_key: Float[Array, "tail k"]
  tail_value: Float[Array, "tail v"]
  seen: Int[Array, ""]


class Tokens(NamedTuple):
  """Inputs of one chunk of one head."""

  query: Float[Array, "b k"]
  key: Float[Array, "b k"]
  value: Float[Array, "b v"]
  gates: gates.Gates


class Factors(NamedTuple):
  """Gradients of the window's tokens at the chunk-start weights.

  Attributes:
    x: input of every matrix before its lift, [t, inputs].
    u: error factor of every matrix, shortened by the bound, [t, rows].
    clip: the factor by which it was shortened.
    gain: size of the unshortened error factor per unit of output error.
    loss: inner objective before the chunk's writes.
  """

  x: dict[str, Float[Array, "t n"]]
  u: dict[str, Float[Array, "t m"]]
  clip: Float[Array, "t"]
  gain: dict[str, Float[Array, "t"]]
  loss: Float[Array, "t"]


def factors(
  memory: Memory, shared, weights: Weights, key: Array, value: Array
) -> Factors:
  """Error and feature factors of tokens [t] at fixed weights."""
  table = memory.entries(key.shape[-1], value.shape[-1])

  def predict(shifts):
    inputs = {}

    def record(name: str, x: Array) -> Array:
      inputs[name] = x
      lift = table[name].lift
      features = lift.map(x, shared["features"])
      return matmul(features, weights[name].T) + shifts[name]

    y = memory.network.apply(record, key, memory.features, shared)
    return y, inputs

  zeros = {
    name: jnp.zeros((key.shape[0], entry.rows), key.dtype)
    for name, entry in table.items()
  }
  y, pull, x = jax.vjp(predict, zeros, has_aux=True)

  def objective(y):
    loss = memory.objective(y, value)
    return jnp.sum(loss), loss

  error, loss = jax.grad(objective, has_aux=True)(y)
  (u,) = pull(error)
  bound = memory.limits
  free = bound.error_clip is None and bound.budget is None
  if free or memory.orthogonalises:
    return Factors(x, u, jnp.ones_like(loss), {}, loss)
  size = gradient_size(table, shared, x, u)
  clip = bounds.clip_scale(bound, size, value.shape[-1])
  gain = {name: bounds.gain(u[name], error) for name in u}
  u = {name: clip[:, None] * factor for name, factor in u.items()}
  return Factors(x, u, clip, gain, loss)


def gradient_size(table, shared, x, u) -> Float[Array, "t"]:
  """Norm of each token's gradient over all matrices."""
  parts = []
  for name, entry in table.items():
    features = entry.lift.map(x[name], shared["features"])
    parts.append(safe_norm(u[name], -1) * safe_norm(features, -1))
  return safe_norm(jnp.concatenate(parts, -1), -1)[..., 0]


def prepare(memory: Memory, params, key_width: int, dtype):
  """Outer parameters as a chunk wants them, in the state's type."""
  features = jax.tree.map(lambda p: p.astype(dtype), params["features"])
  shared = {"features": memory.features.prepare(features, key_width)}
  if "norm" in params:
    shared["norm"] = jax.tree.map(lambda p: p.astype(dtype), params["norm"])
  return shared
