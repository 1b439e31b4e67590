"""The paper's 170M: 12 blocks of width 768, 15 billion tokens.

Presets: `atlas_170m`, and with other memories `atlas_pp_170m`,
`omeganet_170m`, `titans_170m`.

Expected result: not yet run.
Time and hardware: not yet run; meant for a slice of TPUs.
Command:
  python -m experiments.train --config=atlas_170m --workdir=DIR \\
    --data.path=TEXT --data.tokenizer=TOKENIZER.model --mesh.fsdp=DEVICES

A memory sees keys of width 48 per head: narrowed to 16 and lifted to the
153 monomials of degree 2 (titans: as they are). Sizes, with a vocabulary of
32,000:

| preset | parameters | start weights | state | carries, T = 4096 |
|---|---|---|---|---|
| `atlas_170m` | 109.3 M | 6.8% | 63.1 MiB | 301.5 MiB |
| `omeganet_170m` | 109.1 M | 6.8% | 34.8 MiB | 150.8 MiB |
| `titans_170m` | 110.1 M | 3.2% | 31.8 MiB | 144.0 MiB |
| `atlas_pp_170m` | 109.6 M | 11.9% | 106.1 MiB | 531.0 MiB |
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
    layers=12,
    dim=768,
    heads=16,
    learning_rate=3e-3,
    tokens=15e9,
  )
