"""Inner objectives: what a memory is asked to make small for one token.

Every objective is a function of the prediction `y` and the value `v` of one
token (arXiv 2505.23735, section 3.1), and, if it is `gated`, of a threshold of
that token. `curvature` bounds its second derivative in `y`; the step budget of
`bounds.py` needs it.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import checks
from atlas_jax.memory.numerics import safe_norm

Vectors = Float[Array, "*n v"]
Numbers = Float[Array, "*n"]

# Added under the root of |x| = sqrt(x^2 + epsilon) (arXiv 2504.13173).
_ROOT_EPSILON = 1e-6

# No slope of a power is larger: its growth ends where it is reached.
_LARGEST_SLOPE = 1e12


class _Objective:
  """What all kinds share.

  Attributes:
    curved: whether the slope depends on the prediction.
    gated: whether every token has a threshold.
  """

  curved: ClassVar[bool] = True
  gated: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class L2(_Objective):
  """`factor |y - v|^2`.

  Attributes:
    factor: 1 keeps the factor 2 of the gradient (delta rule); 0.5 is the loss
      of TTT (arXiv 2407.04620).
  """

  factor: float = 1.0

  def __post_init__(self):
    checks.positive("l2 factor", self.factor)

  def __call__(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    del threshold
    return self.factor * jnp.sum(jnp.square(y - v), axis=-1)

  def curvature(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    del v, threshold
    return jnp.full(y.shape[:-1], 2 * self.factor, y.dtype)


@dataclasses.dataclass(frozen=True)
class DotProduct(_Objective):
  """`-<y, v>` (Hebbian rule)."""

  curved: ClassVar[bool] = False

  def __call__(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    del threshold
    return -jnp.sum(y * v, axis=-1)

  def curvature(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    del v, threshold
    return jnp.zeros(y.shape[:-1], y.dtype)


@dataclasses.dataclass(frozen=True)
class Huber(_Objective):
  """Sum over channels of `e^2` up to `|e| = delta`, linear beyond.

  `h(e) = 2 delta |e| - delta^2` beyond, so value and slope are continuous.
  """

  delta: float = 1.0

  def __post_init__(self):
    checks.positive("huber delta", self.delta)

  def __call__(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    del threshold
    size = jnp.abs(y - v)
    quadratic = jnp.minimum(size, self.delta)
    # q^2 + 2 delta (|e| - q) has the right value on both sides of the corner
    # and never squares a large error.
    return jnp.sum(
      jnp.square(quadratic) + 2 * self.delta * (size - quadratic), axis=-1
    )

  def curvature(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    del v, threshold
    return jnp.full(y.shape[:-1], 2.0, y.dtype)


@dataclasses.dataclass(frozen=True)
class Lp(_Objective):
  """`|y - v|_p^p` with the smooth `|x| = sqrt(x^2 + 1e-6)`, as in Moneta.

  Its slope is `p sign(e) |e|^(p - 1)` (arXiv 2504.13173, Eq. 10-11) with the
  sign `e / |e|` of that |e|. (With the paper's `tanh(a e)` for the sign, and an
  `a` that it does not tell, the slope would be that of no simple function.)
  Beyond errors of `largest`, where the slope is 1e12, it grows linearly.

  Attributes:
    power: p, from 2 to 4.
  """

  power: float = 3.0

  def __post_init__(self):
    checks.positive("lp power", self.power, most=4)
    if self.power < 2:
      raise UserError(f"lp power {self.power}: use 2 or more")

  @property
  def largest(self) -> float:
    """Error from which on the objective is linear."""
    return (_LARGEST_SLOPE / self.power) ** (1 / (self.power - 1))

  def __call__(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    del threshold
    error = jnp.abs(y - v)
    inside = jnp.minimum(error, self.largest)
    size = jnp.sqrt(jnp.square(inside) + _ROOT_EPSILON)
    # Not `error - inside`, whose slopes cancel only up to rounding.
    beyond = _LARGEST_SLOPE * jnp.maximum(error - self.largest, 0.0)
    return jnp.sum(jnp.power(size, self.power) + beyond, axis=-1)

  def curvature(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    del threshold
    inside = jnp.minimum(jnp.abs(y - v), self.largest)
    size = jnp.sqrt(jnp.square(inside) + _ROOT_EPSILON)
    steepest = jnp.max(jnp.power(size, self.power - 2), axis=-1)
    return self.power * (self.power - 1) * steepest


@dataclasses.dataclass(frozen=True)
class SwitchedHuber(_Objective):
  """`|e|^2 / 2` where `|e| <= delta_t`, else `delta_t |e|_1`, as in Yaad.

  Each token chooses by the length of its whole error, and its threshold delta_t
  is a gate (arXiv 2504.13173, Eq. 16 and 26). The l_1 norm is smoothed to
  `sum log cosh(a e) / a`, whose slope is the paper's `tanh(a e)`.

  Attributes:
    sharpness: a, which the paper leaves open. Rounding errors of channels that
      are remembered well grow a-fold.
  """

  sharpness: float = 3.0

  gated: ClassVar[bool] = True

  def __post_init__(self):
    checks.positive("huber sharpness", self.sharpness)

  def __call__(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    if threshold is None:
      raise ValueError("the thresholds are missing")
    error = y - v
    small = safe_norm(error, -1)[..., 0] <= threshold
    # The square never sees the errors of the other branch, and may overflow.
    inside = jnp.where(small[..., None], error, jnp.zeros_like(error))
    square = 0.5 * jnp.sum(jnp.square(inside), axis=-1)
    size = jnp.abs(error)
    # log cosh(x) is |x| + log(1 + exp(-2 |x|)) - log 2.
    corner = jnp.log(1.0 + jnp.exp(-2 * self.sharpness * size))
    smooth = size + (corner - math.log(2)) / self.sharpness
    return jnp.where(small, square, threshold * jnp.sum(smooth, axis=-1))

  def curvature(
    self, y: Vectors, v: Vectors, threshold: Numbers | None = None
  ) -> Numbers:
    """That of the square, or of the steepest channel of the l_1 norm."""
    if threshold is None:
      raise ValueError("the thresholds are missing")
    error = y - v
    small = safe_norm(error, -1)[..., 0] <= threshold
    slopes = jnp.square(jnp.tanh(self.sharpness * error))
    steepest = threshold * self.sharpness * (1 + jnp.max(-slopes, axis=-1))
    one = jnp.ones_like(threshold)
    return jnp.where(small, one, jnp.maximum(one, steepest))


Objective = L2 | DotProduct | Huber | Lp | SwitchedHuber
