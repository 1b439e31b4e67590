"""Says what went wrong when a step was not finite."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from atlas_jax.training.paths import is_stacked, path_name


def nonfinite_gradients(grads: Any) -> dict[str, Bool[Array, "..."]]:
  """Flags gradients with a NaN or infinity by parameter path.

  Args:
    grads: A tree of gradients.

  Returns:
    One bool per parameter; for parameters stacked over layers, bools [layers].
  """
  flags = {}
  for path, grad in jax.tree_util.tree_flatten_with_path(grads)[0]:
    name = path_name(path)
    axes = tuple(range(1 if is_stacked(name) else 0, grad.ndim))
    flags[name] = ~jnp.all(jnp.isfinite(grad), axis=axes)
  return flags


def explain(
  metrics: Mapping[str, float], nonfinite: Mapping[str, np.ndarray]
) -> str:
  """Describes a non-finite step in one line.

  Back-propagation runs from the loss to the embedding, and everything behind
  the first NaN becomes NaN; so the first in that order is the likely source.

  Args:
    metrics: The step's metrics.
    nonfinite: The flags of `nonfinite_gradients`, fetched.
  """
  values = [f"{k}={v}" for k, v in metrics.items() if not math.isfinite(v)]
  text = "non-finite " + (", ".join(values) or "update")
  groups = _groups_from_the_loss(nonfinite)
  if groups:
    text += f"; first non-finite gradient behind the loss: {groups[0]}"
    if len(groups) > 1:
      text += f" (then {len(groups) - 1} more groups, {groups[1]} first)"
  return text


def _groups_from_the_loss(nonfinite: Mapping[str, np.ndarray]) -> list[str]:
  """Names layer groups with bad gradients in the order of back-propagation."""
  ranked: dict[str, tuple[int, int]] = {}
  for name, flags in nonfinite.items():
    parts = name.split("/")
    if is_stacked(name):
      for layer in np.flatnonzero(flags):
        group = "/".join([f"{parts[0]}[{layer}]", *parts[1:2]])
        ranked[group] = (1, -int(layer))
    elif np.any(flags):
      ranked[parts[0]] = (2 if "embed" in parts[0] else 0, 0)
  return sorted(ranked, key=lambda group: ranked[group])
