"""What is known of a mixer by name."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from atlas_jax.layers.initial import Source
from atlas_jax.layers.mixer import Mixer

if TYPE_CHECKING:
  from atlas_jax.models.config import ModelConfig


# Fields of `ModelConfig` itself that only some mixers read.
OF_SOME_MIXERS = (
  "conv_width",
  "decay_start",
  "momentum_start",
  "rate_max",
  "rate_start",
  "token_gate",
  "qk_epsilon",
  "form",
)


@dataclasses.dataclass(frozen=True)
class Entry:
  """One mixer of the registry, and its line of docs/models.md.

  Attributes:
    family: Section of the table.
    make: Makes the mixer of one block from a configuration and the source of
      its starting weights.
    options: What it reads of the configuration besides what all read: a branch
      ("memory"), fields of one ("attention.window"), or those of
      `OF_SOME_MIXERS`. Setting another field is an error.
    equation: What it computes, in plain text.
    objective, network, optimizer, retention, window: What is minimised, by
      which architecture, how, what decays, over how many tokens.
    state: Numbers kept per row and layer, as a formula.
    cost: Operations of training per row and layer, as an order.
    source: Paper and equation.
  """

  family: str
  make: Callable[["ModelConfig", Source], Mixer]
  options: tuple[str, ...]
  equation: str
  objective: str
  network: str
  optimizer: str
  retention: str
  window: str
  state: str
  cost: str
  source: str


def common(config: "ModelConfig") -> dict[str, Any]:
  """The arguments that all mixers take, but the source of weights."""
  return {
    "dim": config.dim,
    "heads": config.heads,
    "norm_epsilon": config.norm_epsilon,
    "scale": config.init_scale,
    "output_scale": (2 * config.layers) ** -0.5,
    "dtype": jnp.dtype(config.dtype),
    "param_dtype": jnp.dtype(config.param_dtype),
    "implementation": config.implementation,
  }


def changed(config: "ModelConfig", names: Iterable[str]) -> list[str]:
  """Those of the named fields that have not their default."""
  return [
    name
    for name in names
    if getattr(config, name) != getattr(type(config), name)
  ]


def given(options: Any, names: Iterable[str]) -> dict[str, Any]:
  """Those of the named fields that are set."""
  values = {name: getattr(options, name) for name in names}
  return {name: value for name, value in values.items() if value is not None}
