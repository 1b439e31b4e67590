"""Many small symmetric positive definite systems, solved side by side."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Operator = Callable[[Array], Array]


class _Search(NamedTuple):
  """Where the search of every system stands."""

  solution: Float[Array, "C K"]
  residual: Float[Array, "C K"]
  direction: Float[Array, "C K"]
  energy: Float[Array, "C 1"]
  active: Bool[Array, "C 1"]
  rounds: Array


def solve_symmetric(
  operator: Operator,
  right: Float[Array, "C K"],
  diagonal: Float[Array, "C K"],
  *,
  tolerance: float,
  iterations: int,
) -> Float[Array, "C K"]:
  """Row by row the x with `operator(x) = right`, by conjugate gradients.

  Derivatives are those of the exact solution: they solve with the same
  operator, to the same tolerance, whatever the iterations of this solve were.

  A system that has converged is left alone, so that it gives the same bits
  whichever others are solved beside it.

  Args:
    operator: Applies to each row a symmetric positive definite matrix of its
      own; linear, and differentiable by what it closes over.
    right: Right-hand sides.
    diagonal: Of the matrices; rows are preconditioned by it.
    tolerance: Of the residual's length, relative to that of `right`.
    iterations: After as many a system that has not converged is given up and
      stays as it is.
  """
  diagonal = jax.lax.stop_gradient(diagonal)

  def solve(operator: Operator, right: Array) -> Array:
    return _search(operator, right, diagonal, tolerance, iterations)

  return jax.lax.custom_linear_solve(operator, right, solve, symmetric=True)


def _search(
  operator: Operator,
  right: Float[Array, "C K"],
  diagonal: Float[Array, "C K"],
  tolerance: float,
  iterations: int,
) -> Float[Array, "C K"]:
  """Conjugate gradients with Jacobi's preconditioner."""
  # Squares of right-hand sides, which may be tiny slopes, must not vanish.
  largest = jnp.max(jnp.abs(right), axis=-1, keepdims=True)
  one = jnp.ones((), right.dtype)
  scale = jnp.where(largest > 0, largest, one)
  right = right / scale
  enough = tolerance**2 * _dot(right, right)

  def proceed(search: _Search) -> Array:
    return jnp.any(search.active) & (search.rounds < iterations)

  def iterate(search: _Search) -> _Search:
    solution, residual, direction, energy, active, rounds = search
    image = operator(direction)
    curvature = _dot(direction, image)
    step = energy / jnp.where(curvature > 0, curvature, one)
    step = jnp.where(active, step, jnp.zeros((), step.dtype))
    solution = solution + step * direction
    residual = residual - step * image
    steepest = residual / diagonal
    fresh = _dot(residual, steepest)
    turned = steepest + fresh / jnp.where(energy > 0, energy, one) * direction
    return _Search(
      solution,
      residual,
      direction=jnp.where(active, turned, direction),
      energy=jnp.where(active, fresh, energy),
      active=active & (_dot(residual, residual) > enough),
      rounds=rounds + 1,
    )

  steepest = right / diagonal
  start = _Search(
    solution=jnp.zeros_like(right),
    residual=right,
    direction=steepest,
    energy=_dot(right, steepest),
    active=_dot(right, right) > enough,
    rounds=jnp.zeros((), jnp.int32),
  )
  return scale * jax.lax.while_loop(proceed, iterate, start).solution


def _dot(a: Float[Array, "C K"], b: Float[Array, "C K"]) -> Float[Array, "C 1"]:
  return jnp.sum(a * b, axis=-1, keepdims=True)
