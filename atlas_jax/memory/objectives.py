"""Inner objectives: what a memory is asked to make small for one token.

Every objective is a function of the prediction `y` and the value `v` of one
token (arXiv 2505.23735, section 3.1). `curvature` bounds its second derivative
in `y`; the step budget of `bounds.py` needs it.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory import checks


@dataclasses.dataclass(frozen=True)
class L2:
  """`|y - v|^2`. The factor 2 of its gradient is kept (delta rule)."""

  curvature: ClassVar[float] = 2.0

  def __call__(
    self, y: Float[Array, "*n v"], v: Float[Array, "*n v"]
  ) -> Float[Array, "*n"]:
    return jnp.sum(jnp.square(y - v), axis=-1)


@dataclasses.dataclass(frozen=True)
class DotProduct:
  """`-<y, v>` (Hebbian rule)."""

  curvature: ClassVar[float] = 0.0

  def __call__(
    self, y: Float[Array, "*n v"], v: Float[Array, "*n v"]
  ) -> Float[Array, "*n"]:
    return -jnp.sum(y * v, axis=-1)


@dataclasses.dataclass(frozen=True)
class Huber:
  """Sum over channels of `e^2` up to `|e| = delta`, linear beyond.

  `h(e) = 2 delta |e| - delta^2` beyond, so value and slope are continuous.
  """

  delta: float = 1.0
  curvature: ClassVar[float] = 2.0

  def __post_init__(self):
    checks.positive("huber delta", self.delta)

  def __call__(
    self, y: Float[Array, "*n v"], v: Float[Array, "*n v"]
  ) -> Float[Array, "*n"]:
    size = jnp.abs(y - v)
    quadratic = jnp.minimum(size, self.delta)
    # q^2 + 2 delta (|e| - q) has the right value on both sides of the corner
    # and never squares a large error.
    return jnp.sum(
      jnp.square(quadratic) + 2 * self.delta * (size - quadratic), axis=-1
    )


Objective = L2 | DotProduct | Huber
