"""The layer that is timed: projections around an interchangeable core."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax import attention as aa
from atlas_jax import memory as am
from atlas_jax.benchmark.obvious import materialised, token_scan
from atlas_jax.memory.numerics import unit

Core = Callable[..., Float[Array, "B T H V"]]

OURS = "ours"
TOKENS = "token scan"
MATERIALISED = "weights materialised"
ATTENTION = "attention"
BLOCKED = "attention, query blocks"


@dataclasses.dataclass(frozen=True)
class Shape:
  """Widths of the layer.

  Attributes:
    dim: width of its input and output.
    heads: memories or attention heads, each dim / heads wide.
    chunk: tokens that share the weights at which gradients are taken.
  """

  dim: int = 256
  heads: int = 4
  chunk: int = 64


def memory_of(shape: Shape, window: int) -> am.Memory:
  """The memory that is timed: Titans' rule over a window, default bound."""
  return am.Memory(
    features=am.Identity(),
    network=am.MLP(expansion=4.0),
    objective=am.L2(),
    optimizer=am.Momentum(),
    retention=am.ScalarRetention(),
    window=window,
    chunk=shape.chunk,
  )


def core_of(method: str, memory: am.Memory) -> Core:
  """The function of (memory parameters, q, k, v, gates) that a method is."""
  if method == OURS:
    return lambda *args: am.apply(memory, *args).y
  if method == TOKENS:
    return lambda *args: token_scan(memory, *args)
  if method == MATERIALISED:
    return lambda *args: materialised(memory, *args)
  attend = {ATTENTION: _whole_attention, BLOCKED: aa.full_attention}[method]
  return lambda params, query, key, value, gates: attend(query, key, value)


def init(key: Array, shape: Shape, memory: am.Memory) -> dict[str, Any]:
  """Random parameters of projections, gates and memory, float32."""
  keys = iter(jax.random.split(key, 16))
  dim, heads = shape.dim, shape.heads

  def matrix(*outputs: int) -> Array:
    return dim**-0.5 * jax.random.normal(next(keys), (dim, *outputs))

  params: dict[str, Any] = {
    name: matrix(dim) for name in ("query", "key", "value", "output")
  }
  params["gates"] = {
    "decay": matrix(heads, memory.retention.groups),
    "momentum": matrix(heads),
    "rate": matrix(heads),
    "window": matrix(heads, memory.window),
  }
  width = dim // heads
  params["memory"] = am.init_params(
    next(keys), memory, heads=heads, key_width=width, value_width=width
  )
  return params


def inputs(
  params: dict[str, Any], x: Float[Array, "B T D"], heads: int
) -> tuple[Array, Array, Array, am.Gates]:
  """Queries and keys of length 1, values, and gates near a trained layer's."""

  def split(name: str) -> Float[Array, "B T H K"]:
    y = jnp.matmul(x, params[name], precision="highest")
    return y.reshape(*x.shape[:2], heads, -1)

  def gate(name: str) -> Array:
    return jnp.tensordot(x, params["gates"][name], 1, precision="highest")

  gates = am.Gates(
    log_decay=jax.nn.log_sigmoid(gate("decay") + 5.0),
    log_momentum=jax.nn.log_sigmoid(gate("momentum") + 2.0),
    rate=0.1 * jax.nn.sigmoid(gate("rate")),
    window=jax.nn.sigmoid(gate("window")),
  )
  return unit(split("query")), unit(split("key")), split("value"), gates


def apply(
  core: Core, params: dict[str, Any], x: Float[Array, "B T D"], heads: int
) -> Float[Array, "B T D"]:
  """`x -> q, k, v, gates -> core -> output projection`."""
  y = core(params["memory"], *inputs(params, x, heads))
  return jnp.matmul(y.reshape(x.shape), params["output"], precision="highest")


def loss(
  core: Core, params: dict[str, Any], x: Float[Array, "B T D"], heads: int
) -> Float[Array, ""]:
  """A scalar whose gradient reaches every output."""
  return jnp.mean(jnp.square(apply(core, params, x, heads)))


def _whole_attention(
  query: Float[Array, "B T H K"],
  key: Float[Array, "B T H K"],
  value: Float[Array, "B T H K"],
) -> Float[Array, "B T H K"]:
  """Softmax attention over the past, all scores formed at once."""
  length = query.shape[1]
  return aa.attend(query, key, value, jnp.tri(length, dtype=bool)[None, None])
