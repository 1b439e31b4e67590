"""Exact recurrences of matrix memories as pure functions over arrays.

Each has a plain token-by-token reference and a chunk-parallel form of its own;
sequences of any length go on from a state [B, H, V, K], in any split.
"""

from atlas_jax.recurrences.channel_decay import channel_decay
from atlas_jax.recurrences.scalar_decay import scalar_decay

__all__ = ["channel_decay", "scalar_decay"]
