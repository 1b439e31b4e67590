"""Paths as a user writes them."""

import pathlib

import pytest

from atlas_jax import paths
from atlas_jax.errors import UserError


def test_home_is_expanded_and_the_rest_is_left():
  assert paths.expand("~/x") == pathlib.Path.home() / "x"
  assert paths.expand("x/~y") == pathlib.Path("x/~y")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "x" * 300])
def test_impossible_paths_are_one_line(path):
  with pytest.raises(UserError, match=r"^cannot use the path [^\n]*$"):
    paths.expand(path)
