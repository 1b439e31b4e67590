"""Retention: what becomes of a memory's weights from token to token.

Decay acts at every token. What is not linear in the weights (the norms and
divergences of arXiv 2504.13173, the weight norm of arXiv 2505.23884) acts at
the end of a chunk, after its last token's write and before its read; inside a
chunk weights stay a linear function of the chunk's gradients.

Two kinds of non-linearity are told apart. A *border* replaces the weights that
a chunk hands on. A retention that is not `linear` stores something else than
the weights: descent and decay act on what is stored, and `working` makes of it
the weights at which a chunk's gradients are taken and from which it reads.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import checks
from atlas_jax.memory.numerics import unit

# Length below which a row is not stretched to its own (as in LaCT).
_ROW_EPSILON = 1e-5


class _Decay:
  """What all kinds share: weights are stored as they are, and only decay."""

  linear: ClassVar[bool] = True
  has_border: ClassVar[bool] = False
  keeps_row_norms: ClassVar[bool] = False

  def start_scale(self, shape: tuple[int, ...]) -> float:
    """Standard deviation of what is stored, before training.

    The default gives weights whose singular values are near one.
    """
    return max(shape) ** -0.5

  def working(self, stored: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """The weights that what is stored stands for."""
    return stored

  def write_scale(self, stored: Float[Array, "n d"]) -> Float[Array, ""]:
    """How a change of what is stored shows in the weights, inside a chunk.

    Args:
      stored: as it was at the chunk's start.
    """
    return jnp.ones((), stored.dtype)

  def border(
    self, stored: Float[Array, "n d"], lengths: Float[Array, "n"] | None
  ) -> Float[Array, "n d"]:
    """What a chunk hands to the next one.

    Args:
      stored: after the chunk's last write and the bound's cap.
      lengths: of the rows of the learned start, if `keeps_row_norms`.
    """
    del lengths
    return stored


@dataclasses.dataclass(frozen=True)
class NoRetention(_Decay):
  """Weights never decay; the decay gate must be absent (zero groups)."""

  groups: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True)
class ScalarRetention(_Decay):
  """One kept fraction `alpha_t` for all weights of a head."""

  groups: int = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(frozen=True)
class ChannelRetention(_Decay):
  """One kept fraction for each of `groups` equal groups of output rows.

  Exact in the dual form at the price of one more product over the chunk per
  group. As many groups as rows gives each output channel its own decay.
  """

  groups: int = 4

  def __post_init__(self):
    checks.count("decay groups", self.groups)


@dataclasses.dataclass(frozen=True)
class LqRetention(_Decay):
  """`A_t = alpha_t A - step`, `W = A / |A|_q^(q - 2)` matrix by matrix.

  The l_q retention of Moneta (arXiv 2504.13173, Eq. 24). A is stored. Within a
  chunk weights are A over the norm at the chunk's start. For q > 2 the weights
  grow without limit as A vanishes, which decay brings about; the norm used is
  therefore `(sum |a|^q + floor^q)^(1/q)`.

  Attributes:
    power: q, at least 2; at 2 this is plain decay.
    floor: smallest norm that is divided out.
    groups: as in `ChannelRetention`.
  """

  power: float = 4.0
  floor: float = 0.1
  groups: int = 1

  linear: ClassVar[bool] = False

  def __post_init__(self):
    checks.positive("retention power", self.power, most=16)
    if self.power < 2:
      raise UserError(f"retention power {self.power}: use 2 or more")
    checks.positive("retention floor", self.floor)
    checks.count("decay groups", self.groups)

  def working(self, stored: Float[Array, "n d"]) -> Float[Array, "n d"]:
    return stored * self.write_scale(stored)

  def write_scale(self, stored: Float[Array, "n d"]) -> Float[Array, ""]:
    # The largest is divided out first, so that no power overflows.
    largest = jax.lax.stop_gradient(
      jnp.maximum(jnp.max(jnp.abs(stored)), self.floor)
    )
    scaled = jnp.power(jnp.abs(stored / largest), self.power)
    total = jnp.sum(scaled) + jnp.power(self.floor / largest, self.power)
    norm = largest * jnp.power(total, 1 / self.power)
    return jnp.power(norm, 2 - self.power)


@dataclasses.dataclass(frozen=True)
class KLRetention(_Decay):
  """`W_t = c Softmax(alpha_t log W - step)` over all entries of a matrix.

  The divergence retention of Memora (arXiv 2504.13173, Eq. 21 and 27): weights
  are positive and their sum stays c. The logarithm is stored, up to a constant
  that the softmax does not see; the recurrence is linear in it, and no
  logarithm of a weight is ever taken. Within a chunk the weights descend
  linearly from those of its start (Eq. 31). At its end these are dropped, and
  the chunk's steps, at the same gradients and rates, are those of the
  logarithm. (The paper takes the logarithm of the descended weights, some of
  which are negative, and one lag token exactly.) A write therefore changes its
  size at the border, from its step to that times the weight.

  Attributes:
    size: mean weight in units of 1 / sqrt(max(shape)), which is c over the
      number of weights.
    groups: as in `ChannelRetention`.
  """

  size: float = 1.0
  groups: int = 1

  linear: ClassVar[bool] = False
  has_border: ClassVar[bool] = True

  def __post_init__(self):
    checks.positive("retention size", self.size)
    checks.count("decay groups", self.groups)

  def start_scale(self, shape: tuple[int, ...]) -> float:
    """Logarithms of that spread make weights that differ from each other."""
    del shape
    return 1.0

  def total(self, shape: tuple[int, ...]) -> float:
    """c, the sum of all weights of a matrix."""
    return self.size * math.prod(shape) / math.sqrt(max(shape))

  def working(self, stored: Float[Array, "n d"]) -> Float[Array, "n d"]:
    share = jnp.exp(stored - jax.lax.stop_gradient(jnp.max(stored)))
    return share * (self.total(stored.shape) / jnp.sum(share))

  def border(
    self, stored: Float[Array, "n d"], lengths: Float[Array, "n"] | None
  ) -> Float[Array, "n d"]:
    """Takes the free constant away, so that it does not pile up."""
    del lengths
    return stored - jnp.mean(stored)


@dataclasses.dataclass(frozen=True)
class WeightNorm(_Decay):
  """Every row is stretched to its length in the learned start, at chunk ends.

  As in LaCT (arXiv 2505.23884). There is no other decay.
  """

  groups: int = dataclasses.field(default=0, init=False)

  has_border: ClassVar[bool] = True
  keeps_row_norms: ClassVar[bool] = True

  def border(
    self, stored: Float[Array, "n d"], lengths: Float[Array, "n"] | None
  ) -> Float[Array, "n d"]:
    if lengths is None:
      raise ValueError("the lengths of the learned start's rows are missing")
    return unit(stored, epsilon=_ROW_EPSILON) * lengths[:, None]


Retention = (
  NoRetention
  | ScalarRetention
  | ChannelRetention
  | LqRetention
  | KLRetention
  | WeightNorm
)
