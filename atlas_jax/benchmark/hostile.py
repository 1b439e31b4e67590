"""Streams and gates that drive a memory apart, and what is left finite.

Every combination of a stream and a gate setting is one head of a single call,
with start weights of its own, so that a value that is not finite stays in its
case.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlas_jax import memory as am
from atlas_jax.memory.numerics import unit

_EXTREME = 20.0  # logits of gates that are all but open or closed


class Outcome(NamedTuple):
  """One number per case.

  Attributes:
    finite: all read-outs.
    slopes_finite: all gradients with respect to inputs and start weights.
    largest: largest magnitude of a read-out; infinite if one is not finite.
  """

  finite: Bool[Array, "cases"]
  slopes_finite: Bool[Array, "cases"]
  largest: Float[Array, "cases"]


def outcomes(memory: am.Memory, length: int, width: int = 16) -> Outcome:
  """Runs all cases through one memory, with gradients.

  Args:
    memory: a memory without feature parameters.
    length: tokens of every stream.
    width: of keys and values.
  """
  query, key, value, gates = cases(memory.window, length, width)
  params = am.init_params(
    jax.random.key(1),
    memory,
    heads=key.shape[2],
    key_width=width,
    value_width=width,
  )
  weight = jax.random.normal(jax.random.key(2), value.shape)

  def loss(start, query, key, value, gates):
    out = am.apply(memory, {**params, "start": start}, query, key, value, gates)
    return jnp.sum(out.y * weight), out.y

  run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))
  slopes, y = run(params["start"], query, key, value, gates)
  start_slopes, *input_slopes = slopes
  finite = _finite(y, axis=2)
  # A maximum need not show a NaN on every backend.
  size = jnp.max(jnp.nan_to_num(jnp.abs(y)), axis=(0, 1, 3))
  return Outcome(
    finite,
    _finite(start_slopes, axis=0) & _finite(input_slopes, axis=2),
    jnp.where(finite, size, jnp.inf),
  )


def names() -> list[str]:
  """Names of the cases, in the order of `Outcome`."""
  return [f"{s}, {g}" for s in _STREAMS for g in _SETTINGS]


def cases(
  window: int, length: int, width: int
) -> tuple[Array, Array, Array, am.Gates]:
  """Inputs of all cases side by side, each [1, T, cases, ...]."""
  side_by_side = lambda *leaves: jnp.stack(leaves, axis=1)[None]
  found = []
  for i, stream in enumerate(_STREAMS.values()):
    use = jax.random.fold_in(jax.random.key(0), i)
    key, value = stream(use, length, width)
    query = jnp.roll(key, 1, axis=0)
    for j, setting in enumerate(_SETTINGS.values()):
      gates = setting(jax.random.fold_in(use, j), length, window)
      found.append((query, unit(key), value, gates))
  return jax.tree.map(side_by_side, *found)


def _finite(tree: Any, axis: int) -> Bool[Array, "cases"]:
  """Whether all numbers of a case, which is an index along `axis`, are."""
  flags = []
  for leaf in jax.tree.leaves(tree):
    others = tuple(i for i in range(leaf.ndim) if i != axis)
    flags.append(jnp.all(jnp.isfinite(leaf), axis=others))
  return jnp.all(jnp.stack(flags), axis=0)


def _random(key: Array, length: int, width: int) -> tuple[Array, Array]:
  keys, values = jax.random.split(key)
  return (
    jax.random.normal(keys, (length, width)),
    jax.random.normal(values, (length, width)),
  )


def _repeated(key: Array, length: int, width: int) -> tuple[Array, Array]:
  """One token, over and over."""
  one, value = _random(key, 1, width)
  repeat = lambda x: jnp.broadcast_to(x, (length, width))
  return repeat(one), repeat(value)


def _alternating(key: Array, length: int, width: int) -> tuple[Array, Array]:
  """One key whose value changes its sign at every token, of length 100."""
  one, value = _repeated(key, length, width)
  index = jnp.arange(length, dtype=jnp.int32)
  sign = jnp.where(index % 2 == 0, 1.0, -1.0)[:, None]
  return one, 100.0 * sign * unit(value)


def _correlated(key: Array, length: int, width: int) -> tuple[Array, Array]:
  """Keys that share a direction, as those behind a SiLU do."""
  keys, values = _random(key, length, width)
  return jax.nn.silu(keys + 2.0), 10.0 * values


def _bursts(key: Array, length: int, width: int) -> tuple[Array, Array]:
  """Zero keys and values, and every hundredth token enormous."""
  keys, values = _random(key, length, width)
  index = jnp.arange(length, dtype=jnp.int32)
  hit = (index % 100 == 7)[:, None]
  return jnp.where(hit, keys, 0.0), jnp.where(hit, 1e4 * values, 0.0)


def _constant(
  decay: float, momentum: float, rate: float
) -> Callable[[Array, int, int], am.Gates]:
  """The same logits of decay, momentum and rate throughout; open window."""

  def make(key: Array, length: int, window: int) -> am.Gates:
    del key
    full = lambda z, *shape: jnp.full((length, *shape), z, jnp.float32)
    return _gates(
      full(decay, 1), full(momentum), full(rate), full(_EXTREME, window)
    )

  return make


def _thrown(key: Array, length: int, window: int) -> am.Gates:
  """Every gate of every token wide open or shut, by chance."""
  keys = jax.random.split(key, 4)
  toss = lambda i, *shape: (
    _EXTREME * jax.random.rademacher(keys[i], (length, *shape), jnp.float32)
  )
  return _gates(toss(0, 1), toss(1), toss(2), toss(3, window))


def _gates(decay: Array, momentum: Array, rate: Array, window: Array):
  return am.Gates(
    jax.nn.log_sigmoid(decay),
    jax.nn.log_sigmoid(momentum),
    jax.nn.sigmoid(rate),
    jax.nn.sigmoid(window),
  )


_STREAMS = {
  "random": _random,
  "one token repeated": _repeated,
  "one key, values alternating": _alternating,
  "correlated keys": _correlated,
  "zeros and bursts": _bursts,
}

_SETTINGS = {
  "all open": _constant(_EXTREME, _EXTREME, _EXTREME),
  "no momentum, full rate": _constant(_EXTREME, -_EXTREME, _EXTREME),
  "usual momentum, rate 0.1": _constant(5.0, 2.2, -2.2),
  "gates thrown": _thrown,
}
