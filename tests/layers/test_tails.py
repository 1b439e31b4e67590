"""Looking back over time, in one go and in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.layers import tails


@pytest.mark.parametrize("width", [1, 3, 12])
def test_look_back_is_the_definition_in_any_split(width):
  x = jax.random.normal(jax.random.key(0), (2, 9, 3))
  expected = np.zeros((2, 9, 3, width))
  for t, j in np.ndindex(9, width):
    if t >= j:
      expected[:, t, :, j] = x[:, t - j]
  np.testing.assert_array_equal(tails.look_back(x, None, width), expected)
  for cut in range(1, 9):
    start = tails.init_tail(width, x)
    first = tails.look_back(x[:, :cut], start, width)
    tail = tails.next_tail(x[:, :cut], start, None, None)
    second = tails.look_back(x[:, cut:], tail, width)
    both = jnp.concatenate([first, second], axis=1)
    np.testing.assert_array_equal(both, expected)


def test_the_tail_ends_at_the_last_valid_token():
  x = jnp.arange(1.0, 9.0).reshape(2, 4, 1)
  tail = tails.next_tail(
    x, tails.init_tail(3, x), None, jnp.array([1, 3], jnp.int32)
  )
  np.testing.assert_array_equal(tail[..., 0], [[0.0, 1.0], [6.0, 7.0]])
