"""Per-token gradients at fixed weights, as rank-one factors.

For every matrix of the network the gradient of token i's objective is
`u_i map(x_i)^T`: an error factor times a feature vector. Both come from one
pass through the network with a recording `linear` and one pull-back, so no
gradient of the size of the weights is formed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.memory import bounds, gates
from atlas_jax.memory.config import Memory
from atlas_jax.memory.networks import Entry, Linear
from atlas_jax.memory.numerics import matmul, safe_norm

Weights = dict[str, Float[Array, "n d"]]


# Below, the root of a write's scale would have no finite slope.
_LEAST_SHOWN = 1e-30


class Carry(NamedTuple):
  """What one head hands from chunk to chunk.

  Attributes:
    weights, momentum: at the chunk's start, weights as they are stored (see
      `retention`); momentum is empty without one.
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
    stiffness: that factor times the objective's curvature.
    gain: size of the unshortened error factor per unit of output error, times
      the root of how a write shows in the weights (`Retention.write_scale`), as
      the budget multiplies two of them.
    loss: inner objective before the chunk's writes.
  """

  x: dict[str, Float[Array, "t n"]]
  u: dict[str, Float[Array, "t m"]]
  clip: Float[Array, "t"]
  stiffness: Float[Array, "t"]
  gain: dict[str, Float[Array, "t"]]
  loss: Float[Array, "t"]


def factors(
  memory: Memory,
  shared,
  weights: Weights,
  key: Float[Array, "t k"],
  value: Float[Array, "t v"],
  threshold: Float[Array, "t"] | None = None,
  shown: dict[str, Float[Array, ""]] | None = None,
) -> Factors:
  """Error and feature factors of tokens [t] at fixed weights.

  Args:
    memory, shared: the memory and its prepared outer parameters.
    weights: working weights (`working`).
    key, value: tokens.
    threshold: theirs, for a gated objective.
    shown: of a retention that is not linear, see `write_scales`.
  """
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
    loss = memory.objective(y, value, threshold)
    return jnp.sum(loss), loss

  error, loss = jax.grad(objective, has_aux=True)(y)
  (u,) = pull(error)
  bound = memory.limits
  free = bound.error_clip is None and bound.budget is None
  if free or memory.orthogonalises:
    one = jnp.ones_like(loss)
    return Factors(x, u, one, one, {}, loss)
  size = gradient_size(table, shared, x, u)
  clip = bounds.clip_scale(bound, size, value.shape[-1])
  stiffness = clip * memory.objective.curvature(y, value, threshold)
  gain = {name: bounds.gain(u[name], error) for name in u}
  for name, scale in (shown or {}).items():
    gain[name] *= jnp.sqrt(jnp.maximum(scale, _LEAST_SHOWN))
  u = {name: clip[:, None] * factor for name, factor in u.items()}
  return Factors(x, u, clip, stiffness, gain, loss)


def gradient_size(table, shared, x, u) -> Float[Array, "t"]:
  """Norm of each token's gradient over all matrices."""
  parts = []
  for name, entry in table.items():
    features = entry.lift.map(x[name], shared["features"])
    parts.append(safe_norm(u[name], -1) * safe_norm(features, -1))
  return safe_norm(jnp.concatenate(parts, -1), -1)[..., 0]


def prepare(memory: Memory, params, key_width: int, dtype) -> dict[str, Any]:
  """Outer parameters that all heads share, in the state's type."""
  features = jax.tree.map(lambda p: p.astype(dtype), params["features"])
  shared = {"features": memory.features.prepare(features, key_width)}
  if memory.rate_by_position:
    shared["position"] = params["position"].astype(dtype)
  return shared


def prepare_heads(memory: Memory, params, dtype) -> dict[str, Any]:
  """Outer parameters that each head has of its own, [H, ...].

  A chunk of one head wants those of that head beside the shared ones, in one
  dictionary.
  """
  own = {}
  if "norm" in params:
    own["norm"] = jax.tree.map(lambda p: p.astype(dtype), params["norm"])
  if memory.retention.keeps_row_norms:
    own["lengths"] = {
      name: safe_norm(w.astype(dtype), -1)[..., 0]
      for name, w in params["start"].items()
    }
  return own


def plain(shared, table: dict[str, Entry], weights: Weights) -> Linear:
  """The products that read a memory at fixed (working) weights."""

  def linear(name: str, x: Array) -> Array:
    features = table[name].lift.map(x, shared["features"])
    return matmul(features, weights[name].T)

  return linear


def write_scales(
  memory: Memory, weights: Weights
) -> dict[str, Float[Array, ""]]:
  """How a write shows in each matrix, where not as it is."""
  if memory.retention.linear:
    return {}
  return {n: memory.retention.write_scale(w) for n, w in weights.items()}


def working(memory: Memory, weights: Weights) -> Weights:
  """The weights that a head reads from, made from those that it stores."""
  if memory.retention.linear:
    return weights
  return {name: memory.retention.working(w) for name, w in weights.items()}
