"""Checkpoints: exact, readable on any mesh, and loud when damaged."""

import os
import pathlib
import shutil

import chex
import jax
import numpy as np
import pytest
import standin

from atlas_jax.errors import UserError
from atlas_jax.training import checkpoint
from atlas_jax.training.program import make_program
from atlas_jax.training.sharding import make_mesh

METADATA = {"record": {"text": "tiny"}, "position": {"next_index": 3}}


def program_on(data, fsdp):
  config = standin.small_config()
  mesh = make_mesh(data, fsdp, jax.devices()[: data * fsdp])
  return make_program(standin.make(config).build, config.train, mesh)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A folder with a checkpoint of step 3, and the state in it."""
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  state = program_on(1, 1).init()
  with checkpoint.Checkpoints(folder, keep=2) as checkpoints:
    checkpoints.save(3, state, METADATA)
  return folder, jax.device_get(state)


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (2, 4)])
def test_restores_the_bits_onto_any_mesh(saved, shape):
  folder, state = saved
  program = program_on(*shape)
  with checkpoint.Checkpoints(folder, keep=2) as checkpoints:
    assert checkpoints.latest == 3
    metadata = checkpoints.metadata(3)
    assert {k: metadata[k] for k in METADATA} == METADATA
    restored = checkpoints.restore(3, program.abstract)
  chex.assert_trees_all_equal(jax.device_get(restored), state, strict=True)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, restored)
  assert shardings == jax.tree.map(lambda leaf: leaf.sharding, program.abstract)


def test_saving_does_not_see_later_steps(tmp_path):
  # The state is donated to the next step while the writer still works.
  program = program_on(1, 1)
  batch = program.place(standin.some_batch())
  state = program.init()
  expected = []
  with checkpoint.Checkpoints(tmp_path / "c", keep=9) as checkpoints:
    for step in range(1, 6):
      state, _ = program.train_step(state, batch)
      expected.append(jax.tree.map(np.array, jax.device_get(state)))
      checkpoints.save(step, state, METADATA)
    for _ in range(5):
      state, _ = program.train_step(state, batch)
  for step, state in enumerate(expected, 1):
    restored = checkpoint.read_state(
      tmp_path / "c" / str(step), program.abstract
    )
    chex.assert_trees_all_equal(jax.device_get(restored), state, strict=True)


def test_keeps_the_latest_and_does_not_save_a_step_twice(tmp_path):
  state = program_on(1, 1).init()
  with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
    for step in (1, 2, 3, 3):
      checkpoints.save(step, state, METADATA)
  assert sorted(x.name for x in tmp_path.iterdir()) == ["2", "3"]
  assert checkpoint.latest_checkpoint(tmp_path / "3") == tmp_path / "3"


def test_reads_only_the_parameters(saved):
  folder, state = saved
  abstract = program_on(2, 4).abstract.params
  params = checkpoint.read_params(folder / "3", abstract)
  chex.assert_trees_all_equal(jax.device_get(params), state.params, strict=True)


def test_names_the_parameter_that_does_not_fit(saved):
  folder, _ = saved
  abstract = program_on(1, 1).abstract.params
  bigger = jax.ShapeDtypeStruct((300, 16), np.float32)
  other = {**abstract, "embed": {"embedding": bigger}}
  with pytest.raises(
    UserError, match=r"embed/embedding has shape \(257, 16\) there and \(300"
  ):
    checkpoint.read_params(folder / "3", other)
  fewer = {"embed": abstract["embed"]}
  with pytest.raises(UserError, match=r"blocks/mixer has shape .* none here"):
    checkpoint.read_params(folder / "3", fewer)


def files_of(folder: pathlib.Path) -> list[str]:
  return sorted(
    os.fspath(path.relative_to(folder))
    for path in folder.rglob("*")
    if path.is_file()
  )


@pytest.mark.parametrize("damage", ["truncate", "delete"])
def test_damage_to_any_file_is_one_line_or_harmless(saved, tmp_path, damage):
  folder, state = saved
  abstract = program_on(1, 1).abstract
  refused = {}
  for name in files_of(folder / "3"):
    copy = tmp_path / name.replace("/", "_") / "3"
    shutil.copytree(folder / "3", copy)
    path = copy / name
    if damage == "delete":
      path.unlink()
    else:
      os.truncate(path, path.stat().st_size // 2)
    before = files_of(copy)
    try:
      checkpoint.read_metadata(copy)
      restored = checkpoint.read_state(copy, abstract)
    except UserError as error:
      refused[name] = str(error).replace(str(copy), "FOLDER")
    else:
      chex.assert_trees_all_equal(jax.device_get(restored), state)
    assert files_of(copy) == before
  assert any("/d/" in name for name in refused), refused
  for text in refused.values():
    assert text.startswith("checkpoint FOLDER cannot be read (")
    assert len(text) < 400
    assert "move that folder away" in text
    assert "\n" not in text


def test_flipped_bits_are_noticed(saved, tmp_path):
  folder, _ = saved
  program = program_on(1, 1)
  (largest,) = sorted(
    folder.glob("3/state/**/d/*"), key=lambda path: path.stat().st_size
  )[-1:]
  name = largest.relative_to(folder)
  rng = np.random.default_rng(0)
  for attempt in range(6):
    copy = tmp_path / str(attempt) / "3"
    shutil.copytree(folder / "3", copy)
    path = copy.parent / name
    data = bytearray(path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 16
    path.write_bytes(data)
    with pytest.raises(UserError, match="cannot be read"):
      checkpoint.read_state(copy, program.abstract)


def test_a_changed_position_is_noticed(saved, tmp_path):
  folder, _ = saved
  copy = tmp_path / "3"
  shutil.copytree(folder / "3", copy)
  kept = checkpoint.read_metadata(copy)
  assert "digest" not in kept
  changed = []
  for path in copy.rglob("*"):
    if path.is_file() and b'"checksums"' in path.read_bytes():
      data = path.read_bytes()
      value = max(kept["checksums"].values())
      path.write_bytes(data.replace(str(value).encode(), b"1", 1))
      changed.append(path)
  assert changed
  with pytest.raises(UserError, match="metadata have changed"):
    checkpoint.read_metadata(copy)


def test_damage_is_told_without_a_word_besides(saved, tmp_path, capfd, caplog):
  folder, _ = saved
  copy = tmp_path / "3"
  shutil.copytree(folder / "3", copy)
  for path in copy.glob("state/**/d/*"):
    os.truncate(path, path.stat().st_size // 2)
  with pytest.raises(UserError, match="cannot be read"):
    checkpoint.read_state(copy, program_on(1, 1).abstract)
  assert capfd.readouterr() == ("", "")
  assert caplog.text == ""


def test_folder_without_checkpoint_is_one_line(tmp_path):
  with pytest.raises(UserError, match="holds no checkpoint"):
    checkpoint.latest_checkpoint(tmp_path)
  with pytest.raises(UserError, match="holds no checkpoint"):
    checkpoint.latest_checkpoint(tmp_path / "absent")


def test_unwritable_folder_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"^cannot write a checkpoint [^\n]*$"):
    checkpoint.Checkpoints(tmp_path / "file" / "checkpoints", keep=1)
