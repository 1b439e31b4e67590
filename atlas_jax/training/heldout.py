"""The loss on held-out text, as the training loop measures it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from atlas_jax.training.program import Program
from atlas_jax.training.step import bits_per_byte


def with_bytes(
  batch: Mapping[str, np.ndarray],
  byte_length: Callable[[np.ndarray], np.ndarray],
) -> dict[str, np.ndarray]:
  """Adds `bytes` [B, T] float32: the bytes that each counted target stands for.

  Args:
    batch: Has `targets` and `weights`, [B, T].
    byte_length: The tokenizer's: bytes by token id.
  """
  lengths = np.asarray(byte_length(batch["targets"]), np.float32)
  return {**batch, "bytes": lengths * batch["weights"]}


def evaluate(
  program: Program, params: Any, batches: Iterable[Mapping[str, np.ndarray]]
) -> dict[str, float]:
  """Measures the mean loss of all targets of some batches.

  Args:
    program: The compiled steps.
    params: Parameters, sharded as the program's.
    batches: Host batches with `bytes`, all of one shape.

  Returns:
    `loss` in nats per token, and `bits_per_byte`.
  """
  # Every batch is dispatched before the first result is waited for.
  sums = [program.eval_step(params, program.place(batch)) for batch in batches]
  total = {
    key: float(sum(np.float64(part[key]) for part in jax.device_get(sums)))
    for key in ("nats", "tokens", "bytes")
  }
  return {
    "loss": total["nats"] / max(total["tokens"], 1.0),
    "bits_per_byte": bits_per_byte(total["nats"], max(total["bytes"], 1.0)),
  }
