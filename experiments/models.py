"""Prints what every mixer computes and costs; with --write, into a file.

  python -m experiments.models
  python -m experiments.models --write=docs/models.md

Read off the registry, so that a new mixer has its line. "Bytes at 340M" is the
state of one row in one layer of the 24 of width 1,024 with 16 heads, computed
from shapes, activations in bfloat16; where the state grows with the text it is
that after 4,096 tokens. Costs of training are orders per row and layer: T
tokens, D the width of the model, H heads, K and V the widths of keys and
values, C the chunk, W the window. Deep memories are bounded as docs/memory.md
says; `--model.memory.bound=off` is the equation as written. Matrix memories
have the model's heads, so that their states can be compared; most of their
papers have fewer and wider ones: `--model.matrix.heads`. The memory inside
`mac` has expansion 1 at 340M, as the projections alone nearly fill a block.
Written by `python -m experiments.models --write=docs/models.md`.
"""

from atlas_jax.models.registry import PATTERNS, REGISTRY
from atlas_jax.models.size import size
from experiments import documents, flags
from experiments.configs import PRESETS

_HEADER = """\
| name | what it computes | objective | network | optimizer | retention \
| window | state per row and layer | bytes at 340M | training | source |
|---|---|---|---|---|---|---|---|---|---|---|"""
_TITLES = {
  "deep": "Deep test-time memories",
  "attention": "Attention",
  "matrix": "Matrix memories",
  "kernel": "Exponential-kernel transformers",
  "hybrid": "Hybrids",
  "older": "Older",
}


def row(name: str) -> str:
  """Returns one mixer's line of the table."""
  entry = REGISTRY[name]
  model = PRESETS["atlas_340m"](mixer=name).model
  found = size(model, 32_000, length=4096)
  cells = (
    f"`{name}`",
    entry.equation,
    entry.objective,
    entry.network,
    entry.optimizer,
    entry.retention,
    entry.window,
    entry.state,
    f"{found.state_bytes // model.layers:,}",
    entry.cost,
    entry.source,
  )
  # A bar would end the cell.
  return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def text() -> str:
  """Returns the whole document."""
  words = (__doc__ or "").split("\n\n")[-1].strip()
  parts = ["# Models", words]
  families = dict.fromkeys(entry.family for entry in REGISTRY.values())
  for family in families:
    names = [name for name, entry in REGISTRY.items() if entry.family == family]
    parts += [
      f"## {_TITLES[family]}",
      "\n".join([_HEADER, *(row(name) for name in names)]),
    ]
  if PATTERNS:
    stacks = [
      f"- `{name}`: {', '.join(f'`{part}`' for part in turns)}, in turn"
      for name, turns in PATTERNS.items()
    ]
    parts += ["## Stacks", "\n".join(stacks)]
  return "\n\n".join(parts) + "\n"


def main() -> None:
  """Prints the tables."""
  document = text()
  documents.emit(document, document)


if __name__ == "__main__":
  flags.run(main)
