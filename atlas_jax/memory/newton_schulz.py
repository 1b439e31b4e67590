"""Newton-Schulz orthogonalisation of a matrix, the step of Muon."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory.numerics import unit
from atlas_jax.memory.optimizers import Muon


def newton_schulz(
  x: Float[Array, "*batch m n"], muon: Muon
) -> Float[Array, "*batch m n"]:
  """Moves the singular values of `x` towards one, keeping its subspaces.

  `X = x / sqrt(|x|_F^2 + epsilon^2)`, then `steps` times
  `A = X X^T; X = a X + (b A + c A A) X` on the short side. Zero in gives zero
  out with finite gradients. With the default coefficients five steps bring a
  Gaussian matrix's singular values to about [0.68, 1.2] (Jordan's Muon).

  Args:
    x: matrices in the last two axes; leading axes are independent.
    muon: steps, coefficients, epsilon and operand type.
  """
  rows, columns = x.shape[-2:]
  x = unit(x, axis=(-2, -1), epsilon=muon.epsilon)
  tall = rows > columns
  if tall:
    x = jnp.swapaxes(x, -1, -2)
  accumulate = x.dtype
  operand = jnp.dtype(muon.dtype) if muon.dtype else accumulate

  def product(a: Array, b: Array) -> Array:
    return jnp.matmul(
      a.astype(operand),
      b.astype(operand),
      # Operands narrower than float32 have no bits that a TPU could drop.
      precision=jax.lax.Precision.DEFAULT
      if operand.itemsize < 4
      else jax.lax.Precision.HIGHEST,
      preferred_element_type=accumulate,
    )

  for step in range(muon.steps):
    a, b, c = muon.coefficients[min(step, len(muon.coefficients) - 1)]
    gram = product(x, jnp.swapaxes(x, -1, -2))
    x = a * x + product(b * gram + c * product(gram, gram), x)
  return jnp.swapaxes(x, -1, -2) if tall else x
