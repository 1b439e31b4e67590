"""A memory as a value: what it stores, how it learns, what it keeps."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from atlas_jax.errors import UserError
from atlas_jax.memory import checks
from atlas_jax.memory.bounds import UNBOUNDED, Bound
from atlas_jax.memory.features import Features, Identity, Polynomial
from atlas_jax.memory.networks import MLP, Entry, Matrix, Network
from atlas_jax.memory.objectives import L2, Objective
from atlas_jax.memory.optimizers import (
  ChunkMuon,
  GradientDescent,
  Muon,
  Optimizer,
)
from atlas_jax.memory.retention import Retention, ScalarRetention


@dataclasses.dataclass(frozen=True)
class Memory:
  """One test-time memory: a combination of independent choices.

  Every row of the paper's Table 1 whose memory is deep or whose gradients are
  frozen over a chunk is one such value. Frozen and hashable, so it can be a
  static argument.

  Attributes:
    features: map of keys and queries before the first matrix.
    network: the memory's architecture.
    objective: what is minimised for every token of the window.
    optimizer: how the window's gradient becomes a step.
    retention: how weights decay.
    window: tokens whose objective is summed at each step (c of the paper), the
      current one included; may exceed the chunk.
    chunk: tokens that share the weights at which gradients are taken (b).
    read: read with the weights "after" the token's own write, "before" it, or,
      with `ChunkMuon` only, with those of the chunk's "start".
    bound: what keeps the descent finite; None leaves the bare equations.
    rate_by_position: what a chunk has written up to its i-th token counts
      `max(0, 1 / i + p_i)` times there and, at the chunk's end, for good; p is
      learned and starts at 0, so that a chunk takes the mean of its steps (TTT,
      arXiv 2407.04620). Plain descent only.
  """

  features: Features = Polynomial(degree=2, key_width=16)
  network: Network = MLP()
  objective: Objective = L2()
  optimizer: Optimizer = Muon()
  retention: Retention = ScalarRetention()
  window: int = 16
  chunk: int = 64
  read: Literal["after", "before", "start"] = "after"
  bound: Bound | None = Bound()
  rate_by_position: bool = False

  def __post_init__(self):
    checks.part("features", self.features, Features)
    checks.part("network", self.network, Network)
    checks.part("objective", self.objective, Objective)
    checks.part("optimizer", self.optimizer, Optimizer)
    checks.part("retention", self.retention, Retention)
    checks.part("bound", self.bound, Bound | None)
    checks.count("window", self.window, " tokens")
    checks.count("chunk", self.chunk, " tokens")
    if self.read not in ("after", "before", "start"):
      raise UserError(f"read {self.read!r}: use after, before or start")
    if isinstance(self.optimizer, Muon) and self.chunk % self.optimizer.every:
      raise UserError(
        f"muon every {self.optimizer.every} does not divide the chunk "
        f"{self.chunk}: use a divisor of it"
      )
    self._check_combination()

  def _check_combination(self) -> None:
    """Refuses parts that do not go together."""
    if self.steps_once and (self.window > 1 or self.read != "start"):
      raise UserError(
        "one step per chunk needs a window of 1 and reading at the start: set "
        "window to 1 and read to start"
      )
    if self.read == "start" and not self.steps_once:
      raise UserError(
        "reading at the chunk's start is for one step per chunk: set read to "
        "after, or the optimizer to ChunkMuon"
      )
    if self.objective.gated and self.window > 1:
      raise UserError(
        f"an objective with a threshold for each token needs a window of 1, "
        f"not {self.window}: set window to 1"
      )
    if self.orthogonalises and not self.retention.linear:
      raise UserError(
        f"{type(self.retention).__name__} does not go with Muon: use another "
        "retention, or gradient descent or momentum"
      )
    plain = isinstance(self.optimizer, GradientDescent)
    if self.rate_by_position and not plain:
      raise UserError(
        "rate_by_position is for plain descent: set it to false, or the "
        "optimizer to GradientDescent"
      )

  @property
  def has_momentum(self) -> bool:
    return not isinstance(self.optimizer, GradientDescent)

  @property
  def orthogonalises(self) -> bool:
    return isinstance(self.optimizer, (Muon, ChunkMuon))

  @property
  def steps_once(self) -> bool:
    """Whether a chunk takes one step at its end, with rates by matrix."""
    return isinstance(self.optimizer, ChunkMuon)

  @property
  def muon(self) -> Muon:
    """The optimizer, where it is Muon."""
    if not isinstance(self.optimizer, Muon):
      raise TypeError(f"{self.optimizer} takes no steps inside a chunk")
    return self.optimizer

  @property
  def limits(self) -> Bound:
    """The bound, or one with every part off."""
    return self.bound or UNBOUNDED

  def entries(self, key_width: int, value_width: int) -> dict[str, Entry]:
    """The memory's matrices for keys and values of these widths.

    Raises:
      UserError: a residual between unequal widths, a feature map that is too
        large, or decay groups that do not divide a matrix's rows.
    """
    network = self.network
    if not isinstance(network, Matrix) and network.residual:
      if key_width != value_width:
        raise UserError(
          f"a residual memory needs equal key and value widths, not {key_width}"
          f" and {value_width}: make them equal or set residual to false"
        )
    table = network.entries(self.features, key_width, value_width)
    groups = max(1, self.retention.groups)
    for name, entry in table.items():
      if entry.rows % groups:
        raise UserError(
          f"{groups} decay groups do not divide the {entry.rows} rows of "
          f"memory matrix {name!r}: use a divisor"
        )
    return table

  def state_size(self, key_width: int, value_width: int) -> int:
    """Numbers that one head carries from chunk to chunk, weights + momentum."""
    table = self.entries(key_width, value_width)
    weights = sum(math.prod(e.shape) for e in table.values())
    return weights * (2 if self.has_momentum else 1)


def init_params(
  key: Array,
  memory: Memory,
  *,
  heads: int,
  key_width: int,
  value_width: int,
  dtype=jnp.float32,
) -> dict[str, Any]:
  """Outer parameters of a memory: start weights and feature parameters.

  Returns:
    `start`: every matrix's learned initial weights [H, rows, features], as they
    are stored (see `retention`; biases 0); `features`: the feature map's
    parameters, shared by the heads; `norm`: scale and offset [H, V] of the
    layer norm inside, if the network has one; `position`: the learned part
    [chunk] of `rate_by_position`, if there is one.
  """
  feature_key, start_key = jax.random.split(key)
  table = memory.entries(key_width, value_width)
  start = {}
  for name, entry in table.items():
    start_key, use = jax.random.split(start_key)
    # Well inside the cap of `bounds.Bound`.
    scale = memory.retention.start_scale(entry.shape)
    w = scale * jax.random.normal(use, (heads, *entry.shape), dtype)
    if isinstance(entry.lift, Identity) and entry.lift.bias:
      w = w.at[..., -1].set(0.0)
    start[name] = w
  params = {
    "start": start,
    "features": memory.features.init(feature_key, key_width, dtype),
  }
  if not isinstance(memory.network, Matrix) and memory.network.layer_norm:
    params["norm"] = {
      "scale": jnp.ones((heads, value_width), dtype),
      "offset": jnp.zeros((heads, value_width), dtype),
    }
  if memory.rate_by_position:
    params["position"] = jnp.zeros((memory.chunk,), dtype)
  return params


def state_dtype(dtype) -> jnp.dtype:
  """Type of carry, gates and sums: at least float32, float64 stays."""
  dtype = jnp.dtype(dtype)
  return dtype if dtype.itemsize > 4 else jnp.dtype(jnp.float32)
