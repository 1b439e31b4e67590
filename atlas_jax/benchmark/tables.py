"""Markdown tables."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A table with a header; cells hold no line breaks."""
  line = lambda cells: f"| {' | '.join(cells)} |"
  rule = f"|{'---|' * len(header)}"
  return "\n".join([line(header), rule, *map(line, rows)])
