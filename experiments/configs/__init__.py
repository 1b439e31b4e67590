"""Presets by name: one module per size, one preset for some memories.

With `--model.mixer=NAME` or `--model.pattern=NAME,NAME` a preset is of any
other mixer of the registry.
"""

import functools
from collections.abc import Callable, Mapping

from atlas_jax.training.config import ExperimentConfig
from experiments.configs import (
  atlas_1b3,
  atlas_170m,
  atlas_340m,
  atlas_760m,
  demo,
)

MIXERS = ("atlas", "omeganet", "titans", "atlas_pp")


def _name(mixer: str, size: str) -> str:
  if size == "demo":
    return size if mixer == "atlas" else f"{size}_{mixer}"
  return f"{mixer}_{size}"


_SIZES = {
  "demo": demo,
  "170m": atlas_170m,
  "340m": atlas_340m,
  "760m": atlas_760m,
  "1b3": atlas_1b3,
}

# Called with `mixer` or `pattern`, a preset is that of other mixers.
PRESETS: Mapping[str, Callable[..., ExperimentConfig]] = {
  _name(mixer, size): functools.partial(module.get, mixer=mixer)
  for size, module in _SIZES.items()
  for mixer in MIXERS
}
