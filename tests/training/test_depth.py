"""Deep and thin: 128 blocks of any mixer learn from the first step on.

A process of its own for each, as a user would start it: the eight simulated
devices of other tests would wait for each other in every block.
"""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from atlas_jax.models.registry import REGISTRY

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 20
FLAGS = {
  "config": "demo",
  "model.layers": 128,
  "model.dim": 64,
  "model.heads": 2,
  "model.mlp_hidden": 128,
  "model.match": "",
  "model.remat": True,
  "data.window": 64,
  "data.valid_fraction": 0.2,
  "data.eval_windows": 2,
  "train.steps": STEPS,
  "train.batch": 8,
  "train.learning_rate": 1e-3,
  "train.warmup": 4,
  "train.log_every": 1,
  "train.eval_every": STEPS,
}


@pytest.mark.full
@pytest.mark.parametrize("mixer", REGISTRY)
def test_128_blocks_of_width_64_train(mixer, small_texts, tmp_path):
  flags = FLAGS | {
    "model.mixer": mixer,
    "data.path": small_texts,
    "workdir": tmp_path,
  }
  command = [f"--{name}={value}" for name, value in flags.items()]
  subprocess.run(
    [sys.executable, "-m", "experiments.train", *command], cwd=ROOT, check=True
  )
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  losses = [r["train/loss"] for r in records if "train/loss" in r]
  assert len(losses) == STEPS
  assert np.mean(losses[-5:]) < losses[0]
