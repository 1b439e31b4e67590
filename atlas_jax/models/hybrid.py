"""Hybrids of attention and a memory as entries of the registry."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from atlas_jax.config import suggestion
from atlas_jax.errors import UserError
from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.layers.initial import Source
from atlas_jax.layers.memory_as_context import (
  MemoryAsContext,
  SegmentAttention,
)
from atlas_jax.layers.memory_as_gate import MemoryAsGate
from atlas_jax.layers.memory_as_layer import MemoryAsLayer
from atlas_jax.layers.mixer import Mixer
from atlas_jax.models import attention, deep, kernel, matrix, older
from atlas_jax.models.entry import Entry, common, given

if TYPE_CHECKING:
  from atlas_jax.models.config import ModelConfig

# What may be the memory.
PARTS: Mapping[str, Entry] = {
  **deep.ENTRIES,
  **attention.ENTRIES,
  **matrix.ENTRIES,
  **kernel.ENTRIES,
  **older.ENTRIES,
}

_MEMORY = "atlas"
_PERSISTENT = 4
_SEGMENT = 256
# What does not write to the residual stream is not made smaller by its depth.
_INSIDE: dict[str, Any] = {"output_scale": 1.0}
_ATTENTION = ("kv_heads", "rope_base", "qk_norm", "window", "persistent")


def memory_entry(config: "ModelConfig") -> Entry:
  """The mixer that is the memory of a hybrid.

  Raises:
    UserError: It is unknown.
  """
  name = config.hybrid.memory or _MEMORY
  if name not in PARTS:
    raise UserError(
      f"unknown model.hybrid.memory {name!r}{suggestion(name, PARTS)}; there "
      f"are {', '.join(PARTS)}"
    )
  return PARTS[name]


def _attention(
  config: "ModelConfig", rngs: Source, **changes: Any
) -> AttentionMixer:
  """Attention to a window, with persistent tokens."""
  options = {"window": attention.WINDOW, "persistent": _PERSISTENT}
  options |= given(config.attention, _ATTENTION)
  return AttentionMixer(rngs=rngs, **options, **common(config) | changes)


def _make_gate(config: "ModelConfig", rngs: Source) -> Mixer:
  return MemoryAsGate(
    _attention(config, rngs, **_INSIDE),
    memory_entry(config).make(config, rngs),
    norm_epsilon=config.norm_epsilon,
    scale=config.init_scale,
    output_scale=(2 * config.layers) ** -0.5,
    dtype=jnp.dtype(config.dtype),
    param_dtype=jnp.dtype(config.param_dtype),
    rngs=rngs,
  )


def _make_layer(config: "ModelConfig", rngs: Source) -> Mixer:
  # The memory first, so that it sees what the block gives.
  memory = memory_entry(config).make(config, rngs)
  return MemoryAsLayer(
    _attention(config, rngs),
    memory,
    norm_epsilon=config.norm_epsilon,
    param_dtype=jnp.dtype(config.param_dtype),
  )


def _make_context(config: "ModelConfig", rngs: Source) -> Mixer:
  options = {"persistent": _PERSISTENT, **given(config.attention, _ATTENTION)}
  options.pop("window", None)
  segment = config.hybrid.segment or _SEGMENT
  memory = memory_entry(config).make(config, rngs)
  return MemoryAsContext(
    SegmentAttention(rngs=rngs, **options, **common(config) | _INSIDE),
    memory,
    segment=segment,
    norm_epsilon=config.norm_epsilon,
    scale=config.init_scale,
    output_scale=(2 * config.layers) ** -0.5,
    dtype=jnp.dtype(config.dtype),
    param_dtype=jnp.dtype(config.param_dtype),
    implementation=config.implementation,
    rngs=rngs,
  )


def _entry(
  make: Callable[["ModelConfig", Source], Mixer],
  options: tuple[str, ...],
  *,
  equation: str,
  window: str,
  state: str,
  cost: str,
  source: str,
) -> Entry:
  """One line; what the memory is, and its options, are its own line's."""
  return Entry(
    family="hybrid",
    make=make,
    options=("hybrid.memory", *options),
    equation=equation,
    objective="the memory's",
    network=f"attention and a memory (by default {_MEMORY})",
    optimizer="the memory's",
    retention="the memory's",
    window=window,
    state=state,
    cost=cost,
    source=source,
  )


_WINDOWED = tuple(f"attention.{name}" for name in _ATTENTION)
_WHOLE = tuple(name for name in _WINDOWED if name != "attention.window")

ENTRIES: Mapping[str, Entry] = {
  "mac": _entry(
    _make_context,
    (*_WHOLE, "hybrid.segment"),
    equation="y = attention([p; M_segment(q); x]); "
    "o_t = RMSNorm(y_t) ⊙ SiLU(RMSNorm(M_t(y_t))); M deep, "
    "linear_attention, gla, mamba2, deltanet or gated_deltanet",
    window=f"segments of {_SEGMENT} tokens",
    state="the memory's and (segment - 1) D",
    cost="the memory's + T segment D",
    source="arXiv 2501.00663, Eq. 21-25",
  ),
  "mag": _entry(
    _make_gate,
    _WINDOWED,
    equation="y = swa([p; x]); o_t = RMSNorm(y_t) ⊙ SiLU(RMSNorm(M_t(x_t)))",
    window=f"{attention.WINDOW} tokens",
    state="the memory's and that of swa",
    cost="the memory's + T W D",
    source="arXiv 2501.00663, Eq. 26-28",
  ),
  "mal": _entry(
    _make_layer,
    _WINDOWED,
    equation="o = swa([p; RMSNorm(M(x))])",
    window=f"{attention.WINDOW} tokens",
    state="the memory's and that of swa",
    cost="the memory's + T W D",
    source="arXiv 2501.00663, Eq. 29-31",
  ),
}
