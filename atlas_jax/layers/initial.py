"""Random starting weights.

XLA takes a good part of a second to compile each draw of random numbers, and a
model has dozens of matrices. `draw_once` makes a module whose matrices are
pieces of a single draw.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Module = TypeVar("Module", bound=nnx.Module)


class Draws:
  """Stands for `nnx.Rngs` in the layers here and hands out one draw.

  Args:
    key: Source of all numbers.
    size: How many normal numbers to draw; None hands out zeros and counts.
  """

  def __init__(self, key: Array, size: int | None = None):
    self.used = 0
    self._key, now = jax.random.split(key)
    self._numbers = None
    if size is not None:
      self._numbers = jax.random.normal(now, (size,), jnp.float32)

  def params(self) -> Array:
    """A new key, for what draws by itself."""
    self._key, now = jax.random.split(self._key)
    return now

  def normal(self, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
    """The next normal numbers, of variance 1, float32."""
    start, self.used = self.used, self.used + math.prod(shape)
    if self._numbers is None:
      return jnp.zeros(shape)
    return self._numbers[start : self.used].reshape(shape)


Source = nnx.Rngs | Draws


def normal(
  rngs: Source, shape: tuple[int, ...], scale: float, dtype: DTypeLike
) -> Float[Array, "*shape"]:
  """Normal numbers of standard deviation `scale`, drawn in float32."""
  if isinstance(rngs, Draws):
    numbers = rngs.normal(shape)
  else:
    numbers = jax.random.normal(rngs.params(), shape, jnp.float32)
  return (scale * numbers).astype(dtype)


def draw_once(make: Callable[[Draws], Module], key: Array) -> Module:
  """Makes a module from one draw of all its normal numbers.

  Args:
    make: Makes the module, a function of the draws alone; called twice.
    key: Source of the numbers.
  """

  counts = []

  def count() -> Module:
    draws = Draws(key)
    module = make(draws)
    counts.append(draws.used)
    return module

  nnx.eval_shape(count)
  return make(Draws(key, counts[0]))
