"""Whatever happens to its process, a run ends in the same bits."""

import json
import os
import pathlib
import subprocess
import sys

import chex
import jax
import pytest
import standin

from atlas_jax.training import checkpoint
from atlas_jax.training.program import make_program
from atlas_jax.training.sharding import make_mesh

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def process(tmp_path_factory):
  """Runs the stand-in as a program: (folder, options) -> completed process."""
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": str(ROOT),
  }

  def start(folder, **options):
    return subprocess.run(
      [sys.executable, standin.__file__, folder, json.dumps(options)],
      env=environment,
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )

  return start


def said(done):
  """The lines on stderr, but for those of XLA loading what it compiled."""
  lines = done.stderr.splitlines()
  return [line for line in lines if "cpu_aot_loader" not in line]


def steps_of(folder):
  return sorted(path.name for path in (folder / "checkpoints").iterdir())


def final_state(folder):
  config = standin.small_config()
  program = make_program(
    standin.make(config).build,
    config.train,
    make_mesh(1, 1, jax.devices()[:1]),
  )
  state = checkpoint.read_state(folder / "checkpoints" / "12", program.abstract)
  return jax.device_get(state)


def test_killed_filled_and_stopped_ends_in_the_bits_of_the_whole(
  process, tmp_path
):
  whole, folder = tmp_path / "whole", tmp_path / "run"
  done = process(whole)
  assert (done.returncode, done.stdout) == (0, "finished 12\n"), done.stderr

  # Killed in the middle of a run, two steps after a checkpoint.
  done = process(folder, kill_after=6)
  assert done.returncode == -9
  assert steps_of(folder) == ["4"]
  steps = [
    json.loads(line)["step"]
    for line in (folder / "metrics.jsonl").read_text().splitlines()
  ]
  assert steps[-1] > 4, "there must be lines to be written anew"

  # Killed in the middle of saving.
  done = process(folder, kill_saving=8)
  assert done.returncode == -9
  assert steps_of(folder) == ["4", "8.orbax-checkpoint-tmp"]

  # The disk is full when the next checkpoint is due.
  done = process(folder, full_after=7)
  assert done.returncode == 2
  (line,) = said(done)
  assert line.startswith("error: cannot write a checkpoint to ")
  assert "File too large): free some space there" in line
  assert "4" in steps_of(folder)
  assert "8" not in steps_of(folder)

  # Asked to stop.
  done = process(folder, signal_after=9)
  assert (done.returncode, done.stdout) == (0, "stopped 10\n"), done.stderr
  assert said(done) == []
  assert steps_of(folder) == ["10", "8"]

  done = process(folder)
  assert (done.returncode, done.stdout) == (0, "finished 12\n"), done.stderr
  for name in ("metrics.jsonl", "config.json"):
    assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
  chex.assert_trees_all_equal(
    final_state(folder), final_state(whole), strict=True
  )
