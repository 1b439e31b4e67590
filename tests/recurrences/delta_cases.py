"""The delta family under one signature, and tokens for it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.recurrences import (
  MesaState,
  delta_rule,
  longhorn,
  mesa,
  rwkv7,
)
from tests.layers.helpers import jit

BATCH, LENGTH, HEADS, WIDTH, VALUES, CHUNK = 2, 77, 2, 5, 4, 16

OPS = {
  "deltanet": delta_rule,
  "gated_deltanet": delta_rule,
  "longhorn": longhorn,
  "rwkv7": rwkv7,
  "mesa": mesa,
}
# Other shapes of the same arguments, and other ways to the same.
MORE_OPS = {
  "gated_deltanet_rows": delta_rule,
  "longhorn_heads": longhorn,
  "rwkv7_bounded": functools.partial(rwkv7, lowest_decay=-1.25),
}

# Arguments without an axis of time.
TIMELESS = ("state", "ridge")


def tokens_of(
  name: str, dtype: Any = jnp.float64, seed: int = 0
) -> dict[str, Any]:
  """Arguments of an op, the state among them, all of them random.

  Decays are 0 and 1 at some tokens, keys 0 or repeated at others. Float64 and
  float32 are the same numbers.
  """
  random = np.random.default_rng(seed)
  leading = (BATCH, LENGTH, HEADS)

  def normal(*shape: int) -> np.ndarray:
    return random.standard_normal(shape)

  def between(*shape: int) -> np.ndarray:
    return 1 / (1 + np.exp(-2 * normal(*shape)))

  def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)

  key = normal(*leading, WIDTH)
  if not name.startswith("longhorn"):
    key = unit(key)
  key[:, 5] = 0
  key[:, 8:11] = key[:, 7:8]
  args: dict[str, Any] = {
    "query": normal(*leading, WIDTH),
    "key": key,
    "value": normal(*leading, VALUES),
    "rate": between(*leading),
    "state": normal(BATCH, HEADS, VALUES, WIDTH),
  }
  if name in ("longhorn", "gated_deltanet_rows"):
    args["rate"] = between(*leading, VALUES)
  if name.startswith("gated") or name == "mesa":
    args["log_decay"] = np.log(between(*leading))
  if name == "mesa":
    start = unit(normal(BATCH, HEADS, WIDTH, 2 * WIDTH))
    args["state"] = MesaState(start @ start.swapaxes(-1, -2), args["state"])
    args["ridge"] = 0.25 + between(HEADS, WIDTH)
  if name.startswith("rwkv7"):
    args["rate"] = between(*leading, WIDTH)
    args["erased"] = unit(normal(*leading, WIDTH))
    args["log_decay"] = -between(*leading, WIDTH)
  if "log_decay" in args:
    args["log_decay"][:, 3] = 0
    args["log_decay"][:, 6] = -1 if name == "rwkv7_bounded" else -np.inf
  return jax.tree.map(lambda x: jnp.asarray(np.float32(x), dtype), args)


@functools.cache
def compiled(name: str):
  """(args) -> (y, state) where no document begins and every token counts."""
  op = (OPS | MORE_OPS)[name]
  return jit(lambda args: op(**args, chunk=CHUNK))


@functools.cache
def slopes(name: str, implementation: str = "xla"):
  """(args, restart, valid) -> slopes by args, and (y, state)."""
  op = (OPS | MORE_OPS)[name]

  def total(args, restart, valid):
    out = op(
      **args,
      restart=restart,
      valid=valid,
      chunk=CHUNK,
      implementation=implementation,
    )
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

  return jit(jax.grad(total, has_aux=True))


def over_time(change, args: dict[str, Any]) -> dict[str, Any]:
  """Changes all arguments that have an axis of time."""
  return {k: x if k in TIMELESS else change(x) for k, x in args.items()}


def along(mark, x):
  """A mark [B, T] with the rank of x."""
  return mark.reshape(*mark.shape, *[1] * (x.ndim - 2))


def documents() -> tuple[Any, Any]:
  """Where documents begin and which tokens count: padding at odd places.

  Documents of row 0 begin at 20, 21 and 50, those of row 1 at 0 and 33. The
  mark at place 24 stands on padding, where nothing begins.
  """
  index = np.arange(LENGTH)
  valid = np.stack([index % 7 != 3, index < LENGTH - 4])
  restart = np.stack(
    [np.isin(index, (20, 21, 24, 50)), np.isin(index, (0, 33))]
  )
  return jnp.asarray(restart), jnp.asarray(valid)
