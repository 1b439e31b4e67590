"""What the token-by-token definition is put together from.

Gradients by `jax.grad`, and orthogonalisation, retentions and caps written out
once more from their equations, so that `recurrent.py` shares no code with the
faster forms.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory.config import Memory
from atlas_jax.memory.optimizers import ChunkMuon, Muon
from atlas_jax.memory.retention import KLRetention, LqRetention, WeightNorm

_HIGHEST = jax.lax.Precision.HIGHEST

Weights = dict[str, Float[Array, "n d"]]


def read(memory: Memory, shared, weights, x: Float[Array, "K"]):
  """Output [V] of the memory for one input, at these weights."""
  table = memory.entries(x.shape[-1], _value_width(memory, weights))

  def linear(name: str, x: Array) -> Array:
    features = table[name].lift.map(x, shared["features"])
    return jnp.matmul(features, weights[name].T, precision=_HIGHEST)

  y = memory.network.apply(linear, x[None], memory.features, shared)
  return y[0]


def _value_width(memory: Memory, weights) -> int:
  return weights["matrix" if "matrix" in weights else "out"].shape[0]


def gradients(memory: Memory, shared, weights, keys, values, thresholds):
  """Of every column: gradient, output error, objective and its curvature."""

  def loss(weights, *token):
    key, *target = token
    return memory.objective(read(memory, shared, weights, key), *target)

  def one(*token):
    key, *target = token
    y = read(memory, shared, weights, key)
    return (
      jax.grad(loss)(weights, *token),
      jax.grad(memory.objective)(y, *target),
      loss(weights, *token),
      memory.objective.curvature(y, *target),
    )

  return jax.vmap(one)(keys, values, thresholds)


def overlap(
  gradient, error, stiffness, visible
) -> Float[Array, "columns columns"]:
  """Overlap of every two columns' writes, from their gradients alone.

  A gradient is u x^T, so |g_i g_j^T| = |g_i| |g_j| |cos(x_i, x_j)|. A write of
  it shows `visible` times in each matrix.
  """
  total = jnp.zeros((), error.dtype)
  for name, g in gradient.items():
    # Every row is a multiple of x; the longest has its direction best.
    longest = jnp.argmax(length(g, 2), axis=1)
    x = jnp.take_along_axis(g, longest[:, None, None], axis=1)[:, 0]
    x = x / length(x, 1)[:, None]
    size = length(g, 1)
    cosine = jnp.matmul(x, x.T, precision=_HIGHEST)
    pair = size[:, None] * size[None, :] * jnp.abs(cosine)
    total = total + visible[name] * pair
  error = jnp.sqrt(jnp.square(length(error, 1)) + 1e-8)
  weight = jnp.sqrt(stiffness) / error
  return weight[:, None] * weight[None, :] * total


def length(tree, leading: int):
  """Norm over all but the `leading` axes of all leaves, differentiable at 0."""
  leaves = [x.reshape(*x.shape[:leading], -1) for x in jax.tree.leaves(tree)]
  flat = jnp.concatenate(leaves, -1)
  top = jnp.max(jnp.abs(flat), axis=-1, keepdims=True)
  top = jax.lax.stop_gradient(jnp.maximum(top, 1e-12))
  square = jnp.sum(jnp.square(flat / top), axis=-1)
  return top[..., 0] * jnp.sqrt(square + 1e-12)


def newton_schulz(s: Array, muon: Muon | ChunkMuon) -> Array:
  """s / sqrt(|s|^2 + epsilon^2), orthogonalised on its short side."""
  top = jnp.max(jnp.abs(s))
  top = jax.lax.stop_gradient(jnp.maximum(top, muon.epsilon))
  square = jnp.sum(jnp.square(s / top)) + jnp.square(muon.epsilon / top)
  x = s / top / jnp.sqrt(square)
  tall = x.shape[0] > x.shape[1]
  x = x.T if tall else x
  operand = muon.dtype or x.dtype

  def product(a, b):
    a, b = a.astype(operand), b.astype(operand)
    return jnp.matmul(a, b, precision=_HIGHEST, preferred_element_type=s.dtype)

  for i in range(muon.steps):
    a, b, c = muon.coefficients[min(i, len(muon.coefficients) - 1)]
    gram = product(x, x.T)
    x = a * x + product(b * gram + c * product(gram, gram), x)
  return x.T if tall else x


def stands_for(memory: Memory, stored: Array) -> tuple[Array, Array]:
  """The weights that a stored matrix stands for, and how its changes show."""
  retention = memory.retention
  one = jnp.ones((), stored.dtype)
  if isinstance(retention, LqRetention):
    q, floor = retention.power, retention.floor
    # The whole is divided by the largest, whose powers might overflow.
    top = jnp.maximum(jnp.max(jnp.abs(stored)), floor)
    top = jax.lax.stop_gradient(top)
    total = jnp.sum((jnp.abs(stored) / top) ** q) + (floor / top) ** q
    scale = (top * total ** (1 / q)) ** (2 - q)
    return scale * stored, scale
  if isinstance(retention, KLRetention):
    c = retention.size * stored.size / math.sqrt(max(stored.shape))
    return c * jax.nn.softmax(stored, axis=(0, 1)), one
  return stored, one


def handed_on(
  memory: Memory,
  start: Weights,
  weights: Weights,
  momentum: Weights,
  value_width: int,
) -> tuple[Weights, Weights]:
  """What a chunk's end makes of its last weights and momentum.

  Args:
    memory: the memory.
    start: the learned start.
    weights, momentum: after the last token.
    value_width: V.
  """
  bound, retention = memory.bound, memory.retention
  logarithms = isinstance(retention, KLRetention)
  if bound is not None and bound.weight_cap is not None:

    def cap(w: Array, limit: float) -> Array:
      return w * (limit / jnp.maximum(length(w, 0), limit))

    for name, w in weights.items():
      # Logarithms start at spread 1, weights at singular values of about 1.
      usual = math.sqrt(w.size if logarithms else min(w.shape))
      weights = {**weights, name: cap(w, bound.weight_cap * usual)}
    limit = bound.error_clip and bound.error_clip * math.sqrt(value_width)
    if isinstance(memory.optimizer, (Muon, ChunkMuon)):
      limit = 1e12  # Their steps do not depend on the momentum's length.
    if limit is not None:
      momentum = {n: cap(s, limit) for n, s in momentum.items()}
  if logarithms:
    weights = {n: w - jnp.mean(w) for n, w in weights.items()}
  if isinstance(retention, WeightNorm):
    for name, w in weights.items():
      square = jnp.sum(jnp.square(w), axis=1, keepdims=True)
      norm = jnp.linalg.norm(start[name], axis=1, keepdims=True)
      weights = {**weights, name: norm * w / jnp.sqrt(square + 1e-10)}
  return weights, momentum
