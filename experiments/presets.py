"""Prints what every preset costs; with --write, into a file.

  python -m experiments.presets
  python -m experiments.presets --write=docs/presets.md

Computed from shapes, so that the largest preset takes a second. The demo reads
bytes, all others are counted with a vocabulary of 32,000 tokens. "Start
weights" are the learned weights of the memories before the first token;
"state" is what generation keeps per row, however long the text; "carries" is
what one block keeps per row of 4,096 tokens for the backward pass. Written by
`python -m experiments.presets --write=docs/presets.md`.
"""

from atlas_jax.data import tokenizers
from atlas_jax.models.size import size
from experiments import documents, flags
from experiments.configs import PRESETS

_VOCAB = 32_000
_HEADER = """\
| preset | parameters | start weights | state | carries, T = 4096 |
|---|---|---|---|---|"""


def row(name: str) -> str:
  """Returns one preset's line of the table."""
  model = PRESETS[name]().model
  demo = name.startswith("demo")
  vocab = tokenizers.load("bytes").vocab_size if demo else _VOCAB
  found = size(model, vocab, length=4096)
  return (
    f"| `{name}` | {found.parameters / 1e6:,.1f} M | {found.start_share:.1%} "
    f"| {found.state_bytes / 2**20:,.1f} MiB "
    f"| {found.carry_bytes / 2**20:,.1f} MiB |"
  )


def main() -> None:
  """Prints the table."""
  table = "\n".join([_HEADER, *map(row, PRESETS)])
  words = (__doc__ or "").split("\n\n")[-1].strip()
  documents.emit(table, f"# Presets\n\n{words}\n\n{table}\n")


if __name__ == "__main__":
  flags.run(main)
