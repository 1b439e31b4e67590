"""A small model that learns Python in five minutes on two cores.

Presets: `demo`, and with other memories `demo_atlas_pp`, `demo_omeganet`,
`demo_titans`.

Expected result: not yet run.
Time and hardware: not yet run; meant for two CPU cores, no accelerator.
Command:
  make demo
or
  python -m experiments.train --config=demo --workdir=DIR

A memory sees keys of width 32 per head: narrowed to 16 and lifted to the 153
monomials of degree 2 (titans: as they are). Sizes, with bytes as tokens:

| preset | parameters | start weights | state | carries, T = 4096 |
|---|---|---|---|---|
| `demo` | 1.1 M | 8.5% | 1.1 MiB | 11.6 MiB |
| `demo_omeganet` | 1.1 M | 8.5% | 0.8 MiB | 5.8 MiB |
| `demo_titans` | 1.0 M | 3.2% | 0.5 MiB | 4.0 MiB |
| `demo_atlas_pp` | 1.2 M | 14.6% | 1.7 MiB | 21.1 MiB |
"""

from atlas_jax.data.config import DataConfig
from atlas_jax.models.config import MemoryOptions, ModelConfig
from atlas_jax.training.config import ExperimentConfig, TrainConfig


def get(mixer: str = "atlas") -> ExperimentConfig:
  """Returns the preset with the memory of this name in every block."""
  return ExperimentConfig(
    model=ModelConfig(
      mixer=mixer,
      layers=4,
      dim=128,
      heads=4,
      # Wider memories would be a quarter of so small a model.
      memory=MemoryOptions(expansion=1.0),
    ),
    data=DataConfig(window=512),
    train=TrainConfig(
      steps=400, batch=16, learning_rate=3e-3, warmup=40, eval_every=100
    ),
  )
