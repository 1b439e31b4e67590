"""Reading and writing a chunk without materialising any token's weights.

A query is read through every matrix by the chunk's sums (dual form):

  W_t map(q) = aa_t W_0 map(q) - f_t S_0 map(q) - sum_i C[t, i] k(q, x_i) u_i.

Where a retention stores something else than the weights, W_0 are the weights at
the chunk's start, and the other terms are scaled as they show in them.

Muon's step is not linear in the momentum, so one matrix is formed for each
orthogonalised step, and tokens are read in blocks that share one.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory import bounds, gates
from atlas_jax.memory.coefficients import Coefficients
from atlas_jax.memory.config import Memory
from atlas_jax.memory.factors import Carry, Factors, Weights, working
from atlas_jax.memory.networks import Entry
from atlas_jax.memory.newton_schulz import newton_schulz
from atlas_jax.memory.numerics import matmul
from atlas_jax.memory.optimizers import ChunkMuon


def dual(
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
  del gate
  weights, momentum = write(memory, shared, table, carry, factor, c)
  raw = weights
  weights, momentum = handed_on(
    memory, shared, weights, momentum, carry.tail_value.shape[-1]
  )
  last = working(memory, weights)
  start, through, own = c.weight_start, c.weight_momentum, c.weight
  if memory.read == "before":
    start, through = _shift(start, 1.0), _shift(through, 0.0)
    own = _shift(own, 0.0)

  def linear(name: str, x: Array) -> Array:
    lift = table[name].lift
    features = lift.map(x, shared["features"])
    kernel = lift.kernel(x, factor.x[name], shared["features"])
    moved = combine(own, kernel, factor.u[name])
    if memory.has_momentum:
      moved += _scaled_read(through, features, carry.momentum[name])
    if not memory.retention.linear:
      moved *= memory.retention.write_scale(carry.weights[name])
    out = _scaled_read(start, features, frozen[name]) - moved
    if memory.read == "after" and last is not raw:
      # The last token reads the weights that the chunk hands on.
      out = _replace_last(out, matmul(features[-1:], last[name].T))
    return out

  return weights, momentum, linear


def _scaled_read(
  scale: Float[Array, "g b"], features: Float[Array, "b d"], w: Array
) -> Float[Array, "b n"]:
  """Reads a matrix, with one factor per group of its rows and token.

  A single factor goes to the features: then the backward pass does not need
  the unscaled read-out, which it would have to compute again.
  """
  if scale.shape[0] == 1:
    return matmul(scale[0][:, None] * features, w.T)
  return by_rows(scale, matmul(features, w.T))


def _replace_last(rows: Float[Array, "b m"], last: Float[Array, "1 m"]):
  if rows.shape[0] == 1:
    return last
  return jnp.concatenate([rows[:-1], last])


def block_ends(every: int, size: int, dtype) -> Float[Array, "blocks b"]:
  """Picks the last row of every block (a kernel has no strided slice)."""
  shape = (size // every, size)
  block = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  token = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  return (token == (block + 1) * every - 1).astype(dtype)


def block_rates(
  memory: Memory, c: Coefficients, rate: Float[Array, "b"]
) -> Float[Array, "g blocks"]:
  """Step size of each orthogonalised step.

  The sum of the block's write gates, each decayed to the block's end: every
  token's gate matters and the total rate does not depend on the block length.
  """
  every, size = memory.muon.every, rate.shape[0]
  ends = matmul(block_ends(every, size, rate.dtype)[None], c.decay)
  block = jax.lax.broadcasted_iota(jnp.int32, (size // every, size), 0)
  token = jax.lax.broadcasted_iota(jnp.int32, (size // every, size), 1)
  own = (token // every == block).astype(rate.dtype)
  return jnp.sum(ends * (own * rate[None])[None], axis=-1)


def dual_muon(
  memory: Memory,
  shared,
  table: dict[str, Entry],
  carry: Carry,
  frozen: Weights,
  gate: gates.Gates,
  factor: Factors,
  c: Coefficients,
):
  """As `dual`: one matrix per orthogonalised step, read block by block."""
  del frozen  # Muon goes with retentions that store the weights themselves.
  every = memory.muon.every
  size = gate.rate.shape[0]
  blocks = size // every
  last = block_ends(every, size, gate.rate.dtype)
  # Shares of step m, and of W_0, in the weights at the end of block n.
  between = matmul(matmul(last[None], c.decay), last.T[None])
  share = between * block_rates(memory, c, gate.rate)[:, None, :]
  start = matmul(c.weight_start, last.T)
  written = matmul(last, c.momentum)
  left = matmul(last, c.momentum_start[:, None])[:, :, None]
  steps, momentum = {}, {}
  for name, entry in table.items():
    features = entry.lift.map(factor.x[name], shared["features"])
    u = written[:, :, None] * factor.u[name][None]
    moved = matmul(jnp.swapaxes(u, -1, -2), features[None])
    s = left * carry.momentum[name][None] + moved
    momentum[name] = s[-1]
    steps[name] = newton_schulz(s, memory.muon)
  stages = {}
  for name in table:
    rows = carry.weights[name].shape[0]
    # Row by row: a kernel cannot flatten a matrix, and beside the
    # orthogonalisation this costs nothing.
    moved = matmul(_each_row(share, rows), jnp.swapaxes(steps[name], 0, 1))
    kept = _each_row(start, rows)[:, :, None] * carry.weights[name][:, None]
    w = jnp.swapaxes(kept - moved, 0, 1)
    stages[name] = jnp.concatenate([carry.weights[name][None], w])
  weights = {name: w[-1] for name, w in stages.items()}
  weights, momentum = handed_on(
    memory, shared, weights, momentum, carry.tail_value.shape[-1]
  )
  # Decay since the weights of the last block end: row r of a block of `every`
  # rows has seen the decays of the block's rows up to its own.
  since = _decay_since(memory, c)

  def linear(name: str, x: Array) -> Array:
    features = table[name].lift.map(x, shared["features"])
    split = features.reshape(blocks, every, -1)
    before = stages[name][:-1]
    out = matmul(split, jnp.swapaxes(before, -1, -2)).reshape(size, -1)
    out = by_rows(since, out)
    if memory.read == "before":
      return out
    after = weights[name][None]
    if blocks > 1:
      after = jnp.concatenate([stages[name][1:-1], after])
    ends = matmul(split[:, -1:], jnp.swapaxes(after, -1, -2))
    if every == 1:
      return ends[:, 0]
    rows = jnp.concatenate([out.reshape(blocks, every, -1)[:, :-1], ends], 1)
    return rows.reshape(size, -1)

  return weights, momentum, linear


def _each_row(groups: Float[Array, "g *rest"], rows: int) -> Array:
  """Repeats what belongs to a decay group for each of its rows."""
  count, *rest = groups.shape
  spread = jnp.broadcast_to(groups[:, None], (count, rows // count, *rest))
  return spread.reshape(rows, *rest)


def _decay_since(memory: Memory, c: Coefficients) -> Float[Array, "g b"]:
  """Decay from the last block end before each row to what the row reads."""
  every = memory.muon.every
  size = c.decay.shape[-1]
  # decay[t, n] multiplies the gates after n up to t; the block that holds row t
  # starts after row first - 1, and the very first one after the chunk's start.
  row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
  column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
  previous = (row // every * every - 1 == column).astype(c.decay.dtype)
  since = jnp.sum(c.decay * previous[None], axis=-1)
  row = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
  since = since + (row < every).astype(c.decay.dtype) * c.weight_start
  if memory.read == "before":
    at_block_start = (row % every == 0).astype(c.decay.dtype)
    since = _shift(since, 1.0) * (1.0 - at_block_start) + at_block_start
  return since


def write(
  memory: Memory,
  shared,
  table: dict[str, Entry],
  carry: Carry,
  factor: Factors,
  c: Coefficients,
) -> tuple[Weights, Weights]:
  """Stored weights and momentum after the last token, before `handed_on`."""
  weights, momentum = {}, {}
  for name, entry in table.items():
    features = entry.lift.map(factor.x[name], shared["features"])
    u = factor.u[name]
    weights[name] = scale_rows(c.weight_start[:, -1], carry.weights[name])
    if memory.has_momentum:
      start = carry.momentum[name]
      weights[name] -= scale_rows(c.weight_momentum[:, -1], start)
      momentum[name] = c.momentum_start[-1] * start + matmul(
        (c.momentum[-1][:, None] * u).T, features
      )
    shared_u = by_rows(c.weight[:, -1], u)
    weights[name] -= matmul(shared_u.T, features)
  return weights, momentum


def handed_on(
  memory: Memory, shared, weights: Weights, momentum: Weights, value_width: int
) -> tuple[Weights, Weights]:
  """What a chunk's end makes of its last weights and momentum.

  The bound's caps, the retention's border, and the clip of gradients.
  """
  bound, retention = memory.limits, memory.retention
  weights = bounds.cap_weights(bound, weights, retention)
  momentum = bounds.cap_momentum(
    bound, momentum, value_width, memory.orthogonalises
  )
  if retention.has_border:
    lengths = shared.get("lengths", {})
    weights = {
      name: retention.border(w, lengths.get(name))
      for name, w in weights.items()
    }
  if bound.gradient_clip is not None:
    limit = bound.gradient_clip
    clip = functools.partial(bounds.clip_gradient, limit)
    weights = jax.tree.map(clip, weights)
    if isinstance(memory.optimizer, ChunkMuon):
      # A step of length one comes from a momentum as short as epsilon.
      limit = limit / memory.optimizer.epsilon
    clip = functools.partial(bounds.clip_gradient, limit)
    momentum = jax.tree.map(clip, momentum)
  return weights, momentum


def by_rows(
  scale: Float[Array, "g n"], z: Float[Array, "n m"]
) -> Float[Array, "n m"]:
  """Scales the columns of z, group by group: one factor per group and row."""
  groups = scale.shape[0]
  if groups == 1:
    return scale[0][:, None] * z
  split = z.reshape(z.shape[0], groups, -1)
  return (scale.T[:, :, None] * split).reshape(z.shape)


def scale_rows(
  scale: Float[Array, "g"], w: Float[Array, "n d"]
) -> Float[Array, "n d"]:
  """Scales the rows of a matrix by one factor per decay group."""
  return by_rows(scale[:, None], w.T).T


def combine(
  shares: Float[Array, "g b t"], kernel: Array, u: Float[Array, "t m"]
) -> Float[Array, "b m"]:
  """`sum_i shares[t, i] kernel[t, i] u_i`, per group of u's columns."""
  if shares.shape[0] == 1:
    return matmul(shares[0] * kernel, u)
  groups = shares.shape[0]
  split = u.reshape(u.shape[0], groups, -1).transpose(1, 0, 2)
  out = matmul(shares * kernel[None], split)
  return out.transpose(1, 0, 2).reshape(kernel.shape[0], -1)


def _shift(rows: Float[Array, "g b *rest"], first: float):
  """Row t becomes row t - 1: what is there before token t's own write."""
  start = jnp.full_like(rows[:, :1], first)
  return jnp.concatenate([start, rows[:, :-1]], axis=1)
