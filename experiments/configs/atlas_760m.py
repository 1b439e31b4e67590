"""The paper's 760M: 24 blocks of width 1536, 30 billion tokens.

Presets: `atlas_760m`, and with other memories `atlas_pp_760m`,
`omeganet_760m`, `titans_760m`.

Expected result: not yet run.
Time and hardware: not yet run; meant for a slice of TPUs.
Command:
  python -m experiments.train --config=atlas_760m --workdir=DIR \\
    --data.path=TEXT --data.tokenizer=TOKENIZER.model --mesh.fsdp=DEVICES

A memory sees keys of width 96 per head: narrowed to 16 and lifted to the
153 monomials of degree 2 (titans: as they are). Sizes, with a vocabulary of
32,000:

| preset | parameters | start weights | state | carries, T = 4096 |
|---|---|---|---|---|
| `atlas_760m` | 734.7 M | 5.0% | 304.4 MiB | 747.0 MiB |
| `omeganet_760m` | 734.1 M | 5.0% | 164.4 MiB | 373.5 MiB |
| `titans_760m` | 731.0 M | 3.9% | 234.7 MiB | 576.0 MiB |
| `atlas_pp_760m` | 728.9 M | 8.1% | 476.6 MiB | 1,206.0 MiB |
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
    dim=1536,
    heads=16,
    learning_rate=1.25e-3,
    tokens=30e9,
  )
