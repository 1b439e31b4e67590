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

SIZES
"""

from atlas_jax.training.config import ExperimentConfig
from experiments.configs.paper import paper_size


def get(mixer: str = "atlas") -> ExperimentConfig:
  """Returns the preset with the memory of this name in every block."""
  return paper_size(
    mixer, layers=12, dim=768, heads=16, learning_rate=3e-3, tokens=15e9
  )
