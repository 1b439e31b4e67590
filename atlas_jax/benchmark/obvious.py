"""The memory computed in the two ways that first come to mind.

They are what the speed and the memory of the library's own form are measured
against, and give its numbers (the tests compare them).

`token_scan` visits one token after another and writes its weights out; as each
gradient is taken at the token's own weights, its numbers are those of chunks of
one token.
`materialised` takes the gradients of a chunk at once and combines every token's
momentum and weights by `jax.lax.associative_scan` (arXiv 2501.00663, section
3.2); the weights of all tokens of the sequence exist before any is read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax import memory as am
from atlas_jax.memory import bounds, gates
from atlas_jax.memory.coefficients import (
  coefficients,
  momentum_rate,
  overlap,
)
from atlas_jax.memory.dual import handed_on
from atlas_jax.memory.factors import Carry, Tokens, factors, prepare
from atlas_jax.memory.numerics import matmul


def token_scan(
  memory: am.Memory,
  params: dict[str, Any],
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  gate: am.Gates,
) -> Float[Array, "B T H V"]:
  """One token after another, gradients at its own weights (chunk 1).

  Each step is recomputed in the backward pass: keeping its residuals instead is
  half as fast and takes four times the memory.

  Args:
    memory: with `Momentum`, scalar decay and the default bound; its chunk
      counts as 1.
    params, query, key, value, gate: as for `atlas_jax.memory.apply`.
  """
  shared = prepare(memory, params, key.shape[-1], key.dtype)
  table = memory.entries(key.shape[-1], value.shape[-1])
  window, width = memory.window, value.shape[-1]
  bound = memory.bound or bounds.UNBOUNDED

  def one_head(carry, token: Tokens):
    weights, momentum, keys, values, seen = carry
    gate = token.gates
    keys = jnp.concatenate([keys[1:], token.key[None]])
    values = jnp.concatenate([values[1:], token.value[None]])
    seen = jnp.minimum(seen + 1, window)
    real = gates.filled_columns(window, window + 1, seen, keys.dtype)
    factor = factors(memory, shared, weights, keys, values)
    gamma = gate.window[::-1] * real
    growth = matmul(
      (gate.rate * gamma)[None], overlap(shared, table, factor, factor)
    )[0]
    budget = jnp.maximum(1.0, jnp.max(growth * real))
    share = momentum_rate(memory, gate) * gamma / budget
    for name in table:
      gradient = matmul((share[:, None] * factor.u[name]).T, factor.x[name])
      kept = jnp.exp(gate.log_momentum) * momentum[name]
      momentum = {**momentum, name: kept + gradient}
      left = jnp.exp(gate.log_decay[0]) * weights[name]
      weights = {**weights, name: left - momentum[name]}
    weights = bounds.cap_weights(bound, weights, memory.retention)
    momentum = bounds.cap_momentum(bound, momentum, width)
    y = memory.network.apply(
      lambda name, x: matmul(x, weights[name].T),
      token.query[None],
      memory.features,
      shared,
    )
    return (weights, momentum, keys, values, seen), y[0]

  def one_row(tokens: Tokens):
    heads = key.shape[2]
    start = params["start"]
    carry = (
      start,
      jax.tree.map(jnp.zeros_like, start),
      jnp.zeros((heads, window, key.shape[-1]), key.dtype),
      jnp.zeros((heads, window, width), value.dtype),
      jnp.zeros((heads,), jnp.int32),
    )
    body = jax.checkpoint(jax.vmap(one_head))
    return jax.lax.scan(body, carry, tokens)[1]

  return jax.vmap(one_row)(Tokens(query, key, value, gate))


def materialised(
  memory: am.Memory,
  params: dict[str, Any],
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H V"],
  gate: am.Gates,
) -> Float[Array, "B T H V"]:
  """Every token's weights by associative scans, kept for the whole sequence.

  Nothing is recomputed in the backward pass.

  Args:
    memory: with `Momentum` and scalar decay.
    params, query, key, value, gate: as for `atlas_jax.memory.apply`; the chunk
      must divide T.
  """
  shared = prepare(memory, params, key.shape[-1], key.dtype)
  table = memory.entries(key.shape[-1], value.shape[-1])
  tail = memory.window - 1

  def one_chunk(carry: Carry, tokens: Tokens):
    gate = tokens.gates
    keys = jnp.concatenate([carry.tail_key, tokens.key])
    values = jnp.concatenate([carry.tail_value, tokens.value])
    factor = factors(memory, shared, carry.weights, keys, values)
    c = coefficients(memory, shared, table, gate, carry.seen, factor)
    band = gates.window_matrix(gate.window, carry.seen)
    rate = momentum_rate(memory, gate)[:, None] * band / c.scale[:, None]
    every, momentum = {}, {}
    for name in table:
      gradient = factor.u[name][:, :, None] * factor.x[name][:, None, :]
      summed = jnp.tensordot(rate, gradient, 1, precision="highest")
      # The budget of a token divides all that the chunk has written up to it:
      # its reciprocal ratios enter the two recurrences as further decays.
      ratio = jnp.concatenate([jnp.ones((1,), c.scale.dtype), c.scale])
      ratio = ratio[:-1] / ratio[1:]
      own = _recur(jnp.exp(gate.log_momentum) * ratio, summed)
      written = _recur(jnp.exp(gate.log_decay[:, 0]) * ratio, own)
      start = c.weight_start[0][:, None, None] * carry.weights[name][None]
      through = c.weight_momentum[0][:, None, None]
      every[name] = start - through * carry.momentum[name][None] - written
      momentum[name] = c.momentum_start[-1] * carry.momentum[name] + own[-1]
    weights = {name: w[-1] for name, w in every.items()}
    weights, momentum = handed_on(
      memory, shared, weights, momentum, value.shape[-1]
    )
    every = {
      name: jnp.concatenate([w[:-1], weights[name][None]])
      for name, w in every.items()
    }
    seen = jnp.minimum(carry.seen + memory.chunk, tail)
    last = keys.shape[0] - tail
    after = Carry(weights, momentum, keys[last:], values[last:], seen)
    return after, every

  def one_head(start, tokens: Tokens):
    carry = Carry(
      start,
      jax.tree.map(jnp.zeros_like, start),
      jnp.zeros((tail, key.shape[-1]), key.dtype),
      jnp.zeros((tail, value.shape[-1]), value.dtype),
      jnp.zeros((), jnp.int32),
    )
    by_chunk = lambda x: x.reshape(-1, memory.chunk, *x.shape[1:])
    _, every = jax.lax.scan(one_chunk, carry, jax.tree.map(by_chunk, tokens))

    def linear(name: str, x: Array) -> Array:
      w = every[name].reshape(-1, *every[name].shape[2:])
      return matmul(w, x[:, :, None])[..., 0]

    return memory.network.apply(linear, tokens.query, memory.features, shared)

  heads_first = jax.vmap(one_head, in_axes=(0, 1), out_axes=1)
  rows_first = jax.vmap(heads_first, in_axes=(None, 0))
  return rows_first(params["start"], Tokens(query, key, value, gate))


def _recur(
  decay: Float[Array, "b"], add: Float[Array, "b n d"]
) -> Float[Array, "b n d"]:
  """`x_t = decay_t x_{t-1} + add_t` from zero."""

  def combine(left, right):
    a, x = left
    b, y = right
    return a * b, b[:, None, None] * x + y

  return jax.lax.associative_scan(combine, (decay, add))[1]
