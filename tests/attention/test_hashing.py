"""Buckets: near vectors share them, and they are known for ever."""

import jax.numpy as jnp
import numpy as np

from atlas_jax import attention as aa
from atlas_jax.attention.hashing import rotations


def vectors(length, seed=0):
  random = np.random.default_rng(seed)
  return jnp.asarray(random.standard_normal((1, length, 2, 8)), jnp.float32)


def test_buckets_are_those_of_the_rotated_vector_and_its_negative():
  x = vectors(50)
  found = aa.bucket_of(x, rounds=3, buckets=6, seed=4)
  assert found.shape == (1, 50, 2, 3)
  matrix = rotations(2, 3, 8, 6, 4)
  for head in range(2):
    for round_ in range(3):
      turned = np.asarray(x)[0, :, head] @ matrix[head, round_]
      expected = np.argmax(np.concatenate([turned, -turned], axis=1), axis=1)
      np.testing.assert_array_equal(found[0, :, head, round_], expected)
  assert set(np.unique(found)) == set(range(6))


def test_length_does_not_matter_and_near_vectors_share():
  x = vectors(400)
  hash_ = lambda x: aa.bucket_of(x, rounds=1, buckets=8, seed=0)
  np.testing.assert_array_equal(hash_(x), hash_(4.0 * x))
  near = np.mean(hash_(x) == hash_(x + 0.1 * vectors(400, 1)))
  far = np.mean(hash_(x) == hash_(vectors(400, 2)))
  assert near > 0.8
  assert 0.05 < far < 0.25
  assert np.mean(hash_(x) == hash_(-x)) == 0


def test_one_bucket_holds_all():
  assert not np.any(aa.bucket_of(vectors(5), rounds=2, buckets=1, seed=0))


def test_rotations_are_known_for_ever():
  # Stored models were trained with these very numbers.
  drawn = rotations(1, 1, 2, 4, 7)
  expected = [[[[1.69052570, -0.46593737], [0.03282016, 0.40751628]]]]
  np.testing.assert_allclose(drawn, expected, rtol=0, atol=1e-8)
  assert not np.array_equal(drawn, rotations(1, 1, 2, 4, 8))
