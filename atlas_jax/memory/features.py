"""Feature maps of memory keys and queries, as maps and as kernels.

A *lift* turns the input `x` of one weight matrix into features `map(x)`, and
gives their inner products `kernel(x, y) = map(x) . map(y)` without forming
them. Inside a chunk only kernel values are needed, so the quadratic part of
the chunk never pays for the number of features.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import checks
from atlas_jax.memory.numerics import matmul, unit

# Explicit maps above this size make every memory matrix unaffordable.
LARGEST_MAP = 4096

# 1 / i! is no normal float32 beyond.
LARGEST_DEGREE = 32


@dataclasses.dataclass(frozen=True)
class Identity:
  """`map(x) = x`; with `bias` a constant feature 1 is appended.

  Attributes:
    bias: append a feature 1, which is what a bias of the matrix is.
    key_width: narrower width to which keys and queries are projected by a
      learned matrix, then normalised; None keeps their own width.
  """

  bias: bool = False
  key_width: int | None = None

  def __post_init__(self):
    if self.key_width is not None:
      checks.count("key_width", self.key_width)

  def size(self, width: int) -> int:
    return width + self.bias

  def init(self, key: Array, width: int, dtype) -> dict[str, Array]:
    return _init_narrow(self, key, width, dtype)

  def prepare(self, params: dict[str, Array], width: int) -> dict[str, Any]:
    del width
    return dict(params)

  def map(self, x: Float[Array, "n k"], shared) -> Float[Array, "n d"]:
    del shared
    return (
      jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1) if self.bias else x
    )

  def kernel(
    self, x: Float[Array, "n k"], y: Float[Array, "m k"], shared
  ) -> Float[Array, "n m"]:
    del shared
    return matmul(x, y.T) + (1.0 if self.bias else 0.0)


@dataclasses.dataclass(frozen=True)
class Polynomial:
  """Degree-p polynomial features with kernel `sum_i a_i (x . y)^i`.

  The learned parameter is `r` with `a_i = r_i^2` and starts at
  `r_i = 1 / sqrt(i!)`, so that the kernel starts as the Taylor polynomial of
  `exp(x . y)` (arXiv 2505.23735, Eq. 4-5 and 22). The explicit map is the
  compressed symmetric one: `C(width + p, p)` monomials of `[x, 1]`, each a
  product of `p` selections by constant 0/1 matrices.

  Attributes:
    degree: highest power p, at least 1.
    key_width: as in `Identity`.
    sketch: features that stand for each power from 2 on, instead of all its
      monomials: products of learned projections, at the start random ones
      whose expected kernel is the exact one. The projections are parameters,
      so a checkpoint holds them.
  """

  degree: int = 2
  key_width: int | None = None
  sketch: int | None = None

  def __post_init__(self):
    checks.count("polynomial degree", self.degree, most=LARGEST_DEGREE)
    if self.key_width is not None:
      checks.count("key_width", self.key_width)
    if self.sketch is not None:
      checks.count("sketch", self.sketch, " features per power")

  def size(self, width: int) -> int:
    if self.sketch is not None:
      size = 1 + width + (self.degree - 1) * self.sketch
      remedy = "use a smaller `sketch`"
    else:
      size = math.comb(width + self.degree, self.degree)
      remedy = "set `sketch` (say 128) or a narrower `key_width` (say 16)"
    if size > LARGEST_MAP:
      raise UserError(
        f"a degree-{self.degree} map of width {width} has {size} features, "
        f"more than {LARGEST_MAP}: {remedy}"
      )
    return size

  def init(self, key: Array, width: int, dtype) -> dict[str, Array]:
    narrow_key, sketch_key = jax.random.split(key)
    params = _init_narrow(self, narrow_key, width, dtype)
    factorials = [math.factorial(i) for i in range(self.degree + 1)]
    start = np.array(factorials, np.float64) ** -0.5
    params["coefficient"] = jnp.asarray(start, dtype)
    if self.sketch is not None:
      width = self.key_width or width
      for power in range(2, self.degree + 1):
        sketch_key, use = jax.random.split(sketch_key)
        params[f"sketch_{power}"] = jax.random.normal(
          use, (power, width, self.sketch), dtype
        )
    return params

  def prepare(self, params: dict[str, Array], width: int) -> dict[str, Any]:
    """Constants and derived parameters that one chunk needs.

    Passed in as arrays, because a kernel may not capture constants.
    """
    width = self.key_width or width
    shared = {k: v for k, v in params.items() if k == "narrow"}
    coefficient = params["coefficient"]
    dtype = coefficient.dtype
    shared["powers"] = jnp.square(coefficient)
    if self.sketch is None:
      select, degree, weight = _monomials(width, self.degree)
      select = jnp.asarray(select, dtype)
    else:
      select, degree, weight = _sketch(self, params, width)
    one_hot = jnp.asarray(np.eye(self.degree + 1)[:, degree], dtype)
    shared["factors"] = select[:, :-1]
    shared["offsets"] = select[:, -1:]
    shared["weight"] = matmul(coefficient[None], one_hot) * jnp.asarray(
      weight[None], dtype
    )
    return shared

  def map(self, x: Float[Array, "n k"], shared) -> Float[Array, "n d"]:
    out = shared["weight"].astype(x.dtype)
    for j in range(self.degree):
      factor = matmul(x, shared["factors"][j].astype(x.dtype))
      out = out * (factor + shared["offsets"][j].astype(x.dtype))
    return out

  def kernel(
    self, x: Float[Array, "n k"], y: Float[Array, "m k"], shared
  ) -> Float[Array, "n m"]:
    if self.sketch is not None:
      return matmul(self.map(x, shared), self.map(y, shared).T)
    powers = shared["powers"].astype(x.dtype)
    product = matmul(x, y.T)
    out = jnp.zeros_like(product) + powers[self.degree]
    for i in reversed(range(self.degree)):
      out = out * product + powers[i]
    return out


Features = Identity | Polynomial


def narrow(
  features: Features, x: Float[Array, "n k"], shared
) -> Float[Array, "n m"]:
  """Projects to the memory's own key width and normalises, if it has one."""
  if features.key_width is None:
    return x
  return unit(matmul(x, shared["narrow"].astype(x.dtype)))


