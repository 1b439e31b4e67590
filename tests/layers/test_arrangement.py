"""Where tokens go, once for all layers."""

import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.errors import UserError
from atlas_jax.layers import arrange

IDS = jnp.array([[1, 1, 1, 0, 2, 2, 2, 2], [3, 3, 3, 3, 4, 0, 0, 0]])


def test_plain_rows_need_nothing():
  arrangement = arrange(2, 8, {4: None})
  assert all(part is None for part in arrangement)
  x = jnp.arange(16.0).reshape(2, 8)
  assert arrangement.gather(x) is x
  assert arrangement.scatter(x) is x
  assert arrangement.lengths is None


def test_aligned_documents_stay_where_they_are():
  arrangement = arrange(2, 8, {4: None}, segment_ids=IDS, aligned=True)
  np.testing.assert_array_equal(
    arrangement.history, [[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 0, 0, 1, 2]]
  )
  np.testing.assert_array_equal(arrangement.valid, IDS > 0)
  x = jnp.where(IDS > 0, jnp.ones((2, 8)), jnp.nan)
  np.testing.assert_array_equal(
    arrangement.gather(x), (IDS > 0).astype(jnp.float32)
  )


def test_padding_goes_to_the_end_and_comes_back_as_zero():
  mask = jnp.array([[False, True, True], [True, False, True]])
  arrangement = arrange(2, 3, {4: None}, mask=mask)
  x = jnp.array([[jnp.nan, 1.0, 2.0], [3.0, jnp.nan, 4.0]])
  gathered = arrangement.gather(x)
  np.testing.assert_array_equal(gathered, [[1, 2, 0], [3, 4, 0]])
  np.testing.assert_array_equal(arrangement.lengths, [2, 2])
  np.testing.assert_array_equal(
    arrangement.valid, [[True, True, False], [True, True, False]]
  )
  np.testing.assert_array_equal(
    arrangement.scatter(gathered), [[0, 1, 2], [3, 0, 4]]
  )


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"aligned": True}, "segment_ids"),
    (
      {"aligned": True, "segment_ids": IDS, "mask": IDS > 0},
      "neither a state nor a mask",
    ),
    (
      {
        "aligned": True,
        "segment_ids": IDS,
        "continues": True,
      },
      "neither a state nor a mask",
    ),
    ({"mask": jnp.ones((2, 7), bool)}, r"\(2, 7\) must be \(2, 8\)"),
    ({"segment_ids": IDS[:1]}, r"\(1, 8\) must be \(2, 8\)"),
    ({"segment_ids": IDS, "max_segments": 1}, "max_segments"),
  ],
)
def test_contradictions_are_refused(arguments, message):
  with pytest.raises(UserError, match=message):
    arrange(2, 8, {4: None}, **arguments)
