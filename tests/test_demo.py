"""The demo, on a model that learns nothing: its figures and its files."""

import json
import shutil

import jax
import pytest

from atlas_jax import config as configs
from atlas_jax import demo
from atlas_jax.errors import UserError
from atlas_jax.training.config import ExperimentConfig


@pytest.fixture(scope="module")
def finished(small_texts, tmp_path_factory):
  """A finished run: its configuration, its folder, and what it returned."""
  config = configs.replace(
    ExperimentConfig(),
    {
      "model.mixer": "titans",
      "model.dim": 8,
      "model.layers": 1,
      "model.heads": 1,
      "model.memory.chunk": 8,
      "data.path": str(small_texts),
      "data.window": 32,
      "data.valid_fraction": 0.2,
      "data.eval_windows": 10,
      "train.batch": 8,
      "train.steps": 2,
      "train.warmup": 1,
      "mesh.data": jax.device_count(),
    },
  )
  folder = tmp_path_factory.mktemp("run")
  return config, folder, *demo.run(config, folder)


def test_figures_are_over_the_text_that_was_read(finished):
  _, folder, summary, comparison = finished
  assert summary.step == 2
  assert comparison.before == summary.heldout[0]["bits_per_byte"]
  assert comparison.after == summary.heldout[2]["bits_per_byte"]
  # Two batches of eight windows of 32 tokens and the next, without padding.
  assert 0 < comparison.bytes_read <= 2 * 8 * 33
  assert comparison.bytes_read < comparison.bytes_all
  assert comparison.trigram_all < comparison.trigram
  written = json.loads((folder / "comparison.json").read_text())
  assert written["margin"] == 1 - comparison.after / comparison.trigram
  assert written["environment"]["packages"]["jax"] == jax.__version__
  assert f"{comparison.bytes_read:,} bytes" in comparison.text()
  assert "above the trigram" in comparison.text()


def test_called_again_it_shows_the_run_and_keeps_its_time(finished):
  config, folder, _, comparison = finished
  before = (folder / "comparison.json").read_bytes()
  summary, again = demo.run(config, folder)
  assert summary.train == {}
  assert again == comparison
  assert (folder / "comparison.json").read_bytes() == before


def test_other_heldout_text_is_refused(finished, tmp_path):
  config, folder, *_ = finished
  copy = tmp_path / "run"
  shutil.copytree(folder, copy)
  before = (copy / "config.json").read_bytes()
  other = configs.replace(config, {"data.eval_windows": 3})
  with pytest.raises(UserError, match=r"use --data\.eval_windows=10, or give"):
    demo.run(other, copy)
  assert (copy / "config.json").read_bytes() == before


def test_lost_figures_are_not_made_up(finished, tmp_path):
  config, folder, *_ = finished
  copy = tmp_path / "run"
  shutil.copytree(folder, copy)
  (copy / "metrics.jsonl").unlink()
  with pytest.raises(UserError, match="no longer holds the held-out figures"):
    demo.run(config, copy)


def test_sample_begins_with_the_prompt(finished):
  _, folder, *_ = finished
  pieces = list(demo.sample(folder, max_tokens=3))
  assert pieces[0] == demo.PROMPT
  assert len(pieces) > 1


def test_the_curve_is_a_picture(finished):
  pytest.importorskip("matplotlib", reason="pip install 'atlas-jax[plot]'")
  _, folder, _, comparison = finished
  path = demo.draw(folder, comparison)
  assert path.read_bytes().startswith(b"\x89PNG")
