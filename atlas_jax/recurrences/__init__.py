"""Exact recurrences of matrix memories as pure functions over arrays.

Each has a plain token-by-token reference and a chunk-parallel form of its own;
sequences of any length go on from a state, in any split.
"""

from atlas_jax.recurrences.channel_decay import channel_decay
from atlas_jax.recurrences.delta import delta_rule, longhorn
from atlas_jax.recurrences.mesa import MesaState, mesa
from atlas_jax.recurrences.rwkv7 import rwkv7
from atlas_jax.recurrences.scalar_decay import scalar_decay

__all__ = [
  "MesaState",
  "channel_decay",
  "delta_rule",
  "longhorn",
  "mesa",
  "rwkv7",
  "scalar_decay",
]
