"""Flax NNX layers around memories and attention, for any model.

Use them under jax's own transformations; `nnx.split` and `nnx.merge` give and
take the parameters as a tree.
"""

from atlas_jax.layers.arrangement import Arrangement, arrange
from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.layers.block import Block, Sequence
from atlas_jax.layers.convolution import Convolution
from atlas_jax.layers.deep_transformer_mixer import (
  DeepTransformerMixer,
  deep_transformer,
)
from atlas_jax.layers.delta_mixer import DeltaNetMixer, GatedDeltaNetMixer
from atlas_jax.layers.exponential_memory_mixer import ExponentialMemoryMixer
from atlas_jax.layers.gates import MemoryGates
from atlas_jax.layers.gla_mixer import GLAMixer
from atlas_jax.layers.hyena_mixer import HyenaMixer
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.linear_attention_mixer import LinearAttentionMixer
from atlas_jax.layers.longhorn_mixer import LonghornMixer
from atlas_jax.layers.mamba2_mixer import Mamba2Mixer
from atlas_jax.layers.memory_as_context import MemoryAsContext
from atlas_jax.layers.memory_as_gate import MemoryAsGate
from atlas_jax.layers.memory_as_layer import MemoryAsLayer
from atlas_jax.layers.memory_mixer import (
  MemoryMixer,
  MemoryMixerState,
  Tails,
)
from atlas_jax.layers.mesa_mixer import MesaMixer
from atlas_jax.layers.mixer import Mixer, MixerOutput
from atlas_jax.layers.recurrent_cell_mixer import RecurrentCellMixer
from atlas_jax.layers.reformer_mixer import ReformerMixer
from atlas_jax.layers.retnet_mixer import RetNetMixer
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.layers.rotary import rotate
from atlas_jax.layers.rwkv7_mixer import RWKV7Mixer
from atlas_jax.layers.segment_attention import SegmentAttention
from atlas_jax.layers.swiglu import SwiGLU

__all__ = [
  "Arrangement",
  "AttentionMixer",
  "Block",
  "Convolution",
  "DeepTransformerMixer",
  "DeltaNetMixer",
  "ExponentialMemoryMixer",
  "GLAMixer",
  "GatedDeltaNetMixer",
  "HyenaMixer",
  "Linear",
  "LinearAttentionMixer",
  "LonghornMixer",
  "Mamba2Mixer",
  "MemoryAsContext",
  "MemoryAsGate",
  "MemoryAsLayer",
  "MemoryGates",
  "MemoryMixer",
  "MemoryMixerState",
  "MesaMixer",
  "Mixer",
  "MixerOutput",
  "RMSNorm",
  "RWKV7Mixer",
  "RecurrentCellMixer",
  "ReformerMixer",
  "RetNetMixer",
  "SegmentAttention",
  "Sequence",
  "SwiGLU",
  "Tails",
  "arrange",
  "deep_transformer",
  "rotate",
]
