"""The deep test-time memories as entries of the registry."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from atlas_jax.errors import UserError
from atlas_jax.layers.initial import Source
from atlas_jax.layers.memory_mixer import MemoryMixer
from atlas_jax.memory import Memory
from atlas_jax.models.entry import OF_SOME_MIXERS, Entry, changed, common
from atlas_jax.models.presets import MIXERS, override

if TYPE_CHECKING:
  from atlas_jax.models.config import ModelConfig


def make_memory_mixer(
  config: "ModelConfig", rngs: Source, name: str
) -> MemoryMixer:
  """A mixer around the memory of this name, with the options applied."""
  memory = override(MIXERS[name], config.memory)
  narrow = memory.features.key_width
  if narrow is not None and not 0 < narrow <= config.head_width:
    raise UserError(
      f"model.memory.key_width={narrow} must lie between 0 (as wide as keys) "
      f"and the width of a head, {config.head_width}"
    )
  _check_gates(config, memory)
  return MemoryMixer(
    memory=memory,
    conv_width=config.conv_width,
    decay_start=config.decay_start,
    momentum_start=config.momentum_start,
    rate_max=config.rate_max or None,
    rate_start=config.rate_start or None,
    token_gate=config.token_gate,
    qk_epsilon=config.qk_epsilon,
    form=config.form,
    rngs=rngs,
    **common(config),
  )


def _check_gates(config: "ModelConfig", memory: Memory) -> None:
  """Refuses starting values of gates that this memory has not."""
  absent = {
    "decay_start": not memory.retention.groups,
    "momentum_start": not memory.has_momentum,
    "rate_max": memory.steps_once,
    "rate_start": memory.steps_once,
  }
  for name in changed(config, (name for name in absent if absent[name])):
    raise UserError(
      f"model.{name} is set, but this memory has no such gate: leave it out"
    )


def _entry(
  name: str,
  equation: str,
  source: str,
  cost: str = "T (memory + (chunk + window) widths)",
) -> Entry:
  """The line of one memory, most of it read off the memory itself."""
  memory = MIXERS[name]
  weights = "2 (weights, momentum)" if memory.has_momentum else "1 (weights)"
  return Entry(
    family="deep",
    make=lambda config, rngs: make_memory_mixer(config, rngs, name),
    options=("memory", *OF_SOME_MIXERS),
    equation=equation,
    objective=_words(memory.objective),
    network=f"{_words(memory.network)} over {_words(memory.features)}",
    optimizer=_words(memory.optimizer, "every"),
    retention=_words(memory.retention),
    window=f"{memory.window} token{'s' if memory.window > 1 else ''}",
    state=f"{weights} x H x memory + {memory.chunk - 1} pending tokens",
    cost=cost,
    source=source,
  )


def _words(part: object, *always: str) -> str:
  """A part of a memory with the fields that differ from its defaults.

  Args:
    part: A frozen dataclass.
    always: Fields that are named also where they do not differ.
  """
  changed = [
    f"{spec.name}={getattr(part, spec.name)}"
    for spec in dataclasses.fields(part)  # pyright: ignore[reportArgumentType]
    if spec.init
    and (spec.name in always or getattr(part, spec.name) != spec.default)
  ]
  name = type(part).__name__
  return f"{name}({', '.join(changed)})" if changed else name


_ATLAS = "arXiv 2505.23735"

ENTRIES: Mapping[str, Entry] = {
  "atlas": _entry(
    "atlas",
    "S_t = θ_t S_(t-1) + Σ_window γ_i ∇‖M(φ(k_i)) - v_i‖²; "
    "M_t = α_t M_(t-1) - η_t NS(S_t)",
    f"{_ATLAS}, Eq. 32-33",
  ),
  "atlas_pp": _entry(
    "atlas_pp",
    "as atlas, with M(x) = x + W_1 (σ(W_2 φ(x)) ⊙ W_3 φ(x))",
    f"{_ATLAS}, Eq. 43",
  ),
  "omeganet": _entry(
    "omeganet",
    "M_t = α_t M_(t-1) - η_t Σ_window γ_i ∇‖M(φ(k_i)) - v_i‖²",
    f"{_ATLAS}, Eq. 10",
  ),
  "titans": _entry(
    "titans",
    "S_t = θ_t S_(t-1) - η_t ∇‖M(k_t) - v_t‖²; M_t = α_t M_(t-1) + S_t",
    "arXiv 2501.00663, Eq. 13-14",
  ),
  "titans_nomom": _entry(
    "titans_nomom",
    "M_t = α_t M_(t-1) - η_t ∇‖M(k_t) - v_t‖²",
    f"{_ATLAS}, Table 1 (Titans-)",
  ),
  "dla": _entry(
    "dla",
    "M_t = α_t M_(t-1) + η_t ∇⟨M(φ(k_t)), v_t⟩",
    f"{_ATLAS}, Eq. 19",
  ),
  "swla": _entry(
    "swla",
    "M_t = α_t M_(t-1) + η_t Σ_window γ_i ∇⟨M(φ(k_i)), v_i⟩",
    f"{_ATLAS}, Eq. 20",
  ),
  "ttt_linear": _entry(
    "ttt_linear",
    "W_t = W_c - max(0, 1/i + p_i) / K Σ_(j≤i) η_j ∇½‖M(k_j) - v_j‖² over the "
    "chunk's first i tokens, at its start W_c; M(x) = x + LN(W x + b)",
    "arXiv 2407.04620, sections 2.3-2.7",
  ),
  "ttt_mlp": _entry(
    "ttt_mlp",
    "as ttt_linear, with M(x) = x + LN(W_2 gelu(W_1 x + b_1) + b_2)",
    "arXiv 2407.04620, section 2.7",
  ),
  "moneta": _entry(
    "moneta",
    "A_t = α_t A_(t-1) - η_t ∇‖M(k_t) - v_t‖_3^3; W = A / ‖A‖_4^2 at the end "
    "of a chunk",
    "arXiv 2504.13173, Eq. 24-25",
  ),
  "yaad": _entry(
    "yaad",
    "W_t = α_t W_(t-1) - η_t ∇(½‖e‖² if ‖e‖ ≤ δ_t, else δ_t ‖e‖_1), "
    "e = M(k_t) - v_t",
    "arXiv 2504.13173, Eq. 16 and 26",
  ),
  "memora": _entry(
    "memora",
    "W = c softmax(Z), Z_t = α_t Z_(t-1) - η_t ∇½‖M(k_t) - v_t‖², the softmax "
    "at the end of a chunk",
    "arXiv 2504.13173, Eq. 21 and 27",
  ),
  "lact": _entry(
    "lact",
    "S = θ S + Σ_chunk η_i ∇(-⟨M(k_i), v_i⟩); W = rows of W - NS(S) at their "
    "first norm; read before the chunk's write. Without the window attention "
    "that its authors add: see pattern=lact,swa",
    "arXiv 2505.23884, section 3",
    cost="T memory + T / chunk NS",
  ),
}
