"""What the layers have in common that hold attention and a memory."""

import math
from typing import Any, NamedTuple

from jaxtyping import Array, Int

from atlas_jax.errors import UserError
from atlas_jax.layers.mixer import Mixer, shortest


class HybridState(NamedTuple):
  """The states of both parts."""

  attention: Any
  memory: Any


class Hybrid(Mixer):
  """Attention and a memory as one mixer; a subclass says how they meet.

  Its state is that of both, and it grows if one of theirs does.

  Args:
    attention: Mostly attention to a window, with persistent tokens: learned
      ones that all tokens see. They enter attention only; their place in the
      memory is taken by its learned start.
    memory: Any mixer.

  Raises:
    UserError: The parts have different widths.
  """

  def __init__(self, attention: Mixer, memory: Mixer):
    if attention.dim != memory.dim:
      raise UserError(
        f"attention of width {attention.dim} and a memory of width "
        f"{memory.dim}: make them equal"
      )
    self.dim = memory.dim
    self.chunk = math.lcm(attention.chunk, memory.chunk)
    self.longest = shortest((attention.longest, memory.longest))
    self.attention = attention
    self.memory = memory

  def init_state(self, batch: int) -> HybridState:
    """The states of both parts."""
    return HybridState(
      self.attention.init_state(batch), self.memory.init_state(batch)
    )

  def counts(
    self, state: HybridState | None
  ) -> dict[int, Int[Array, "B"] | None]:
    """Those of both parts."""
    attention, memory = parts_of(state)
    return {**self.attention.counts(attention), **self.memory.counts(memory)}

  def prepare(self, state: HybridState) -> HybridState:
    """As of each part."""
    return HybridState(
      self.attention.prepare(state.attention), self.memory.prepare(state.memory)
    )

  def unprepare(self, state: HybridState) -> HybridState:
    """As of each part."""
    return HybridState(
      self.attention.unprepare(state.attention),
      self.memory.unprepare(state.memory),
    )

  def capacity(self, state: HybridState) -> int | None:
    """That of the part that grows, the smaller one if both do."""
    return shortest(
      (
        self.attention.capacity(state.attention),
        self.memory.capacity(state.memory),
      )
    )

  def resize(self, state: HybridState, capacity: int) -> HybridState:
    """As of each part."""
    return HybridState(
      self.attention.resize(state.attention, capacity),
      self.memory.resize(state.memory, capacity),
    )

  def fresh_like(self, state: HybridState, batch: int) -> HybridState:
    """As of each part."""
    return HybridState(
      self.attention.fresh_like(state.attention, batch),
      self.memory.fresh_like(state.memory, batch),
    )

  def carry_size(self, length: int) -> int:
    """That of both parts."""
    return self.attention.carry_size(length) + self.memory.carry_size(length)


def parts_of(state: HybridState | None) -> HybridState:
  """The states of the parts, None for both at a fresh start."""
  return HybridState(None, None) if state is None else state
