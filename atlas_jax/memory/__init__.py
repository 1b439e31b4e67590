"""Test-time memories as pure functions over arrays: no module system.

`Memory` says which memory, `init_params` makes its outer parameters, `apply`
runs it over a sequence and `step` over one token.
"""

from atlas_jax.memory import layout
from atlas_jax.memory.bounds import UNBOUNDED, Bound
from atlas_jax.memory.config import Memory, init_params, state_dtype
from atlas_jax.memory.decode import step, with_cache, without_cache
from atlas_jax.memory.features import Identity, Polynomial
from atlas_jax.memory.gates import Gates
from atlas_jax.memory.networks import MLP, GatedMLP, Matrix
from atlas_jax.memory.newton_schulz import newton_schulz
from atlas_jax.memory.objectives import (
  L2,
  DotProduct,
  Huber,
  Lp,
  SwitchedHuber,
)
from atlas_jax.memory.optimizers import (
  ChunkMuon,
  GradientDescent,
  Momentum,
  Muon,
)
from atlas_jax.memory.retention import (
  ChannelRetention,
  KLRetention,
  LqRetention,
  NoRetention,
  ScalarRetention,
  WeightNorm,
)
from atlas_jax.memory.state import MemoryState, init_state, norm, reset
from atlas_jax.memory.stream import Output, apply

__all__ = [
  "L2",
  "MLP",
  "UNBOUNDED",
  "Bound",
  "ChannelRetention",
  "ChunkMuon",
  "DotProduct",
  "GatedMLP",
  "Gates",
  "GradientDescent",
  "Huber",
  "Identity",
  "KLRetention",
  "Lp",
  "LqRetention",
  "Matrix",
  "Memory",
  "MemoryState",
  "Momentum",
  "Muon",
  "NoRetention",
  "Output",
  "Polynomial",
  "ScalarRetention",
  "SwitchedHuber",
  "WeightNorm",
  "apply",
  "init_params",
  "init_state",
  "layout",
  "newton_schulz",
  "norm",
  "reset",
  "state_dtype",
  "step",
  "with_cache",
  "without_cache",
]
