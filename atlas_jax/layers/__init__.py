"""Flax NNX layers around memories and attention, for any model.

Use them under jax's own transformations; `nnx.split` and `nnx.merge` give and
take the parameters as a tree.
"""

from atlas_jax.layers.arrangement import Arrangement, arrange
from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.layers.block import Block, Sequence
from atlas_jax.layers.convolution import Convolution
from atlas_jax.layers.gates import MemoryGates
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.memory_mixer import (
  MemoryMixer,
  MemoryMixerState,
  Tails,
)
from atlas_jax.layers.mixer import Mixer, MixerOutput
from atlas_jax.layers.reformer_mixer import ReformerMixer
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.layers.rotary import rotate
from atlas_jax.layers.swiglu import SwiGLU

__all__ = [
  "Arrangement",
  "AttentionMixer",
  "Block",
  "Convolution",
  "Linear",
  "MemoryGates",
  "MemoryMixer",
  "MemoryMixerState",
  "Mixer",
  "MixerOutput",
  "RMSNorm",
  "ReformerMixer",
  "Sequence",
  "SwiGLU",
  "Tails",
  "arrange",
  "rotate",
]
