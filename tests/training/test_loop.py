"""The loop: what it writes, when it stops, and what it goes on from."""

import dataclasses
import functools
import json
import os
import shutil
import signal

import chex
import jax
import numpy as np
import pytest
import standin

from atlas_jax.errors import UserError
from atlas_jax.training import checkpoint, loop, progress
from atlas_jax.training.loop import train
from atlas_jax.training.program import make_program
from atlas_jax.training.sharding import make_mesh
from atlas_jax.training.writers import read_json_lines


@functools.cache
def _program(build, config, mesh):
  return make_program(build, config, mesh)


def shared_program(build, config, mesh):
  """`make_program`, compiled once for all runs that differ in length only."""
  config = dataclasses.replace(
    config, steps=1, log_every=1, eval_every=1, checkpoint_every=1, keep=1
  )
  return _program(build, config, mesh)


def one_device(data, fsdp):
  """`make_mesh`, on one device: eight wait for one another at every sum."""
  del data, fsdp
  return make_mesh(1, 1, jax.devices()[:1])


@pytest.fixture(autouse=True, scope="module")
def _quick_runs():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, "make_program", shared_program)
    patch.setattr(loop, "make_mesh", one_device)
    yield
  _program.cache_clear()


def run(folder, task=None, init_from=None, reporter=None, **changes):
  config = standin.small_config(**changes)
  return train(
    config,
    folder,
    init_from=init_from,
    task=task or standin.make(config),
    reporter=reporter,
  )


def final_state(folder, **changes):
  """The state in a run's latest checkpoint, on the host."""
  config = standin.small_config(**changes)
  program = shared_program(
    standin.make(config).build, config.train, one_device(8, 1)
  )
  latest = checkpoint.latest_checkpoint(folder)
  return jax.device_get(checkpoint.read_state(latest, program.abstract))


