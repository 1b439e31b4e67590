"""One optimizer step and one evaluation step, as pure functions.

Both are written for one device; `atlas_jax.training.program` compiles them
with shardings, which changes no result.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.training.nonfinite import nonfinite_gradients

Batch = Mapping[str, Any]
"""Arrays [B, T]: `tokens`, `targets`, `segment_ids` int32; `weights` float32,
1 where a target counts; `bytes` float32, the bytes that a target stands for."""

Losses = Callable[[Any, Batch], tuple[Array, Mapping[str, Array]]]
"""Called as losses(params, batch): each target's cross-entropy in nats, [B, T]
float32 and not weighted, and the model's scalar metrics."""


class TrainState(NamedTuple):
  """What a step reads and writes, and a checkpoint holds.

  Attributes:
    step: Optimizer steps taken.
    halted: True after a step with a non-finite loss or gradient; from then on
      steps change nothing, so that the weights before the failure remain even
      though later steps were already dispatched.
    params: The parameters.
    opt_state: The optimizer's state, of the parameters' types.
  """

  step: Int[Array, ""]
  halted: Bool[Array, ""]
  params: Any
  opt_state: Any


class Report(NamedTuple):
  """What a training step says about itself.

  Attributes:
    metrics: float32 scalars by name.
    finite: Whether loss, gradient and update were finite.
    nonfinite: Per parameter path, whether its gradient was non-finite: one
      value, or one per layer for parameters stacked over layers.
  """

  metrics: dict[str, Float[Array, ""]]
  finite: Bool[Array, ""]
  nonfinite: dict[str, Bool[Array, "..."]]


def new_state(
  params: Any, optimizer: optax.GradientTransformation
) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    halted=jnp.zeros((), bool),
    params=params,
    opt_state=optimizer.init(params),
  )


def train_step(
  state: TrainState,
  batch: Batch,
  *,
  losses: Losses,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  accumulate: int = 1,
) -> tuple[TrainState, Report]:
  """Takes one optimizer step on the mean loss of a batch's target tokens.

  Args:
    state: The state before the step.
    batch: See `Batch`; B must be a multiple of `accumulate`.
    losses: The model.
    optimizer: As made by `atlas_jax.training.optimizer`.
    schedule: The learning rate by step, for the metrics only.
    accumulate: Number of microbatches over which the gradient is summed. Each
      weighs as much as it has target tokens, so that the result is that of
      one large batch up to rounding.

  Returns:
    The state after the step (the same but for `halted` if anything was not
    finite, or if `state.halted`), and the step's report.
  """
  grads, metrics = _gradients(losses, state.params, batch, accumulate)
  # optax multiplies its int32 counter with floats.
  with jax.numpy_dtype_promotion("standard"):
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    rate = jnp.asarray(schedule(state.step), jnp.float32)
  params = optax.apply_updates(state.params, updates)

  metrics["grad_norm"] = _norm(grads)
  metrics["param_norm"] = _norm(state.params)
  count = sum(leaf.size for leaf in jax.tree.leaves(updates))
  metrics["update_rms"] = _norm(updates) / math.sqrt(count)
  metrics["learning_rate"] = rate
  finite = jnp.all(
    jnp.isfinite(
      jnp.stack([metrics[k] for k in ("loss", "grad_norm", "update_rms")])
    )
  )
  taken = finite & ~state.halted
  new = TrainState(state.step + 1, state.halted, params, opt_state)
  new = jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, state)
  new = new._replace(halted=~taken)
  return new, Report(metrics, finite, nonfinite_gradients(grads))


def eval_step(
  params: Any, batch: Batch, *, losses: Losses
) -> dict[str, Float[Array, ""]]:
  """Returns sums over a batch: `nats`, `tokens` (targets) and `bytes`."""
  nats, _ = losses(params, batch)
  return {
    "nats": jnp.sum(nats * batch["weights"]),
    "tokens": jnp.sum(batch["weights"]),
    "bytes": jnp.sum(batch["bytes"]),
  }


def bits_per_byte(nats: Any, count: Any) -> Any:
  """Turns a sum of nats over text of `count` bytes into bits per byte."""
  return nats / (count * math.log(2))


def _gradients(
  losses: Losses, params: Any, batch: Batch, accumulate: int
) -> tuple[Any, dict[str, Array]]:
  """Returns the gradient of the mean loss, and metrics of the batch."""
  # A batch without a single target has loss 0, not 0 / 0.
  tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
  bytes_ = jnp.maximum(jnp.sum(batch["bytes"]), 1.0)

  def loss_and_metrics(params: Any, micro: Batch):
    nats, extra = losses(params, micro)
    loss = jnp.sum(nats * micro["weights"]) / tokens
    share = jnp.sum(micro["weights"]) / tokens
    extra = {k: _float32(v) * share for k, v in extra.items()}
    return loss, {"loss": loss, **extra}

  grad = jax.grad(loss_and_metrics, has_aux=True)
  if accumulate == 1:
    grads, metrics = grad(params, batch)
  else:
    micros = jax.tree.map(lambda x: _split(x, accumulate), dict(batch))
    first = jax.tree.map(lambda x: x[0], micros)
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, jnp.float32),
      jax.eval_shape(grad, params, first),
    )

    def add(total: Any, micro: Batch):
      part = jax.tree.map(_float32, grad(params, micro))
      return jax.tree.map(jnp.add, total, part), None

    (grads, metrics), _ = jax.lax.scan(add, zeros, micros)
    grads = jax.tree.map(lambda x, p: x.astype(p.dtype), grads, params)
  metrics = dict(metrics)
  metrics["bits_per_byte"] = bits_per_byte(metrics["loss"] * tokens, bytes_)
  return grads, metrics


def _norm(tree: Any) -> Float[Array, ""]:
  """The global norm in float32, whatever the leaves are."""
  return optax.tree.norm(jax.tree.map(_float32, tree))


def _float32(x: Array) -> Array:
  return x.astype(jnp.float32)


def _split(x: Array, parts: int) -> Array:
  """[B, ...] -> [parts, B / parts, ...], each part taking every parts-th row.

  With rows split over devices, every device then finds all its rows of every
  part at home; cutting the batch into runs of rows would move them all.
  """
  return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