def _init_narrow(features: Features, key, width: int, dtype):
  if features.key_width is None:
    return {}
  if features.key_width > width:
    raise UserError(
      f"key_width {features.key_width} is wider than the keys ({width}): "
      "use a smaller one, or none"
    )
  # Narrower types have no QR decomposition.
  exact = dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32
  basis = jax.random.orthogonal(key, width, dtype=exact)
  return {"narrow": basis[:, : features.key_width].astype(dtype)}


def _monomials(
  width: int, degree: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Monomials of `[x, 1]` of total degree `degree`.

  Returns:
    select: [degree, width + 1, D] one-hot columns, one per factor.
    power: [D] number of factors that are not the constant.
    weight: [D] square root of the multinomial coefficient of the x part.
  """
  # The constant is symbol 0 so that sorting keeps it in front.
  choices = list(
    itertools.combinations_with_replacement(range(width + 1), degree)
  )
  select = np.zeros((degree, width + 1, len(choices)))
  power = np.zeros(len(choices), np.int64)
  weight = np.zeros(len(choices))
  for column, choice in enumerate(choices):
    symbols = [s for s in choice if s > 0]
    power[column] = len(symbols)
    count = math.factorial(len(symbols))
    for s in set(symbols):
      count //= math.factorial(symbols.count(s))
    weight[column] = math.sqrt(count)
    for factor, s in enumerate(choice):
      select[factor, s - 1 if s > 0 else width, column] = 1.0
  return select, power, weight


def _sketch(features: Polynomial, params, width: int):
  """Like `_monomials`, with projections in place of each power's monomials."""
  p = features.degree
  dtype = params["coefficient"].dtype
  constant = np.zeros((width + 1, 1))
  constant[-1] = 1.0

  def block(leading: Array) -> Array:
    """Pads the first factors [i, width, n] with constant ones to p factors."""
    i, _, n = leading.shape
    leading = jnp.pad(leading, ((0, 0), (0, 1), (0, 0)))
    ones = np.broadcast_to(constant, (p - i, width + 1, n))
    return jnp.concatenate([leading, jnp.asarray(ones, dtype)])

  blocks = [
    block(jnp.zeros((0, width, 1), dtype)),
    block(jnp.eye(width, dtype=dtype)[None]),
    *(block(params[f"sketch_{i}"]) for i in range(2, p + 1)),
  ]
  sizes = [b.shape[-1] for b in blocks]
  power = np.repeat(np.arange(p + 1), sizes)
  weight = np.where(power >= 2, (features.sketch or 1) ** -0.5, 1.0)
  return jnp.concatenate(blocks, axis=-1), power, weight
