"""Double precision for the tests that compare numbers."""

import jax
import pytest


@pytest.fixture(scope="module")
def x64():
  """Lets a module's tests use float64; rounding no longer hides a mistake."""
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)
