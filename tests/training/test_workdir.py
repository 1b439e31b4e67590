"""A folder holds one run, and one trainer at a time."""

import json

import pytest
import standin

from atlas_jax import config as configs
from atlas_jax.errors import UserError
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.identity import FREE
from atlas_jax.training.workdir import Workdir
from atlas_jax.training.writers import JsonLines, read_json_lines


def recorded(folder, config) -> Workdir:
  home = Workdir(folder)
  with home.claimed():
    home.write({"config": configs.to_dict(config)})
  return home


def test_two_trainers_do_not_share_a_folder(tmp_path):
  first, second = Workdir(tmp_path / "run"), Workdir(tmp_path / "run")
  with (
    first.claimed(),
    pytest.raises(UserError, match=r"in use by process \d+: stop"),
    second.claimed(),
  ):
    pass
  with second.claimed():
    pass


def test_new_folder_has_nothing_to_compare(tmp_path):
  assert Workdir(tmp_path).check(standin.small_config()) == {}


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("model.dim", 64),
    ("data.tokenizer", "other.model"),
    ("data.path", "other"),
    ("data.window", 32),
    ("train.learning_rate", 0.5),
    ("train.weight_decay", 0.5),
    ("train.batch", 16),
    ("train.accumulate", 2),
    ("train.seed", 7),
    ("train.decay_steps", 7),
  ],
)
def test_another_run_is_refused_by_name_and_nothing_is_written(
  tmp_path, field, value
):
  config = standin.small_config()
  home = recorded(tmp_path, config)
  before = home.record.read_bytes()
  old = configs.leaves(config)[field].default
  with pytest.raises(UserError) as caught:
    home.check(configs.replace(config, {field: value}))
  assert f"({field}={old!r} there, {value!r} now)" in str(caught.value)
  assert f"--init_from={tmp_path}" in str(caught.value)
  assert "\n" not in str(caught.value)
  assert home.record.read_bytes() == before


def test_many_differences_name_the_first_three(tmp_path):
  home = recorded(tmp_path, standin.small_config())
  other = standin.small_config(
    model__dim=8, model__layers=1, train__seed=1, train__beta1=0.5
  )
  with pytest.raises(UserError, match=r"model\.dim=.*; and 1 more\)"):
    home.check(other)


def test_steps_evaluation_logging_and_mesh_may_change(tmp_path):
  home = recorded(tmp_path, standin.small_config())
  changed = {
    "train.steps": 99,
    "train.eval_every": 1,
    "train.log_every": 5,
    "train.checkpoint_every": 3,
    "mesh.fsdp": 2,
    "data.eval_windows": 3,
  }
  config = configs.replace(standin.small_config(), changed)
  found = home.check(config)
  assert {name: new for name, (_, new) in found.items()} == changed
  assert found["train.steps"][0] == 12


def test_every_free_field_exists():
  assert set(FREE) <= set(configs.leaves(ExperimentConfig))


def test_files_of_no_known_run_are_refused(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("precious\n")
  with pytest.raises(UserError, match=r"has a metrics\.jsonl but no config"):
    Workdir(tmp_path).check(standin.small_config())
  assert (tmp_path / "metrics.jsonl").read_text() == "precious\n"


def test_a_run_killed_before_its_first_step_can_start_again(tmp_path):
  """Orbax makes its folder first; a checkpoint in it would be a run's."""
  folder = tmp_path / "checkpoints"
  folder.mkdir()
  assert Workdir(tmp_path).check(standin.small_config()) == {}
  (folder / "4").mkdir()
  with pytest.raises(UserError, match="has a checkpoints but no config"):
    Workdir(tmp_path).check(standin.small_config())


@pytest.mark.parametrize(
  "text",
  [
    *("{", "[]", "{}", "\xff", '{"config": 3}', '{"config": {"model": 3}}'),
    '{"config": {}, "history": 5}',
  ],
)
def test_damaged_record_is_one_line(tmp_path, text):
  (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
  with pytest.raises(UserError, match=r"config\.json[^\n]*$"):
    Workdir(tmp_path).check(standin.small_config())


def test_file_in_place_of_the_folder_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  home = Workdir(tmp_path / "file")
  with pytest.raises(UserError, match=r"^cannot write .*file[^\n]*$"):
    home.claimed().__enter__()


def test_rewind_drops_later_and_broken_lines(tmp_path):
  home = Workdir(tmp_path)
  writer = JsonLines(home.metrics)
  for step in (1, 2, 2, 3, 4):
    writer.write(step, {"x": step / 3})
  writer.close()
  with home.metrics.open("a") as file:
    file.write('{"step": 5, "x"')
  home.rewind(2)
  lines = read_json_lines(home.metrics)
  assert [line["step"] for line in lines] == [1, 2, 2]
  assert lines[0]["x"] == 1 / 3
  home.rewind(-1)
  assert home.metrics.read_text() == ""
  assert not home.timing.exists()


def test_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
  home = recorded(tmp_path, standin.small_config())
  before = home.record.read_bytes()

  def full(*_, **__):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(json, "dump", full)
  with pytest.raises(
    UserError, match=r"^cannot write .*No space left.*free some space[^\n]*$"
  ):
    home.write({"config": {}})
  assert home.record.read_bytes() == before
