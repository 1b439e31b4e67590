"""Newton-Schulz orthogonalisation of a matrix, the step of Muon."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.memory.numerics import HIGHEST, matmul, unit
from atlas_jax.memory.optimizers import ChunkMuon, Muon


def newton_schulz(
  x: Float[Array, "*batch m n"], muon: Muon | ChunkMuon
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
  if muon.dtype and jnp.dtype(muon.dtype).itemsize < x.dtype.itemsize:
    product = functools.partial(_narrow_product, jnp.dtype(muon.dtype))
  else:
    product = matmul
  for step in range(muon.steps):
    a, b, c = muon.coefficients[min(step, len(muon.coefficients) - 1)]
    gram = product(x, jnp.swapaxes(x, -1, -2))
    x = a * x + product(b * gram + c * product(gram, gram), x)
  return jnp.swapaxes(x, -1, -2) if tall else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow_product(operand: jnp.dtype, a: Array, b: Array) -> Array:
  """`a @ b` with operands rounded to a narrower type, summed in a's.

  The backward pass rounds its operands, too: a float32 cotangent beside a
  narrow operand would be a product whose precision nobody has chosen.
  """
  # Operands narrower than float32 have no bits that a TPU could drop.
  narrow = operand.itemsize < 4
  return jnp.matmul(
    a.astype(operand),
    b.astype(operand),
    precision=jax.lax.Precision.DEFAULT if narrow else HIGHEST,
    preferred_element_type=a.dtype,
  )


def _narrow_product_forward(operand, a, b):
  return _narrow_product(operand, a, b), (a, b)


def _narrow_product_backward(operand, operands, cotangent):
  a, b = operands
  turn = lambda x: jnp.swapaxes(x, -1, -2)
  return (
    _narrow_product(operand, cotangent, turn(b)),
    _narrow_product(operand, turn(a), cotangent),
  )


_narrow_product.defvjp(_narrow_product_forward, _narrow_product_backward)
