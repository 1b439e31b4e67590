"""Deep and thin: 128 blocks of any mixer learn from the first step on."""

import numpy as np
import pytest

from atlas_jax import config as configs
from atlas_jax.models.registry import REGISTRY
from atlas_jax.training.loop import train
from experiments.configs import PRESETS

STEPS = 20


class Losses:
  """A reporter that keeps the losses of training."""

  def __init__(self):
    self.found = []

  def start(self, step, steps, tokens):
    pass

  def advance(self, step):
    pass

  def metrics(self, step, metrics):
    if "train/loss" in metrics:
      self.found.append(metrics["train/loss"])

  def note(self, text):
    pass

  def close(self):
    pass


@pytest.mark.full
@pytest.mark.parametrize("mixer", REGISTRY)
def test_128_blocks_of_width_64_train(mixer, small_texts, tmp_path):
  config = configs.replace(
    PRESETS["demo"](mixer=mixer),
    {
      "model.layers": 128,
      "model.dim": 64,
      "model.heads": 2,
      "model.mlp_hidden": 128,
      "model.match": "",
      "model.remat": True,
      "data.path": str(small_texts),
      "data.window": 64,
      "data.valid_fraction": 0.2,
      "data.eval_windows": 2,
      "train.steps": STEPS,
      "train.batch": 8,
      "train.learning_rate": 1e-3,
      "train.warmup": 4,
      "train.log_every": 1,
      "train.eval_every": STEPS,
      # Eight simulated devices would wait for each other in every block.
      "mesh.data": 1,
    },
  )
  losses = Losses()
  assert train(config, tmp_path, reporter=losses).status == "finished"
  assert len(losses.found) == STEPS
  assert np.mean(losses.found[-5:]) < losses.found[0]
