"""The loss of a language model, without all logits at once."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.models.language_model import LanguageModel

# Logits that exist at the same time: 2^24 float32 are 64 MiB.
LOGITS_AT_ONCE = 2**24


def loss(
  model: LanguageModel, batch: Mapping[str, Any], *, aligned: bool = True
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
  """Mean cross-entropy in nats of the targets that count.

  Args:
    model: The model.
    batch: Arrays [B, T]: `tokens`, `targets`, `segment_ids` (int32; segment 0
      is padding) and `weights` (float32, 0 where a target does not count).
    aligned: Documents start at multiples of the model's chunk.

  Returns:
    The loss, and the model's metrics.
  """
  out = model.hidden(
    batch["tokens"], segment_ids=batch["segment_ids"], aligned=aligned
  )
  losses = token_losses(model, out.hidden, batch["targets"])
  weights = batch["weights"]
  # A batch without a single target has loss 0, not 0 / 0.
  total = jnp.maximum(jnp.sum(weights), 1.0)
  return jnp.sum(losses * weights) / total, out.metrics


def token_losses(
  model: LanguageModel,
  hidden: Float[Array, "B T D"],
  targets: Int[Array, "B T"],
  *,
  at_once: int = LOGITS_AT_ONCE,
) -> Float[Array, "B T"]:
  """Cross-entropy in nats of each target, float32.

  Logits are made for some positions of all rows at a time, and made again in
  the backward pass, when there would be more than `at_once` of them.

  Args:
    model: Turns outputs into logits.
    hidden: As of `LanguageModel.hidden`.
    targets: Token ids; an id outside the vocabulary counts as token 0.
    at_once: Largest number of logits at a time.
  """
  batch, length, dim = hidden.shape
  targets = jnp.where((targets >= 0) & (targets < model.vocab), targets, 0)
  span = max(1, min(length, at_once // (batch * model.vocab)))

  def losses(hidden: Array, targets: Array) -> Array:
    logits = model.logits(hidden)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen

  if span == length:
    return losses(hidden, targets)
  parts = -(-length // span)
  grow = parts * span - length
  hidden = jnp.pad(hidden, ((0, 0), (0, grow), (0, 0)))
  targets = jnp.pad(targets, ((0, 0), (0, grow)))
  by_part = (
    jnp.moveaxis(hidden.reshape(batch, parts, span, dim), 1, 0),
    jnp.moveaxis(targets.reshape(batch, parts, span), 1, 0),
  )
  out = jax.lax.map(jax.checkpoint(lambda part: losses(*part)), by_part)
  return jnp.moveaxis(out, 0, 1).reshape(batch, parts * span)[:, :length]
