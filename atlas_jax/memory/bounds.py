"""What keeps the inner descent finite, as part of the memory's definition.

Gradients of a chunk are taken at the weights of its start, so the summed step
of strongly correlated keys overshoots, and nothing in the equations stops it.
The bound has four parts, each a field of `Bound`:

1. with momentum the step is damped to `eta_t (1 - theta_t)`;
2. a token's gradient, `r_i = |d l_i / d W|` over all matrices, is shortened to
   at most `tau = error_clip sqrt(V)`;
3. the summed step of a chunk is divided by `max(1, s_t)`, where `s_t` bounds
   the growth of any remembered error: with `E` the accumulated write gates and
   `G_ij` the curvature-weighted overlap of tokens i and j,
   `s_t = max_{i <= t} (E G)[t, i]`;
4. at the end of a chunk a matrix longer than `weight_cap sqrt(min(shape))` is
   scaled back to that length, and a momentum longer than `tau` likewise.
   (`weight_cap` is in units of the length before training; where a retention
   starts from other lengths, so does the cap.)

Muon's step has bounded length whatever its gradients, so of the first three
parts it takes none, and of the fourth the cap on weights. Its momentum is a sum
of unshortened gradients. Cut back to `tau` at a border it would weigh next to
nothing beside the gradients to come, although its length means nothing to the
step; so it is cut only against overflow, at `LONGEST_MOMENTUM`. The dot product
has no curvature and takes no budget.

A bounded forward pass does not bound back-propagation through many chunks: in
float32 the gradients of a hostile sequence overflow within some hundred. The
last field, `gradient_clip`, therefore limits what crosses a chunk's border
backwards; it changes no output.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import checks
from atlas_jax.memory.numerics import cap_norm, matmul, safe_norm
from atlas_jax.memory.retention import Retention

# Errors shorter than this no longer count with full weight in the budget, so
# that its slope stays moderate where a token is remembered perfectly.
ERROR_FLOOR = 1e-4

# Where the momentum of an optimizer that divides out its length is cut: ten
# decades above what ordinary gradients sum up to, and a square of it, times the
# longest cotangent (`gradient_clip`), is ten below the largest float32.
LONGEST_MOMENTUM = 1e12


@dataclasses.dataclass(frozen=True)
class Bound:
  """Limits on the inner descent; see the module for what each part does.

  Attributes:
    damp_momentum: part 1.
    error_clip: part 2, in units of sqrt(V); None is off.
    budget: part 3: "full" overlaps of all pairs, "diagonal" one running sum of
      every token's own curvature (cheaper, stricter for distinct keys), None
      is off.
    weight_cap: part 4, in units of sqrt(min(shape)); None is off. The momentum
      is capped at `error_clip sqrt(V)` when both are given, and that of Muon at
      `LONGEST_MOMENTUM`.
    gradient_clip: outer training only: largest norm, per head and matrix, of
      the loss's gradient with respect to the state that one chunk hands to the
      next. Identity below the norm, which the default leaves far above what
      a training step sees; None is off. The momentum of `ChunkMuon`, which may
      be as short as its epsilon, is measured in units of that.
  """

  damp_momentum: bool = True
  error_clip: float | None = 2.0
  budget: Literal["full", "diagonal"] | None = "full"
  weight_cap: float | None = 4.0
  gradient_clip: float | None = 1e4

  def __post_init__(self):
    if self.budget not in ("full", "diagonal", None):
      raise UserError(f"budget {self.budget!r}: use full, diagonal or none")
    for name in ("error_clip", "weight_cap", "gradient_clip"):
      value = getattr(self, name)
      if value is not None:
        checks.positive(name, value)


UNBOUNDED = Bound(
  damp_momentum=False,
  error_clip=None,
  budget=None,
  weight_cap=None,
  gradient_clip=None,
)


def clip_scale(
  bound: Bound, size: Float[Array, "t"], value_width: int
) -> Float[Array, "t"]:
  """Factor by which each token's gradient of norm `size` is shortened."""
  if bound.error_clip is None:
    return jnp.ones_like(size)
  limit = bound.error_clip * math.sqrt(value_width)
  return limit / jnp.maximum(size, limit)


def gain(
  u: Float[Array, "t n"], error: Float[Array, "t v"]
) -> Float[Array, "t"]:
  """`|u_i| / |error_i|`, at most the ratio at an error of `ERROR_FLOOR`."""
  length = safe_norm(error, -1)[..., 0]
  scale = jnp.maximum(jax.lax.stop_gradient(length), ERROR_FLOOR)
  floored = scale * jnp.sqrt(
    jnp.square(length / scale) + jnp.square(ERROR_FLOOR / scale)
  )
  return safe_norm(u, -1)[..., 0] / floored


def growth(
  written: Float[Array, "b t"],
  overlap: Float[Array, "t t"],
  reach: Float[Array, "b t"],
) -> Float[Array, "b"]:
  """`s_t = max over reached tokens i of (E G)[t, i]`.

  Args:
    written: E, the write gates accumulated up to each token.
    overlap: G.
    reach: 1 where token t may see column i, else 0.
  """
  return jnp.max(matmul(written, overlap) * reach, axis=-1)


def cap_weights(
  bound: Bound,
  weights: dict[str, Array],
  retention: Retention,
) -> dict[str, Array]:
  """Part 4 for weights [n, d], as they are stored, matrix by matrix."""
  if bound.weight_cap is None:
    return weights
  units = bound.weight_cap

  def cap(w: Array) -> Array:
    usual = retention.start_scale(w.shape) * math.sqrt(w.size)
    return cap_norm(w, units * usual, (-2, -1))

  return {name: cap(w) for name, w in weights.items()}


def cap_momentum(
  bound: Bound,
  momentum: dict[str, Array],
  value_width: int,
  orthogonalised: bool = False,
) -> dict[str, Array]:
  """Part 4 for momenta [n, d], matrix by matrix.

  Args:
    bound: the bound.
    momentum: by matrix.
    value_width: V.
    orthogonalised: whether the optimizer divides out the momentum's length.
  """
  if bound.weight_cap is None:
    return momentum
  if orthogonalised:
    limit = LONGEST_MOMENTUM
  elif bound.error_clip is None:
    return momentum
  else:
    limit = bound.error_clip * math.sqrt(value_width)
  return {name: cap_norm(s, limit, (-2, -1)) for name, s in momentum.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def clip_gradient(limit: float, x: Array) -> Array:
  """Identity whose cotangent is shortened to norm `limit`."""
  del limit
  return x


def _clip_gradient_forward(limit, x):
  del limit
  return x, None


def _clip_gradient_backward(limit, _, cotangent):
  return (cap_norm(cotangent, limit, (-2, -1)),)


clip_gradient.defvjp(_clip_gradient_forward, _clip_gradient_backward)
