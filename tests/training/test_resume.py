"""Whatever happens to its process, a run ends in the same bits."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import chex
import jax
import pytest
import standin

from atlas_jax.training import checkpoint
from atlas_jax.training.program import make_program
from atlas_jax.training.sharding import make_mesh
from atlas_jax.training.writers import read_json_lines

ROOT = pathlib.Path(__file__).parents[2]
# Severity, month and day, time, thread, file and line, as absl in C++ writes.
XLA_LOG = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\]")


@pytest.fixture(scope="module")
def process(tmp_path_factory):
  """Starts the stand-in as a program: (folder, options) -> its process."""
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": str(ROOT),
  }

  def start(folder, **options):
    command = [sys.executable, standin.__file__, folder, json.dumps(options)]
    return subprocess.Popen(
      command,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  return start


def ended(process):
  """The process's code and output, once it has ended."""
  stdout, stderr = process.communicate(timeout=300)
  return subprocess.CompletedProcess(
    process.args, process.returncode, stdout, stderr
  )


def said(done):
  """The lines on stderr, but for those that XLA logs (of what it loads)."""
  return [line for line in done.stderr.splitlines() if not XLA_LOG.match(line)]


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
  done = ended(process(whole))
  assert (done.returncode, done.stdout) == (0, "finished 12\n"), done.stderr

  # Killed in the middle of a run, two steps after a checkpoint.
  done = ended(process(folder, kill_after=6))
  assert done.returncode == -9
  assert steps_of(folder) == ["4"]
  lines = read_json_lines(folder / "metrics.jsonl")
  assert lines[-1]["step"] > 4, "there must be lines to be written anew"

  # Killed in the middle of saving.
  done = ended(process(folder, kill_saving=8))
  assert done.returncode == -9
  assert steps_of(folder) == ["4", "8.orbax-checkpoint-tmp"]

  # The disk is full when the next checkpoint is due.
  done = ended(process(folder, full_after=7))
  assert done.returncode == 2
  (line,) = said(done)
  assert line.startswith("error: cannot write a checkpoint to ")
  assert "File too large): free some space there" in line
  assert "4" in steps_of(folder)
  assert "8" not in steps_of(folder)

  # Asked to stop.
  done = ended(process(folder, signal_after=9))
  assert (done.returncode, done.stdout) == (0, "stopped 10\n"), done.stderr
  assert said(done) == []
  assert steps_of(folder) == ["10", "8"]

  done = ended(process(folder))
  assert (done.returncode, done.stdout) == (0, "finished 12\n"), done.stderr
  for name in ("metrics.jsonl", "config.json"):
    assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
  chex.assert_trees_all_equal(
    final_state(folder), final_state(whole), strict=True
  )


@pytest.mark.full
def test_two_processes_agree_with_one_and_stop_together(process, tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  alone, folder = tmp_path / "alone", tmp_path / "run"
  done = ended(process(alone, devices=4))
  assert done.returncode == 0, done.stderr

  # The processes agree on a step to stop after, which takes them some time.
  both = [
    process(
      folder,
      devices=2,
      process=[i, 2, port],
      signal_after=[5, None][i],
      pace=0.5,
    )
    for i in range(2)
  ]
  done = [ended(one) for one in both]
  stopped = [one.stdout.splitlines()[-1] for one in done]
  assert stopped[0].startswith("stopped "), done[0].stderr
  assert stopped[0] == stopped[1]
  assert stopped[0].split()[1] in steps_of(folder)

  # One process goes on from what two have saved.
  done = ended(process(folder, devices=4))
  assert done.returncode == 0, done.stderr
  lines = [read_json_lines(x / "metrics.jsonl") for x in (alone, folder)]
  assert len(lines[0]) == len(lines[1])
  for one, other in zip(*lines, strict=True):
    assert one == pytest.approx(other, rel=1e-5)
