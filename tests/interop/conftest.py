"""Files for the tests of pretrained models."""

import pathlib

import pytest

from tests.interop import helpers

pytest.importorskip("gguf", reason="pip install 'atlas-jax[gguf]'")


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A whole tiny model, which no test changes."""
  path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
  helpers.write(path)
  return path
