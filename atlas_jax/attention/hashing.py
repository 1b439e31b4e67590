"""Locality-sensitive hashing of keys (arXiv 2001.04451, section 2).

A random rotation and the largest of its outputs and their negatives put a
vector into one of `buckets`: near vectors mostly into the same. The rotations
are a function of their sizes and a seed, so that a model is known by its
configuration and weights alone.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.memory.numerics import HIGHEST


@functools.lru_cache(maxsize=32)
def rotations(
  heads: int, rounds: int, width: int, buckets: int, seed: int
) -> np.ndarray:
  """Normal numbers [H, R, K, buckets / 2], float64.

  Drawn by a generator whose numbers NumPy promises never to change.
  """
  random = np.random.RandomState(seed)
  drawn = random.standard_normal((heads, rounds, width, buckets // 2))
  drawn.flags.writeable = False
  return drawn


def bucket_of(
  x: Float[Array, "B T H K"], *, rounds: int, buckets: int, seed: int
) -> Int[Array, "B T H R"]:
  """The bucket of each vector in each round: `argmax [x R, -x R]`, int32.

  It does not depend on the length of a vector. A vector that is as near to two
  buckets as numbers of its type can tell may fall into either.

  Args:
    x: Vectors, at least float32.
    rounds: Independent hashes, R.
    buckets: Even, or 1: then all is in bucket 0.
    seed: Of the rotations.
  """
  heads, width = x.shape[2:]
  if buckets == 1:
    return jnp.zeros((*x.shape[:3], rounds), jnp.int32)
  matrix = jnp.asarray(rotations(heads, rounds, width, buckets, seed), x.dtype)
  turned = jnp.einsum("bthk,hrkn->bthrn", x, matrix, precision=HIGHEST)
  both = jnp.concatenate([turned, -turned], axis=-1)
  return jnp.argmax(both, axis=-1).astype(jnp.int32)


def share_bucket(
  query: Int[Array, "B T H R"], key: Int[Array, "B S H R"]
) -> Bool[Array, "B H T S"]:
  """Which pairs are in the same bucket in any round."""
  query, key = (jnp.transpose(x, (3, 0, 2, 1)) for x in (query, key))
  found = jnp.zeros((*query.shape[1:], key.shape[-1]), bool)
  for q, k in zip(query, key, strict=True):
    found |= q[..., None] == k[..., None, :]
  return found


def itself_if_alone(
  others: Bool[Array, "B H T S"], itself: Bool[Array, "#B #H T S"]
) -> Bool[Array, "B H T S"]:
  """What a query sees: the others, or itself where there is no other."""
  return others | (itself & ~jnp.any(others, axis=-1, keepdims=True))
