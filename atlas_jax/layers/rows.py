"""States of rows that are independent of each other."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Tree = TypeVar("Tree")


def choose_rows(rows: Bool[Array, "B"], yes: Tree, no: Tree) -> Tree:
  """Chooses whole rows of two trees of arrays [B, ...]."""

  def choose(a: Array, b: Array) -> Array:
    return jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)

  return jax.tree.map(choose, yes, no)
