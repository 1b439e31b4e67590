"""The paper's 340M: 24 blocks of width 1024, 15 billion tokens.

Presets: `atlas_340m`, and with other memories `atlas_pp_340m`,
`omeganet_340m`, `titans_340m`.

Expected result: not yet run.
Time and hardware: not yet run; meant for a slice of TPUs.
Command:
  python -m experiments.train --config=atlas_340m --workdir=DIR \\
    --data.path=TEXT --data.tokenizer=TOKENIZER.model --mesh.fsdp=DEVICES

A memory sees keys of width 64 per head: narrowed to 16 and lifted to the
153 monomials of degree 2 (titans: as they are). Sizes, with a vocabulary of
32,000:

| preset | parameters | start weights | state | carries, T = 4096 |
|---|---|---|---|---|
| `atlas_340m` | 338.8 M | 6.3% | 179.6 MiB | 434.0 MiB |
| `omeganet_340m` | 338.4 M | 6.3% | 98.2 MiB | 217.0 MiB |
| `titans_340m` | 337.9 M | 3.7% | 108.6 MiB | 256.0 MiB |
| `atlas_pp_340m` | 335.0 M | 10.9% | 294.3 MiB | 740.0 MiB |
"""

from atlas_jax.training.config import ExperimentConfig
from experiments.configs.paper import paper_size


def get(
  mixer: str = "atlas",
  pattern: tuple[str, ...] = (),
  memory: str | None = None,
) -> ExperimentConfig:
  """Returns the preset of these mixers, as in `paper_size`."""
  return paper_size(
    mixer,
    pattern,
    memory,
    layers=24,
    dim=1024,
    heads=16,
    learning_rate=1.5e-3,
    tokens=15e9,
  )
