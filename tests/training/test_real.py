"""The real model on real text: task, golden numbers, meshes, restoring."""

import chex
import jax
import numpy as np
import optax
import pytest

from atlas_jax import config as configs
from atlas_jax.errors import UserError
from atlas_jax.training import loop, restore
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.heldout import evaluate, with_bytes
from atlas_jax.training.program import make_program, split_model
from atlas_jax.training.sharding import make_mesh
from atlas_jax.training.task import make_task

# A change of these numbers is a change of what training does: name it in the
# changelog, then write the new numbers here.
GOLDEN = {
  "atlas": {
    "bits_per_byte": 9.12657,
    "gate_decay": 0.99,
    "gate_momentum": 0.9,
    "gate_rate": 0.01,
    "gate_window": 1.3808,
    "grad_norm": 2.95825,
    "inner_loss": 3.14263,
    "learning_rate": 0.01,
    "loss": 6.32605,
    "memory_norm": 3.5432,
    "param_norm": 35.5477,
    "update_rms": 0.00946561,
  },
  "titans": {
    "bits_per_byte": 9.0891,
    "gate_decay": 0.99,
    "gate_momentum": 0.9,
    "gate_rate": 0.1,
    "gate_window": 1,
    "grad_norm": 2.94906,
    "inner_loss": 2.94004,
    "learning_rate": 0.01,
    "loss": 6.30008,
    "memory_norm": 3.30761,
    "param_norm": 34.7422,
    "update_rms": 0.00943215,
  },
}
# Small, so that they compile quickly.
MEMORIES = {
  "atlas": {
    "model.memory.window": 2,
    "model.memory.muon_every": 8,
    "model.memory.key_width": 4,
  },
  "titans": {},
}


def config_of(mixer, small_texts):
  """A tiny model on the text."""
  changes = {
    "model.mixer": mixer,
    "model.dim": 16,
    "model.layers": 2,
    "model.heads": 2,
    "model.memory.chunk": 8,
    "data.path": str(small_texts),
    "data.window": 32,
    "data.valid_fraction": 0.2,
    "data.eval_windows": 10,
    "train.batch": 8,
    "train.steps": 2,
    "train.warmup": 1,
    "train.clip": 0.0,
    "train.learning_rate": 0.01,
  }
  return configs.replace(ExperimentConfig(), {**changes, **MEMORIES[mixer]})


def on_mesh(config, folder, data, fsdp):
  """The task and the program on some of the devices."""
  task = make_task(config, folder)
  mesh = make_mesh(data, fsdp, jax.devices()[: data * fsdp])
  return task, make_program(task.build, config.train, mesh)


def one_step(task, program):
  """The state and report of the first step, on the host."""
  iterator = task.batches()
  batch = with_bytes(next(iterator), task.tokenizer.byte_length)
  iterator.close()
  return jax.device_get(
    program.train_step(program.init(), program.place(batch))
  )


@pytest.fixture(scope="module")
def alone(small_texts, tmp_path_factory):
  """The tiny Titans: configuration, task and program on one device."""
  config = config_of("titans", small_texts)
  task, program = on_mesh(config, tmp_path_factory.mktemp("alone"), 1, 1)
  return config, task, program


@pytest.mark.parametrize(
  "mixer", ["titans", pytest.param("atlas", marks=pytest.mark.full)]
)
def test_one_step_on_one_device_and_on_a_mesh(
  mixer, small_texts, tmp_path, alone
):
  config = config_of(mixer, small_texts)
  one = alone[1:] if mixer == "titans" else on_mesh(config, tmp_path, 1, 1)
  expected, report = one_step(*one)
  measured = {name: float(value) for name, value in report.metrics.items()}
  assert measured == pytest.approx(GOLDEN[mixer], rel=1e-3)
  for name, moment in nested(optax.tree.get(expected.opt_state, "mu")).items():
    assert np.any(moment), f"{name} has no gradient"

  state, meshed = one_step(*on_mesh(config, tmp_path, 2, 4))
  chex.assert_trees_all_close(
    meshed.metrics, report.metrics, rtol=1e-5, atol=1e-5
  )
  chex.assert_trees_all_close(
    optax.tree.get(state.opt_state, "mu"),
    optax.tree.get(expected.opt_state, "mu"),
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_keeps_every_dtype_also_of_bfloat16(
  small_texts, tmp_path, accumulate
):
  changes = {
    "model.dtype": "bfloat16",
    "model.param_dtype": "bfloat16",
    "train.accumulate": accumulate,
  }
  config = configs.replace(config_of("titans", small_texts), changes)
  task, program = on_mesh(config, tmp_path, 1, 1)
  batch = jax.eval_shape(lambda: dict(task.heldout[0]))
  state, report = jax.eval_shape(program.train_step, program.abstract, batch)
  dtypes = [
    jax.tree.map(lambda leaf: leaf.dtype, tree)
    for tree in (state, program.abstract)
  ]
  chex.assert_trees_all_equal(*dtypes)
  assert program.abstract.params["embedding"].dtype == "bfloat16"
  for name, metric in report.metrics.items():
    assert metric.dtype == "float32", name


def nested(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def test_a_trained_run_is_restored_with_its_tokenizer(
  alone, tmp_path, monkeypatch
):
  config, task, program = alone
  monkeypatch.setattr(loop, "make_program", lambda *_: program)
  folder = tmp_path / "run"
  summary = loop.train(config, folder)
  trained = restore.load(folder)
  assert trained.step == 2
  assert trained.config == config
  assert trained.tokenizer.decode(trained.tokenizer.encode("añb")) == "añb"
  assert trained.record["parameters"] == summary.parameters
  params = jax.tree.map(
    jax.device_put,
    split_model(trained.model)[1],
    jax.tree.map(lambda leaf: leaf.sharding, program.abstract.params),
  )
  assert evaluate(program, params, task.heldout) == summary.heldout[2]
  out = trained.model(np.array([[1, 2, 3]], np.int32))
  assert out.logits.shape == (1, 3, trained.tokenizer.vocab_size)

  (folder / "tokenizer" / "tokenizer.bytes").unlink()
  with pytest.raises(UserError, match="tokenizer"):
    restore.load(folder)


def test_a_folder_without_a_run_is_one_line(tmp_path):
  with pytest.raises(UserError, match=r"holds no checkpoint[^\n]*$"):
    restore.load(tmp_path)


def test_text_that_cannot_be_trained_on_is_one_line(small_texts, tmp_path):
  config = config_of("titans", small_texts)
  held = configs.replace(config, {"data.valid_fraction": 1.0})
  with pytest.raises(UserError, match=r"no training text[^\n]*$"):
    loop.train(held, tmp_path / "a")
  short = configs.replace(config, {"data.window": 8192})
  with pytest.raises(UserError, match=r"fewer than one window[^\n]*$"):
    loop.train(short, tmp_path / "b")
  for name in "ab":
    assert not (tmp_path / name / "config.json").exists()
