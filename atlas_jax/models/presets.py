"""The mixers by name: the paper's Table 1 as values."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atlas_jax.config import suggestion
from atlas_jax.errors import UserError
from atlas_jax.memory.bounds import UNBOUNDED, Bound
from atlas_jax.memory.config import Memory
from atlas_jax.memory.features import Identity, Polynomial
from atlas_jax.memory.networks import MLP, GatedMLP, Matrix
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
from atlas_jax.models.options import MemoryOptions

if TYPE_CHECKING:
  from atlas_jax.models.config import ModelConfig

# A degree-2 map of 16 inputs has 153 features, of 64 inputs 2145.
_POLYNOMIAL = Polynomial(degree=2, key_width=16)

# Gradients of these are long by nature: TTT's keys have length sqrt(width), and
# a layer norm divides by a small spread. A clip at the length for other
# memories would shorten every token's, and leave of the equation its direction.
# This one is a hundred times longer than they are, against overflow.
_LOOSE = Bound(error_clip=1e4)

MIXERS: Mapping[str, Memory] = {
  "atlas": Memory(
    features=_POLYNOMIAL,
    network=MLP(),
    objective=L2(),
    optimizer=Muon(every=16),
    retention=ScalarRetention(),
    window=16,
  ),
  "atlas_pp": Memory(
    features=_POLYNOMIAL,
    network=GatedMLP(),
    objective=L2(),
    optimizer=Muon(every=16),
    retention=ScalarRetention(),
    window=16,
  ),
  "omeganet": Memory(
    features=_POLYNOMIAL,
    network=MLP(),
    objective=L2(),
    optimizer=GradientDescent(),
    retention=ScalarRetention(),
    window=16,
  ),
  "titans": Memory(
    features=Identity(),
    network=MLP(),
    objective=L2(),
    optimizer=Momentum(),
    retention=ScalarRetention(),
    window=1,
  ),
  "titans_nomom": Memory(
    features=Identity(),
    network=MLP(),
    objective=L2(),
    optimizer=GradientDescent(),
    retention=ScalarRetention(),
    window=1,
  ),
  "dla": Memory(
    features=_POLYNOMIAL,
    network=MLP(),
    objective=DotProduct(),
    optimizer=GradientDescent(),
    retention=ScalarRetention(),
    window=1,
  ),
  # The window in which its authors write it out (arXiv 2602.24281, Eq. 28).
  "swla": Memory(
    features=_POLYNOMIAL,
    network=MLP(),
    objective=DotProduct(),
    optimizer=GradientDescent(),
    retention=ScalarRetention(),
    window=2,
  ),
  # A bias of the first matrix is a feature 1.
  "ttt_linear": Memory(
    features=Identity(bias=True),
    network=MLP(depth=1, layer_norm=True),
    objective=L2(factor=0.5),
    optimizer=GradientDescent(),
    retention=NoRetention(),
    window=1,
    chunk=16,
    rate_by_position=True,
    bound=_LOOSE,
  ),
  "ttt_mlp": Memory(
    features=Identity(bias=True),
    network=MLP(layer_norm=True, bias=True),
    objective=L2(factor=0.5),
    optimizer=GradientDescent(),
    retention=NoRetention(),
    window=1,
    chunk=16,
    rate_by_position=True,
    bound=_LOOSE,
  ),
  "moneta": Memory(
    features=Identity(),
    network=MLP(layer_norm=True),
    objective=Lp(power=3.0),
    optimizer=GradientDescent(),
    retention=LqRetention(power=4.0),
    window=1,
    bound=_LOOSE,
  ),
  "yaad": Memory(
    features=Identity(),
    network=MLP(layer_norm=True),
    objective=SwitchedHuber(),
    optimizer=GradientDescent(),
    retention=ScalarRetention(),
    window=1,
    bound=_LOOSE,
  ),
  "memora": Memory(
    features=Identity(),
    network=MLP(layer_norm=True),
    objective=L2(factor=0.5),
    optimizer=GradientDescent(),
    retention=KLRetention(),
    window=1,
    bound=_LOOSE,
  ),
  "lact": Memory(
    features=Identity(),
    network=GatedMLP(expansion=1.0, activation="silu", residual=False),
    objective=DotProduct(),
    optimizer=ChunkMuon(),
    retention=WeightNorm(),
    window=1,
    chunk=2048,
    read="start",
  ),
}

# For each part of a memory: its kinds by name, and which option of
# `MemoryOptions` is which attribute of a kind.
_PARTS: Mapping[str, tuple[Mapping[str, type], Mapping[str, str]]] = {
  "features": (
    {"identity": Identity, "polynomial": Polynomial},
    {"degree": "degree", "key_width": "key_width", "sketch": "sketch"},
  ),
  "network": (
    {"matrix": Matrix, "mlp": MLP, "gated_mlp": GatedMLP},
    {
      "depth": "depth",
      "expansion": "expansion",
      "activation": "activation",
      "residual": "residual",
      "layer_norm": "layer_norm",
      "bias": "bias",
    },
  ),
  "objective": (
    {
      "l2": L2,
      "dot": DotProduct,
      "huber": Huber,
      "lp": Lp,
      "switched_huber": SwitchedHuber,
    },
    {"huber_delta": "delta", "lp_power": "power"},
  ),
  "optimizer": (
    {
      "gd": GradientDescent,
      "momentum": Momentum,
      "muon": Muon,
      "chunk_muon": ChunkMuon,
    },
    {
      "muon_every": "every",
      "muon_steps": "steps",
      "muon_epsilon": "epsilon",
      "muon_dtype": "dtype",
    },
  ),
  "retention": (
    {
      "off": NoRetention,
      "scalar": ScalarRetention,
      "channel": ChannelRetention,
      "lq": LqRetention,
      "kl": KLRetention,
      "weight_norm": WeightNorm,
    },
    {"decay_groups": "groups", "lq_power": "power"},
  ),
}

# Values of an option that stand for None in the memory.
_ABSENT: Mapping[str, Any] = {
  "key_width": 0,
  "sketch": 0,
  "muon_dtype": "state",
}


def memory_of(config: "ModelConfig") -> Memory:
  """The memory of a model's blocks: its mixer's, with the options applied.

  Raises:
    UserError: The mixer is unknown, an option has an impossible value, or an
      option is set that the resulting memory has no use for.
  """
  if config.mixer not in MIXERS:
    raise UserError(
      f"unknown model.mixer {config.mixer!r}"
      f"{suggestion(config.mixer, MIXERS)}; there are {', '.join(MIXERS)}"
    )
  return override(MIXERS[config.mixer], config.memory)


def override(memory: Memory, options: MemoryOptions) -> Memory:
  """Returns the memory with every option that is not None applied.

  Raises:
    UserError: As `memory_of`.
  """
  given = {
    spec.name: getattr(options, spec.name)
    for spec in dataclasses.fields(options)
    if getattr(options, spec.name) is not None
  }
  changes = {name: _part(memory, name, given) for name in _PARTS}
  changes["bound"] = _bound(memory.bound, given)
  for name in ("window", "chunk", "read", "rate_by_position"):
    if name in given:
      changes[name] = given[name]
  return dataclasses.replace(memory, **changes)


def _part(memory: Memory, part: str, given: Mapping[str, Any]) -> Any:
  """One part of the memory, of the kind and with the attributes asked for."""
  kinds, attributes = _PARTS[part]
  current = getattr(memory, part)
  kind = kinds[given[part]] if part in given else type(current)
  # What both kinds have (key_width, residual) outlives a change of kind.
  fields = {spec.name for spec in dataclasses.fields(kind) if spec.init}
  values = {
    spec.name: getattr(current, spec.name)
    for spec in dataclasses.fields(current)
    if spec.init and spec.name in fields
  }
  for option, attribute in attributes.items():
    if option not in given:
      continue
    if attribute not in fields:
      name = next(name for name, known in kinds.items() if known is kind)
      raise UserError(
        f"model.memory.{option} is set, but {part} {name} has no use for it: "
        f"leave it out or change model.memory.{part}"
      )
    value = given[option]
    absent = option in _ABSENT and value == _ABSENT[option]
    values[attribute] = None if absent else value
  return kind(**values)


def _bound(bound: Bound | None, given: Mapping[str, Any]) -> Bound | None:
  """The memory's bound with the options `bound`, `budget`, `gradient_clip`."""
  if given.get("bound") == "off":
    bound = None
  elif given.get("bound") == "default":
    bound = bound or Bound()
  if "budget" in given:
    if bound is None:
      raise UserError(
        "model.memory.budget is set, but the memory has no bound: leave it "
        "out or set model.memory.bound=default"
      )
    budget = None if given["budget"] == "off" else given["budget"]
    bound = dataclasses.replace(bound, budget=budget)
  if "gradient_clip" in given:
    clip = given["gradient_clip"] or None
    if clip is None and bound is None:
      return None
    bound = dataclasses.replace(bound or UNBOUNDED, gradient_clip=clip)
  return bound