def metrics_of(folder):
  return (folder / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of an uninterrupted run, and its summary."""
  folder = tmp_path_factory.mktemp("whole") / "run"
  return folder, run(folder)


def test_a_run_learns_and_writes_what_it_did(whole):
  folder, summary = whole
  assert (summary.status, summary.step) == ("finished", 12)
  assert sorted(summary.heldout) == [0, 4, 8, 12]
  assert summary.heldout[12]["loss"] < summary.heldout[0]["loss"] - 0.1
  lines = read_json_lines(folder / "metrics.jsonl")
  trained = [line for line in lines if "train/loss" in line]
  assert [line["step"] for line in trained] == list(range(1, 13))
  assert trained[-1]["train/loss"] == summary.train["loss"]
  assert {"train/hidden_norm", "train/grad_norm"} <= trained[0].keys()
  steps = [line["step"] for line in lines]
  assert steps == sorted(steps)
  timing = read_json_lines(folder / "timing.jsonl")
  assert all(line["tokens_per_second"] > 0 for line in timing)
  record = json.loads((folder / "config.json").read_text())
  assert record["config"]["train"]["steps"] == 12
  assert record["parameters"] == summary.parameters
  assert sorted(x.name for x in (folder / "checkpoints").iterdir()) == [
    *("12", "8")
  ]


def test_a_finished_run_called_again_does_nothing(whole, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(whole[0], folder)
  before = metrics_of(folder)
  summary = run(folder)
  assert (summary.status, summary.step) == ("finished", 12)
  assert summary.heldout == whole[1].heldout
  assert metrics_of(folder) == before


@pytest.mark.parametrize("stop", [2, 4, 10])
def test_stopping_anywhere_and_going_on_gives_the_same_bits(
  whole, tmp_path, stop
):
  folder = tmp_path / "run"
  config = standin.small_config()
  task = standin.make(config)
  events = {stop: lambda: os.kill(os.getpid(), signal.SIGTERM)}
  stopping = dataclasses.replace(
    task, batches=lambda: standin.Watched(task.batches(), events)
  )
  summary = run(folder, task=stopping)
  assert summary.status == "stopped"
  # The signal came while the batch after it was drawn; that step is finished.
  assert summary.step == stop + 1
  assert summary.reason.startswith("SIGTERM received; the same command")
  assert run(folder).status == "finished"
  assert metrics_of(folder) == metrics_of(whole[0])
  chex.assert_trees_all_equal(
    final_state(folder), final_state(whole[0]), strict=True
  )


def test_more_steps_may_follow_and_are_recorded(tmp_path):
  said = []
  run(tmp_path, train__steps=4)

  class Listening(progress.Silent):
    def note(self, text):
      said.append(text)

  summary = run(tmp_path, train__steps=6, reporter=Listening())
  assert (summary.status, summary.step) == ("finished", 6)
  record = json.loads((tmp_path / "config.json").read_text())
  assert record["history"] == [{"step": 4, "changes": {"train.steps": [4, 6]}}]
  assert record["config"]["train"]["steps"] == 6
  assert any("train.steps=6 (was 4)" in text for text in said)
  steps = [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")]
  assert steps == sorted(steps)


def test_fixed_decay_makes_a_longer_run_the_longer_run(tmp_path):
  changes = {"train__eval_every": 0}
  run(tmp_path / "a", train__steps=4, **changes)
  run(tmp_path / "a", train__steps=6, **changes)
  run(tmp_path / "b", train__steps=6, **changes)
  chex.assert_trees_all_equal(
    final_state(tmp_path / "a"), final_state(tmp_path / "b"), strict=True
  )


def refused(folder, match, **kwargs):
  before = {
    path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
  }
  with pytest.raises(UserError, match=match) as caught:
    run(folder, **kwargs)
  assert "\n" not in str(caught.value)
  del before[folder / "lock"]
  for path, content in before.items():
    assert path.read_bytes() == content


def test_another_run_is_refused_and_nothing_changes(whole):
  folder, _ = whole
  config = standin.small_config()
  task = standin.make(config)
  refused(folder, r"train\.seed=0 there, 1 now", train__seed=1)
  other = dataclasses.replace(task, fingerprint="other")
  refused(folder, "training text is no longer", task=other)
  tokenizer = standin.ByteTokenizer()
  tokenizer.fingerprint = "other"
  other = dataclasses.replace(task, tokenizer=tokenizer)
  refused(folder, "tokenizer is no longer", task=other)
  refused(folder, "began from new weights, not from", init_from=folder)
  refused(folder, "has 12 steps already, more than", train__steps=11)


def test_a_damaged_latest_checkpoint_is_refused_until_moved_away(
  whole, tmp_path
):
  folder = tmp_path / "run"
  shutil.copytree(whole[0], folder)
  for path in (folder / "checkpoints" / "12").glob("state/**/d/*"):
    path.write_bytes(path.read_bytes()[:-40])
  refused(folder, "checkpoints/12 cannot be read")
  shutil.move(folder / "checkpoints" / "12", tmp_path / "aside")
  assert run(folder).status == "finished"
  assert metrics_of(folder) == metrics_of(whole[0])
  chex.assert_trees_all_equal(
    final_state(folder), final_state(whole[0]), strict=True
  )


def test_init_from_takes_the_weights_and_nothing_else(whole, tmp_path):
  source, summary = whole
  folder = tmp_path / "run"
  changes = {"train__beta1": 0.5}
  tuned = run(folder, init_from=source, train__steps=2, **changes)
  assert tuned.heldout[0] == summary.heldout[12]
  assert tuned.step == 2
  record = json.loads((folder / "config.json").read_text())
  assert record["init_from"] == str(source / "checkpoints" / "12")
  # Going on needs no flag, and takes the same one.
  assert run(folder, train__steps=3, **changes).step == 3
  again = run(folder, init_from=source, train__steps=3, **changes)
  assert again.step == 3


def test_init_from_is_remembered_before_the_first_checkpoint(whole, tmp_path):
  source, summary = whole
  folder = tmp_path / "run"
  run(folder, init_from=source, train__steps=2)
  shutil.rmtree(folder / "checkpoints")
  (folder / "checkpoints").mkdir()
  assert run(folder, train__steps=2).heldout[0] == summary.heldout[12]


def test_init_from_refuses_weights_that_do_not_fit(whole, tmp_path):
  config = standin.small_config()
  wide = dataclasses.replace(
    standin.make(config),
    build=standin.Build(dim=24),
  )
  with pytest.raises(UserError, match=r"do not fit .* blocks/mixer has shape"):
    run(tmp_path / "a", task=wide, init_from=whole[0])
  tokenizer = standin.ByteTokenizer()
  tokenizer.fingerprint = "other"
  other = dataclasses.replace(standin.make(config), tokenizer=tokenizer)
  with pytest.raises(UserError, match="another tokenizer"):
    run(tmp_path / "b", task=other, init_from=whole[0])
  with pytest.raises(UserError, match="holds no checkpoint"):
    run(tmp_path / "c", init_from=tmp_path)


class Poisoned:
  """An iterator whose batch of one step has a weight that is no number."""

  def __init__(self, iterator, step):
    self._iterator, self._step = iterator, step
    self.get_state, self.set_state = iterator.get_state, iterator.set_state
    self.close = iterator.close

  def __next__(self):
    step = self.get_state()["next_index"] + 1
    batch = next(self._iterator)
    if step == self._step:
      batch["weights"] = np.full_like(batch["weights"], np.nan)
    return batch


@pytest.mark.parametrize("step", [1, 6, 12])
def test_a_loss_that_is_no_number_stops_the_run_before_it(
  whole, tmp_path, step
):
  task = standin.make(standin.small_config())
  poisoned = dataclasses.replace(
    task, batches=lambda: Poisoned(task.batches(), step)
  )
  for _ in range(2):  # Going on meets the same step at once.
    summary = run(tmp_path, task=poisoned)
    assert summary.status == "non-finite"
    assert summary.step == step - 1
    assert f"step {step} had non-finite" in summary.reason
    assert "loss=nan" in summary.reason
    last = read_json_lines(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == step
    assert last["train/loss"] == "nan"
    state = final_state(tmp_path)
    assert int(state.step) == step - 1
    assert not state.halted
  # The last good state is whole: on sound data the run ends as ever.
  assert run(tmp_path).status == "finished"
  assert metrics_of(tmp_path) == metrics_of(whole[0])


def test_tensorboard_by_flag(tmp_path):
  pytest.importorskip("tensorboardX", reason="pip install 'atlas-jax[tb]'")
  run(tmp_path, train__steps=1, train__tensorboard=True)
  assert list((tmp_path / "tensorboard").glob("events*"))


def test_no_held_out_text_trains_without(tmp_path):
  task = standin.make(standin.small_config())
  summary = run(
    tmp_path, task=dataclasses.replace(task, heldout=[]), train__steps=1
  )
  assert summary.heldout == {}


def test_mesh_may_change_on_going_on(tmp_path, monkeypatch):
  monkeypatch.setattr(loop, "make_mesh", make_mesh)
  run(tmp_path, train__steps=4)
  summary = run(tmp_path, train__steps=6, mesh__fsdp=4)
  assert summary.status == "finished"
