"""Language models built from memory blocks."""

from atlas_jax.models.build import abstract, build, chunk_of
from atlas_jax.models.config import (
  AttentionOptions,
  HybridOptions,
  HyenaOptions,
  KernelOptions,
  MatrixOptions,
  MemoryOptions,
  ModelConfig,
)
from atlas_jax.models.language_model import (
  Hidden,
  LanguageModel,
  LanguageState,
  Output,
)
from atlas_jax.models.loss import loss, token_losses
from atlas_jax.models.presets import MIXERS, memory_of
from atlas_jax.models.size import Size, size

__all__ = [
  "MIXERS",
  "AttentionOptions",
  "Hidden",
  "HybridOptions",
  "HyenaOptions",
  "KernelOptions",
  "LanguageModel",
  "LanguageState",
  "MatrixOptions",
  "MemoryOptions",
  "ModelConfig",
  "Output",
  "Size",
  "abstract",
  "build",
  "chunk_of",
  "loss",
  "memory_of",
  "size",
  "token_losses",
]
