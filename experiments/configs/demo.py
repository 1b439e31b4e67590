"""A small model that learns Python in five minutes on two cores.

Presets: `demo`, and with other memories `demo_atlas_pp`, `demo_omeganet`,
`demo_titans`.

Expected result: `demo` 2.27 held-out bits per byte (of Python 3.13's library),
19 % below a trigram of the same bytes; `demo_atlas_pp`, `demo_omeganet` and
`demo_titans` not yet run.
Time and hardware: 4 minutes on two cores of an AMD EPYC, no accelerator.
Command:
  make demo
or
  python -m experiments.train --config=demo --workdir=DIR

A memory sees keys of width 64 per head: narrowed to 16 and lifted to the 153
monomials of degree 2 (titans: as they are). Sizes, with bytes as tokens:

| preset | parameters | start weights | state | carries, T = 4096 |
|---|---|---|---|---|
| `demo` | 1.4 M | 5.8% | 0.9 MiB | 20.3 MiB |
| `demo_omeganet` | 1.4 M | 5.8% | 0.5 MiB | 10.2 MiB |
| `demo_titans` | 1.4 M | 3.5% | 0.6 MiB | 12.0 MiB |
| `demo_atlas_pp` | 1.4 M | 10.1% | 1.3 MiB | 34.7 MiB |
"""

from atlas_jax.data.config import DataConfig
from atlas_jax.models.config import (
  AttentionOptions,
  HybridOptions,
  MemoryOptions,
  ModelConfig,
)
from atlas_jax.models.presets import MIXERS
from atlas_jax.models.registry import REGISTRY, mixers_of
from atlas_jax.training.config import ExperimentConfig, TrainConfig
from experiments.configs.paper import whole_turns

# Short windows and one orthogonalised step a chunk: what a small model on a CPU
# affords. Wider memories would be a quarter of its parameters.
_MEMORY = MemoryOptions(expansion=1.0)
_WINDOW = MemoryOptions(expansion=1.0, window=4)
_MUON = MemoryOptions(expansion=1.0, window=4, muon_every=64)
_OPTIONS = {
  "atlas": _MUON,
  "atlas_pp": _MUON,
  "omeganet": _WINDOW,
  # Examples are far shorter than its chunk.
  "lact": MemoryOptions(expansion=1.0, chunk=64),
}
_HYBRIDS = ("mac", "mag", "mal")


def get(
  mixer: str = "atlas",
  pattern: tuple[str, ...] = (),
  memory: str | None = None,
) -> ExperimentConfig:
  """Returns the preset of other mixers.

  Args:
    mixer, pattern: The mixers of the blocks, as in `ModelConfig`.
    memory: The memory inside hybrids; None: their own choice, an Atlas.
  """
  names = mixers_of(mixer, pattern)
  deep = {(memory or "atlas") if name in _HYBRIDS else name for name in names}
  deep &= set(MIXERS)
  options = MemoryOptions()
  if deep:
    options = _OPTIONS.get(deep.pop(), _MEMORY) if len(deep) == 1 else _MEMORY
  read = {option for name in names for option in REGISTRY[name].options}
  return ExperimentConfig(
    model=ModelConfig(
      mixer=mixer,
      pattern=pattern,
      layers=whole_turns(2, mixer, pattern),
      dim=192,
      heads=3,
      # Of a transformer; an Atlas of as many parameters has 768.
      mlp_hidden=912,
      match="transformer",
      # Activations of so short windows fit; computing them twice costs time.
      remat=False,
      memory=options,
      # Windows and segments within the short examples.
      attention=AttentionOptions(
        window=64 if "attention.window" in read else None
      ),
      hybrid=HybridOptions(
        memory=memory, segment=64 if "hybrid.segment" in read else None
      ),
    ),
    data=DataConfig(window=256, align=64, eval_windows=128),
    train=TrainConfig(
      steps=300,
      batch=8,
      learning_rate=4e-3,
      warmup=30,
      beta2=0.98,
      eval_every=100,
    ),
  )
