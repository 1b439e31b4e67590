"""The paper's 1.3B: 18 blocks of width 2048, 100 billion tokens.

Presets: `atlas_1b3`, and with other memories `atlas_pp_1b3`,
`omeganet_1b3`, `titans_1b3`.

Expected result: not yet run.
Time and hardware: not yet run; meant for a slice of TPUs.
Command:
  python -m experiments.train --config=atlas_1b3 --workdir=DIR \\
    --data.path=TEXT --data.tokenizer=TOKENIZER.model --mesh.fsdp=DEVICES

A memory sees keys of width 256 per head: narrowed to 16 and lifted to the
153 monomials of degree 2 (titans: as they are). Sizes, with a vocabulary of
32,000:

| preset | parameters | start weights | state | carries, T = 4096 |
|---|---|---|---|---|
| `atlas_1b3` | 976.7 M | 6.2% | 483.4 MiB | 1,636.0 MiB |
| `omeganet_1b3` | 976.4 M | 6.2% | 253.3 MiB | 818.0 MiB |
| `titans_1b3` | 972.9 M | 7.8% | 594.5 MiB | 2,048.0 MiB |
| `atlas_pp_1b3` | 971.0 M | 8.5% | 655.5 MiB | 2,248.0 MiB |
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
    layers=18,
    dim=2048,
    heads=8,
    learning_rate=7e-4,
    tokens=100e9,
  )
