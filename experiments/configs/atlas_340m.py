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

SIZES
"""

from atlas_jax.training.config import ExperimentConfig
from experiments.configs.paper import paper_size


def get(mixer: str = "atlas") -> ExperimentConfig:
  """Returns the preset with the memory of this name in every block."""
  return paper_size(
    mixer, layers=24, dim=1024, heads=16, learning_rate=1.5e-3, tokens=15e9
  )
