"""Checksums: of arrays, computed where the arrays are, and of JSON values.

The file format checks its index but not the numbers themselves: of random bit
flips in a checkpoint about half would be read back without a word. Sums of
integers do not depend on their order, so these are the same on every mesh.
"""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from atlas_jax.training.paths import path_name


def checksums(tree: Any) -> dict[str, int]:
  """Returns the sum of each leaf's bits, as integers modulo 2**32, by path.

  Args:
    tree: Arrays of at most 32 bits a number, on any devices.
  """
  return {k: int(v) for k, v in jax.device_get(_sums(tree)).items()}


def digest(values: Any) -> int:
  """A checksum of JSON values, the same after writing and reading them."""
  return zlib.crc32(json.dumps(values, sort_keys=True).encode())


@jax.jit
def _sums(tree: Any) -> dict[str, UInt32[Array, ""]]:
  return {
    path_name(path): jnp.sum(_bits(leaf), dtype=jnp.uint32)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def _bits(leaf: Array) -> UInt32[Array, "..."]:
  if leaf.dtype == bool:
    return leaf.astype(jnp.uint32)
  unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
  return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
