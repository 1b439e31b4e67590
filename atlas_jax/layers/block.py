"""Blocks of a model: a mixer and a feed-forward layer, each residual."""

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.mixer import Mixer, MixerOutput, shortest
from atlas_jax.layers.rms_norm import RMSNorm


class Block(Mixer):
  """`x <- x + mixer(norm(x))`, then `x <- x + mlp(norm(x))`.

  Args:
    dim: Width of x.
    mixer: Mixes tokens.
    mlp: Changes each token by itself and leaves zero at zero.
    norm_epsilon: Of the two norms.
    param_dtype: Type of the norms' scales.
  """

  def __init__(
    self,
    dim: int,
    mixer: Mixer,
    mlp: Callable[[Array], Array],
    *,
    norm_epsilon: float = 1e-6,
    param_dtype: DTypeLike = jnp.float32,
  ):
    self.dim = dim
    self.chunk = mixer.chunk
    self.longest = mixer.longest
    self.mixer_norm = RMSNorm(
      dim, epsilon=norm_epsilon, param_dtype=param_dtype
    )
    self.mixer = mixer
    self.mlp_norm = RMSNorm(dim, epsilon=norm_epsilon, param_dtype=param_dtype)
    self.mlp = mlp

  def mix(
    self, x: Float[Array, "B T D"], state: Any, arrangement: Arrangement
  ) -> MixerOutput:
    """Applies the block to arranged tokens, see `Mixer.mix`."""
    out = self.mixer.mix(self.mixer_norm(x), state, arrangement)
    x = x + out.y
    return out._replace(y=x + self.mlp(self.mlp_norm(x)))

  def step(
    self,
    x: Float[Array, "B D"],
    state: Any,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], Any]:
    """Applies the block to one token per row; arguments as of the mixer."""
    y, state = self.mixer.step(self.mixer_norm(x), state, valid=valid)
    x = x + y
    return x + self.mlp(self.mlp_norm(x)), state

  def init_state(self, batch: int) -> Any:
    """The mixer's state."""
    return self.mixer.init_state(batch)

  def counts(self, state: Any) -> dict[int, Int[Array, "B"] | None]:
    """Those of the mixer."""
    return self.mixer.counts(state)

  def prepare(self, state: Any) -> Any:
    """As of the mixer."""
    return self.mixer.prepare(state)

  def unprepare(self, state: Any) -> Any:
    """As of the mixer."""
    return self.mixer.unprepare(state)

  def capacity(self, state: Any) -> int | None:
    """As of the mixer."""
    return self.mixer.capacity(state)

  def resize(self, state: Any, capacity: int) -> Any:
    """As of the mixer."""
    return self.mixer.resize(state, capacity)

  def fresh_like(self, state: Any, batch: int) -> Any:
    """As of the mixer."""
    return self.mixer.fresh_like(state, batch)

  def carry_size(self, length: int) -> int:
    """As of the mixer."""
    return self.mixer.carry_size(length)


class Sequence(Mixer):
  """Mixers one after the other, as one; its state is the tuple of theirs.

  Metrics that several parts have are averaged.

  Args:
    parts: The mixers, in order.
  """

  def __init__(self, parts: Iterable[Mixer]):
    self.parts = nnx.List(parts)
    self.dim = self.parts[0].dim
    self.chunk = math.lcm(*(part.chunk for part in self.parts))
    self.longest = shortest(part.longest for part in self.parts)

  def mix(
    self, x: Float[Array, "B T D"], state: Any, arrangement: Arrangement
  ) -> MixerOutput:
    """Applies all parts to arranged tokens, see `Mixer.mix`."""
    states, metrics = [], collections.defaultdict(list)
    for part, before in self._with(state):
      out = part.mix(x, before, arrangement)
      x = out.y
      states.append(out.state)
      for name, value in out.metrics.items():
        metrics[name].append(value)
    means = {name: jnp.mean(jnp.stack(v)) for name, v in metrics.items()}
    after = None if arrangement.segment_ids is not None else tuple(states)
    return MixerOutput(x, after, means)

  def step(
    self,
    x: Float[Array, "B D"],
    state: Any,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], Any]:
    """Applies all parts to one token per row."""
    states = []
    for part, before in self._with(state):
      x, after = part.step(x, before, valid=valid)
      states.append(after)
    return x, tuple(states)

  def init_state(self, batch: int) -> Any:
    """The states of all parts."""
    return tuple(part.init_state(batch) for part in self.parts)

  def counts(self, state: Any) -> dict[int, Int[Array, "B"] | None]:
    """Those of all parts; parts with equal chunks have equal counts."""
    counts = {}
    for part, own in self._with(state):
      counts |= part.counts(own)
    return counts

  def prepare(self, state: Any) -> Any:
    """As of each part."""
    return tuple(part.prepare(own) for part, own in self._with(state))

  def unprepare(self, state: Any) -> Any:
    """As of each part."""
    return tuple(part.unprepare(own) for part, own in self._with(state))

  def capacity(self, state: Any) -> int | None:
    """The smallest of the growing states among the parts'."""
    return shortest(part.capacity(own) for part, own in self._with(state))

  def resize(self, state: Any, capacity: int) -> Any:
    """As of each part."""
    return tuple(part.resize(own, capacity) for part, own in self._with(state))

  def fresh_like(self, state: Any, batch: int) -> Any:
    """As of each part."""
    return tuple(part.fresh_like(own, batch) for part, own in self._with(state))

  def carry_size(self, length: int) -> int:
    """The largest of all parts'."""
    return max(part.carry_size(length) for part in self.parts)

  def _with(self, state: Any) -> list[tuple[Mixer, Any]]:
    """The parts with the state of each."""
    states = [None] * len(self.parts) if state is None else state
    return list(zip(self.parts, states, strict=True))
