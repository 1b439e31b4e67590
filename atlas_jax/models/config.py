"""The configuration of a language model."""

import dataclasses
import functools
import math
import operator
from typing import Literal

import jax
from flax import nnx

from atlas_jax.config import field
from atlas_jax.errors import UserError
from atlas_jax.layers.initial import Draws
from atlas_jax.layers.mixer import Mixer
from atlas_jax.models.attention_options import AttentionOptions
from atlas_jax.models.entry import OF_SOME_MIXERS, changed
from atlas_jax.models.hybrid import memory_entry
from atlas_jax.models.hybrid_options import HybridOptions
from atlas_jax.models.kernel_options import KernelOptions
from atlas_jax.models.matrix_options import MatrixOptions
from atlas_jax.models.older_options import HyenaOptions
from atlas_jax.models.options import MemoryOptions
from atlas_jax.models.registry import REGISTRY, mixers_of

# What is larger is a slip of the hand, and no 32-bit number.
_LARGEST = 2**30

__all__ = [
  "AttentionOptions",
  "HybridOptions",
  "HyenaOptions",
  "KernelOptions",
  "MatrixOptions",
  "MemoryOptions",
  "ModelConfig",
]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and kinds of a language model's parts.

  Any value can be constructed; `validate` says what does not fit, so that
  several fields can be changed one after the other.
  """

  mixer: str = field(
    "atlas", "Mixer of every block, or a stack of several: see docs/models.md."
  )
  pattern: tuple[str, ...] = field(
    (), "Mixers that take turns, block by block, in place of `mixer`."
  )
  memory: MemoryOptions = MemoryOptions()
  attention: AttentionOptions = AttentionOptions()
  matrix: MatrixOptions = MatrixOptions()
  kernel: KernelOptions = KernelOptions()
  hyena: HyenaOptions = HyenaOptions()
  hybrid: HybridOptions = HybridOptions()
  dim: int = field(128, "Width of the residual stream; heads must divide it.")
  layers: int = field(4, "Blocks.")
  heads: int = field(
    4, "Heads per block; each has width dim / heads in most mixers."
  )
  mlp_hidden: int = field(
    0, "Hidden width of SwiGLU; 0: 8/3 dim, rounded up to a multiple of 64."
  )
  match: str = field(
    "",
    "Mixer, say transformer, whose number of parameters at this mlp_hidden the "
    "model gets by another hidden width; empty: mlp_hidden as it is.",
  )
  conv_width: int = field(
    4, "Taps of the causal convolutions of queries, keys and values."
  )
  decay_start: float = field(
    0.99, "Kept fraction of the memory per token before training (alpha)."
  )
  momentum_start: float = field(
    0.9, "Momentum factor per token before training (theta)."
  )
  rate_max: float = field(
    0.0,
    "Largest step of the memory per token (eta); 0: chosen for its optimizer "
    "and window.",
  )
  rate_start: float = field(
    0.0,
    "Step of the memory before training, as a share of rate_max; 0: chosen for "
    "the memory.",
  )
  token_gate: bool = field(
    False,
    "Multiply a token's weight in every window of the memory by a gate of that "
    "token itself.",
  )
  qk_epsilon: float = field(
    1e-6, "Length below which a query or key is not stretched to length 1."
  )
  norm_epsilon: float = field(1e-6, "Added to the mean square in RMSNorm.")
  init_scale: float = field(
    1.0, "Scale of all weights before training; 1: variance 1 / inputs."
  )
  tie_embeddings: bool = field(
    True, "Use the embedding as the output matrix, too."
  )
  vocab_multiple: int = field(
    128, "Rows of the embedding are rounded up to a multiple of this."
  )
  dtype: Literal["float32", "bfloat16"] = field(
    "float32",
    "Type of activations; norms, gates, memories and logits stay float32.",
  )
  param_dtype: Literal["float32", "bfloat16"] = field(
    "float32", "Type of the parameters."
  )
  remat: bool = field(
    True, "Keep only each block's input for the backward pass."
  )
  implementation: Literal["auto", "reference", "xla"] = field(
    "auto", "Which implementation of the memory runs."
  )
  form: Literal["dual", "associative"] = field(
    "dual", "How a chunk of the memory is computed; both give the same."
  )

  @property
  def head_width(self) -> int:
    """Width of one head's queries, keys and values."""
    return self.dim // self.heads

  @property
  def mixers(self) -> tuple[str, ...]:
    """Mixers of the blocks, in turn.

    Raises:
      UserError: A name is unknown.
    """
    return mixers_of(self.mixer, self.pattern)

  @property
  def hidden(self) -> int:
    """Hidden width of SwiGLU, before any match."""
    return self.mlp_hidden or 64 * math.ceil(self.dim * 8 / 3 / 64)

  def validate(self) -> None:
    """Checks that a model can be built.

    Raises:
      UserError: One line that names the first field that does not fit.
    """
    for name in ("dim", "layers", "heads", "conv_width", "vocab_multiple"):
      if not 1 <= getattr(self, name) <= 2**20:
        raise UserError(f"model.{name} must lie between 1 and {2**20}")
    if self.conv_width > 64:
      raise UserError("model.conv_width must be 64 or less")
    if not 0 <= self.mlp_hidden <= 2**20:
      raise UserError(
        f"model.mlp_hidden must lie between 0 (automatic) and {2**20}"
      )
    if self.dim % self.heads:
      raise UserError(
        f"model.dim={self.dim} is not divisible by model.heads={self.heads}: "
        "make dim a multiple of heads"
      )
    for name in ("decay_start", "momentum_start"):
      if not 0 < getattr(self, name) < 1:
        raise UserError(f"model.{name} must lie between 0 and 1, both excluded")
    if not 0 <= self.rate_start < 1:
      raise UserError("model.rate_start must lie from 0 (automatic) to below 1")
    for name in ("qk_epsilon", "norm_epsilon", "init_scale"):
      if not 0 < getattr(self, name) <= 1e6:
        raise UserError(f"model.{name} must lie above 0, up to 1e6")
    if not 0 <= self.rate_max <= 1e6:
      raise UserError("model.rate_max must lie between 0 (automatic) and 1e6")
    mixers = self.mixers
    if self.layers % len(mixers):
      raise UserError(
        f"model.layers={self.layers} must be a multiple of the "
        f"{len(mixers)} mixers that take turns ({', '.join(mixers)})"
      )
    self._check_options(mixers)
    for name in set(mixers):
      # Finds everything else that does not fit.
      nnx.eval_shape(functools.partial(_make, self, name))

  def _check_options(self, mixers: tuple[str, ...]) -> None:
    """Refuses options that no mixer of the model reads."""
    read = {option for name in mixers for option in REGISTRY[name].options}
    for name in mixers:
      if REGISTRY[name].family == "hybrid":
        read |= set(memory_entry(self).options)
    given = changed(self, OF_SOME_MIXERS)
    for spec in dataclasses.fields(self):
      value = getattr(self, spec.name)
      if dataclasses.is_dataclass(value):
        given += [
          f"{spec.name}.{option.name}"
          for option in dataclasses.fields(value)
          if getattr(value, option.name) is not None
        ]
    for name in given:
      value = operator.attrgetter(name)(self)
      if isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
        raise UserError(f"model.{name}={value} must lie within +-{_LARGEST}")
      if read.isdisjoint((name, name.split(".")[0])):
        raise UserError(
          f"model.{name} is set, but {', '.join(mixers)} has no use for it: "
          "leave it out"
        )


def _make(config: ModelConfig, name: str) -> Mixer:
  return REGISTRY[name].make(config, Draws(jax.random.key(0)))
