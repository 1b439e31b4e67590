"""The presets: which there are, that they are valid, what the paper says."""

import pytest

from atlas_jax import config
from experiments.configs import MIXERS, PRESETS

# Table 7: blocks, width, heads, peak learning rate, tokens.
PAPER = {
  "170m": (12, 768, 16, 3e-3, 15e9),
  "340m": (24, 1024, 16, 1.5e-3, 15e9),
  "760m": (24, 1536, 16, 1.25e-3, 30e9),
  "1b3": (18, 2048, 8, 7e-4, 100e9),
}


def test_every_size_has_every_memory():
  names = {f"{mixer}_{size}" for mixer in MIXERS for size in PAPER}
  names |= {f"demo_{mixer}" for mixer in MIXERS} - {"demo_atlas"} | {"demo"}
  assert set(PRESETS) == names


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_survives_json(name):
  preset = PRESETS[name]()
  preset.validate(devices=1)
  assert config.from_dict(type(preset), config.to_dict(preset)) == preset


@pytest.mark.parametrize("size", PAPER)
@pytest.mark.parametrize("mixer", MIXERS)
def test_sizes_are_those_of_the_paper(size, mixer):
  preset = PRESETS[f"{mixer}_{size}"]()
  model, train = preset.model, preset.train
  layers, dim, heads, learning_rate, tokens = PAPER[size]
  assert (model.layers, model.dim, model.heads) == (layers, dim, heads)
  assert train.learning_rate == learning_rate
  assert (train.weight_decay, preset.data.window) == (0.1, 4096)
  per_step = train.batch * preset.data.window
  assert 0.5e6 <= per_step <= 0.55e6
  assert abs(train.steps * per_step - tokens) < per_step


@pytest.mark.parametrize("name", PRESETS)
def test_variants_differ_in_the_memory_only(name):
  preset = PRESETS[name]()
  size = "demo" if name.startswith("demo") else name.rsplit("_", 1)[-1]
  base = PRESETS["demo" if size == "demo" else f"atlas_{size}"]()
  memory = {"model.mixer": "atlas", "model.memory": base.model.memory}
  assert config.replace(preset, memory) == base
  mixer = name.removeprefix("demo_").removesuffix(f"_{size}")
  assert preset.model.mixer == ("atlas" if mixer == "demo" else mixer)
