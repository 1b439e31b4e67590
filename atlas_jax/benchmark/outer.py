"""Trains a tiny byte model through a memory, gently and four times as hard."""

import functools
import pathlib
import sysconfig
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.memory_mixer import MemoryMixer
from atlas_jax.layers.rms_norm import RMSNorm

_VOCAB = 256
# Modules of the standard library that are large and have long been there.
_SOURCES = ("argparse.py", "tarfile.py", "typing.py", "inspect.py")


class Training(NamedTuple):
  """What became of a training run.

  Attributes:
    loss: nats per byte, mean of the last fifth of the steps; not finite if
      one of them was not.
    first_bad: first step whose loss was not finite, or None.
    largest: largest loss after the first fifth.
  """

  loss: float
  first_bad: int | None
  largest: float


class _Model(nnx.Module):
  """Embedding, two residual memory mixers, output matrix."""

  def __init__(self, memory: am.Memory, dim: int, heads: int, rngs: nnx.Rngs):
    table = jax.random.normal(rngs.params(), (_VOCAB, dim))
    self.embedding = nnx.Param(table)
    make = lambda: MemoryMixer(dim, heads, memory, rate_start=0.5, rngs=rngs)
    self.mixers = nnx.List([make(), make()])
    self.norms = nnx.List([RMSNorm((dim,)) for _ in range(3)])
    self.output = Linear(dim, _VOCAB, rngs=rngs)

  def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
    x = self.embedding[...][tokens]
    for mixer, norm in zip(self.mixers, self.norms[:2], strict=True):
      x = x + mixer(norm(x)).y
    return self.output(self.norms[2](x))


def train(
  memory: am.Memory,
  rates: tuple[float, ...],
  *,
  steps: int,
  length: int = 256,
  batch: int = 2,
  dim: int = 64,
  heads: int = 2,
) -> list[Training]:
  """Trains anew with each learning rate on source text of this Python.

  Args:
    memory: of both mixers.
    rates: learning rates of Adam, after a warm-up of a tenth of the steps.
    steps: of training.
    length, batch: tokens of a row and rows of a step.
    dim, heads: size of the model.
  """
  windows = _windows(length + 1)
  model = _Model(memory, dim, heads, nnx.Rngs(0))
  graph, start = nnx.split(model)

  def loss(params, tokens):
    logits = nnx.merge(graph, params)(tokens[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )
    return jnp.mean(each)

  clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, moments, tokens, rate):
    value, slopes = jax.value_and_grad(loss)(params, tokens)
    # Optax counts steps in integers and mixes them with floats.
    with jax.numpy_dtype_promotion("standard"):
      moves, moments = clipped.update(slopes, moments)
    moves = jax.tree.map(lambda move: -rate * move, moves)
    return optax.apply_updates(params, moves), moments, value

  found = []
  for rate in rates:
    params = jax.tree.map(jnp.copy, start)
    moments = clipped.init(params)
    order = np.random.default_rng(0).integers(len(windows), size=(steps, batch))
    losses = []
    for i, rows in enumerate(order):
      now = rate * min(1.0, 10 * (i + 1) / steps)
      tokens = jnp.asarray(windows[rows])
      params, moments, value = step(params, moments, tokens, jnp.float32(now))
      losses.append(value)
    found.append(_summary(np.asarray(jnp.stack(losses))))
  return found


def _summary(losses: np.ndarray) -> Training:
  bad = np.flatnonzero(~np.isfinite(losses))
  fifth = max(1, len(losses) // 5)
  return Training(
    loss=float(losses[-fifth:].mean()),
    first_bad=int(bad[0]) if len(bad) else None,
    largest=float(losses[fifth:].max()),
  )


def _windows(size: int) -> Int[np.ndarray, "n size"]:
  """Source text as consecutive windows of bytes."""
  folder = pathlib.Path(sysconfig.get_path("stdlib"))
  try:
    text = b"".join((folder / name).read_bytes() for name in _SOURCES)
  except OSError as error:
    raise UserError(
      f"cannot read {error.filename}: the suite trains on the source of the "
      "standard library; use a Python that has it"
    ) from None
  usable = len(text) // size * size
  data = np.frombuffer(text[:usable], np.uint8)
  return data.reshape(-1, size).astype(np.int32)
