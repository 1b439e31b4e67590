"""The exponential-kernel transformers as entries of the registry."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atlas_jax.attention.exponential_config import ExponentialMemory
from atlas_jax.errors import UserError
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
_SHARED = ("conv_width", "qk_epsilon")


def _make_deep_transformer(config: "ModelConfig", rngs: Source) -> Mixer:
  if config.kernel.lam == 0 and not config.kernel.learn_lam:
    for name in ("chunk", "expansion"):
      if getattr(config.kernel, name) is not None:
        raise UserError(
          f"model.kernel.{name} is set, but lam=0 leaves the deep part away: "
          "leave it out"
        )
  options = _without_zero_chunk(given(config.kernel, _DEEP))
  options |= given(config.attention, _ATTENTION)
  return deep_transformer(rngs=rngs, **options, **common(config))


def _make_memory(
  config: "ModelConfig", rngs: Source, *, memory: ExponentialMemory
) -> Mixer:
  changes = _without_zero_chunk(given(config.kernel, _MEMORY))
  return ExponentialMemoryMixer(
    memory=dataclasses.replace(memory, **changes),
    **{name: getattr(config, name) for name in _SHARED},
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
    equation="y_t = (1 - λ) Σ_i p_i v_i + λ (q_t + W_t σ(z_0 + Σ_i p_i g_i)), "
    "p = softmax(q_t·k_i + log C_ti), C the decayed rates; g_i what the "
    "gradient of ⟨M(φ*(k_i)), v_i⟩ adds to z at the starting weights (with "
    "kernel.chunk: at the chunk's start); λ = 1. Not normalised by flag",
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
    options=(*_branches((*_MEMORY, "temperature")), *_SHARED),
    equation="as deep_transformer, with λ = 1, C of M_t = α_t M_(t-1) + η_t "
    "Σ_window γ_i ∇⟨M(φ*(k_i)), v_i⟩, gradients at the chunk's start",
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
    options=(*_branches((*_MEMORY, "temperature")), *_SHARED),
    equation="as swdt, with M_t = α_t M_(t-1) - η_t Σ_window γ_i "
    "∇‖M(φ*(k_i)) - v_i‖²",
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
