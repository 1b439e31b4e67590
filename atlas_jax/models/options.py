"""Overrides of a mixer's memory, flat so that each is one flag."""

import dataclasses
from typing import Literal

from atlas_jax.config import field


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
  """Changes to the memory that `ModelConfig.mixer` names.

  Every field is None by default: the mixer's own value. An option that the
  resulting memory has no use for (`muon_every` without Muon) is an error, see
  `atlas_jax.models.presets.memory_of`.
  """

  features: Literal["identity", "polynomial"] | None = field(
    None, "Map of memory keys and queries before the first matrix."
  )
  degree: int | None = field(None, "Degree of the polynomial map.")
  key_width: int | None = field(
    None,
    "Narrower width, per head, to which the memory projects keys and queries; "
    "0: keep theirs.",
  )
  sketch: int | None = field(
    None,
    "Learned features per power of the polynomial map from 2 on, in place of "
    "all monomials; 0: all monomials.",
  )
  network: Literal["matrix", "mlp", "gated_mlp"] | None = field(
    None, "Architecture of the memory."
  )
  depth: int | None = field(None, "Matrices of an MLP memory.")
  expansion: float | None = field(
    None, "Hidden width of an MLP memory, as a multiple of the head width."
  )
  activation: Literal["gelu", "silu", "relu", "tanh"] | None = field(
    None, "Activation of an MLP memory."
  )
  residual: bool | None = field(
    None, "Add the key or query itself to an MLP memory's output."
  )
  layer_norm: bool | None = field(
    None, "Normalise an MLP memory's output before the residual."
  )
  bias: bool | None = field(
    None, "Give the matrices of an MLP memory after the first a bias."
  )
  objective: Literal["l2", "dot", "huber", "lp", "switched_huber"] | None = (
    field(None, "What the memory minimises at test time.")
  )
  huber_delta: float | None = field(
    None, "Error from which the Huber objective is linear."
  )
  lp_power: float | None = field(None, "Power p of the lp objective, 2 to 4.")
  optimizer: Literal["gd", "momentum", "muon", "chunk_muon"] | None = field(
    None,
    "How the memory descends: gradient descent, momentum, Muon, or Muon once "
    "per chunk (with window 1 and read start).",
  )
  muon_every: int | None = field(
    None,
    "Tokens between two orthogonalised steps; divides the chunk. 1 is the "
    "paper to the letter, the chunk is fastest.",
  )
  muon_steps: int | None = field(None, "Newton-Schulz iterations of Muon.")
  muon_epsilon: float | None = field(
    None, "Momentum norm below which Muon takes less than a full step."
  )
  muon_dtype: Literal["state", "float32", "bfloat16"] | None = field(
    None, "Operand type of the Newton-Schulz products; state: the carry's."
  )
  retention: (
    Literal["off", "scalar", "channel", "lq", "kl", "weight_norm"] | None
  ) = field(
    None,
    "Decay of the memory: off, one per head, or one per group of channels; one "
    "per head under an l_q norm (lq) or of the weights' logarithms (kl); "
    "weight_norm: none, but rows keep their length.",
  )
  decay_groups: int | None = field(
    None, "Groups of output channels with a decay of their own."
  )
  lq_power: float | None = field(
    None, "Power q of the retention lq, 2 or more."
  )
  window: int | None = field(
    None, "Tokens whose objective is summed at each step of the memory (c)."
  )
  chunk: int | None = field(
    None, "Tokens that share the weights at which gradients are taken (b)."
  )
  read: Literal["after", "before", "start"] | None = field(
    None,
    "Read the memory after or before a token's own write; start: as it was at "
    "the chunk's start, for chunk_muon.",
  )
  rate_by_position: bool | None = field(
    None,
    "Divide what a chunk has written by its number of tokens so far, with a "
    "learned correction (TTT; plain descent only).",
  )
  bound: Literal["default", "off"] | None = field(
    None, "Limits that keep the memory finite; off: the bare equations."
  )
  budget: Literal["full", "diagonal", "off"] | None = field(
    None, "How the bound limits the summed step of a chunk."
  )
  gradient_clip: float | None = field(
    None,
    "Largest norm, per head and matrix, of the loss's gradient with respect "
    "to the memory at a chunk's border; 0: no limit.",
  )
