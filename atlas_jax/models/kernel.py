"""The exponential-kernel transformers as entries of the registry."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atlas_jax.attention.exponential_config import ExponentialMemory
from atlas_jax.layers.deep_transformer_mixer import deep_transformer
from atlas_jax.layers.exponential_memory_mixer import (
  DOT,
  SWDT,
  ExponentialMemoryMixer,
)
from atlas_jax.layers.initial import Source
from atlas_jax.layers.mixer import Mixer
from atlas_jax.models.entry import Entry, common, given

if TYPE_CHECKING:
  from atlas_jax.models.config import ModelConfig

_DEEP = (
  "lam",
  "learn_lam",
  "gated",
  "normalised",
  "temperature",
  "expansion",
  "chunk",
)
_ATTENTION = ("kv_heads", "rope_base", "qk_norm")
_MEMORY = ("normalised", "expansion", "window", "chunk")


def _make_deep_transformer(config: "ModelConfig", rngs: Source) -> Mixer:
  options = _without_zero_chunk(given(config.kernel, _DEEP))
  options |= given(config.attention, _ATTENTION)
  return deep_transformer(rngs=rngs, **options, **common(config))


def _make_memory(
  config: "ModelConfig", rngs: Source, *, memory: ExponentialMemory
) -> Mixer:
  changes = _without_zero_chunk(given(config.kernel, _MEMORY))
  return ExponentialMemoryMixer(
    memory=dataclasses.replace(memory, **changes),
    conv_width=config.conv_width,
    qk_epsilon=config.qk_epsilon,
    rngs=rngs,
    **given(config.kernel, ("temperature",)),
    **common(config),
  )


def _without_zero_chunk(options: dict[str, Any]) -> dict[str, Any]:
  """A chunk of 0 on the command line stands for None."""
  if options.get("chunk") == 0:
    options["chunk"] = None
  return options


def _branches(kernel: tuple[str, ...], attention: tuple[str, ...] = ()):
  return (
    *(f"kernel.{name}" for name in kernel),
    *(f"attention.{name}" for name in attention),
  )


ENTRIES: Mapping[str, Entry] = {
  "deep_transformer": Entry(
    family="kernel",
    make=_make_deep_transformer,
    options=_branches(_DEEP, _ATTENTION),
    equation="M_t = α_t M_(t-1) + η_t ∇⟨M(φ*(k_t)), v_t⟩; "
    "y_t = (1 - λ) softmax attention + λ M_t(q_t)",
    objective="DotProduct",
    network="MLP over exponential features",
    optimizer="GradientDescent",
    retention="ScalarRetention",
    window="1 token",
    state="T N (K + h + 2) + N V h, h = 4 K, N heads of keys",
    cost="T² H (K + h)",
    source="arXiv 2505.23735, Eq. 25-26 and Table 1",
  ),
  "swdt": Entry(
    family="kernel",
    make=functools.partial(_make_memory, memory=SWDT),
    options=_branches((*_MEMORY, "temperature")),
    equation="M_t = α_t M_(t-1) + η_t Σ_window γ_i ∇⟨M(φ*(k_i)), v_i⟩",
    objective="DotProduct",
    network="MLP over exponential features",
    optimizer="GradientDescent",
    retention="ScalarRetention",
    window=f"{SWDT.window} tokens",
    state="T H (1 + (W - 1) / C) (K + h + 2) + H V h, h = 4 K",
    cost="T² H (K + h), twice",
    source="arXiv 2505.23735, Table 1",
  ),
  "dot": Entry(
    family="kernel",
    make=functools.partial(_make_memory, memory=DOT),
    options=_branches((*_MEMORY, "temperature")),
    equation="M_t = α_t M_(t-1) - η_t Σ_window γ_i ∇‖M(φ*(k_i)) - v_i‖²",
    objective="L2",
    network="MLP over exponential features",
    optimizer="GradientDescent",
    retention="ScalarRetention",
    window=f"{DOT.window} tokens",
    state="T H (1 + (W - 1) / C) (K + h + 2) + H V h, h = 4 K",
    cost="T² H (K + h), twice",
    source="arXiv 2505.23735, Eq. 27-31 and Table 1",
  ),
}
