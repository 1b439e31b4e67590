"""Which implementation runs, and how many rows run side by side."""

import pytest

from atlas_jax.errors import UserError
from atlas_jax.memory import dispatch


def test_only_auto_chooses():
  assert dispatch.resolve("auto") == "xla"
  assert dispatch.resolve("reference") == "reference"
  with pytest.raises(UserError, match="not available here"):
    dispatch.resolve("reference", available=("xla",))
  with pytest.raises(UserError, match="'pallas': use one of"):
    dispatch.resolve("pallas")


@pytest.mark.parametrize(
  ("rows", "row_bytes", "wanted"),
  [
    (64, 1024, dispatch.LARGEST_GROUP),
    (64, dispatch.CACHE_BYTES // 4, 4),
    (6, dispatch.CACHE_BYTES // 4, 3),
    (7, 1024, 7),
    (17, 1024, 1),
    (4, 3 * dispatch.CACHE_BYTES, 1),
  ],
)
def test_rows_at_once_fit_the_cache_and_divide(rows, row_bytes, wanted):
  assert dispatch.rows_at_once(rows, row_bytes) == wanted
