"""What an evaluation leaves: JSON, a picture, and a few lines of text."""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from atlas_jax.evaluation.language_modelling import Result
from atlas_jax.training.disk import explained, write_json


@dataclasses.dataclass(frozen=True)
class Report:
  """A result, and all that decides it.

  Attributes:
    result: The figures.
    step: Steps that the model was trained for.
    window: Tokens of a training window.
    context: Tokens after which the memory starts afresh; 0: never inside of a
      document.
    limit: Tokens that were asked for; 0: all.
    text: Where the text is; "" is the held-out part of the run's own.
    fingerprint: Identifies the text, its split and the tokenizer.
    run: What the run recorded of itself.
  """

  result: Result
  step: int
  window: int
  context: int
  limit: int
  text: str
  fingerprint: str
  run: dict[str, Any]

  @property
  def name(self) -> str:
    """A file name, without suffix, that other evaluations do not share.

    Those that differ in step, text, run or settings have other names; to
    measure the same again replaces the file.
    """
    decisive = {
      "fingerprint": self.fingerprint,
      "limit": self.limit,
      "run": {k: self.run.get(k) for k in ("config", "text", "init_from")},
    }
    content = json.dumps(decisive, sort_keys=True).encode()
    key = hashlib.sha256(content).hexdigest()[:10]
    context = f"context-{self.context}" if self.context else "documents"
    return f"step-{self.step}-{context}-{key}"

  def write(self, folder: pathlib.Path) -> pathlib.Path:
    """Writes `NAME.json` into a folder, which is made; returns its path.

    Raises:
      UserError: It cannot be written.
    """
    with explained(folder):
      folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{self.name}.json"
    write_json(path, dataclasses.asdict(self))
    return path

  def text_lines(self) -> list[str]:
    """The figures in words."""
    result = self.result
    bits = result.bits_per_byte
    head = f"{result.tokens:,} tokens of {len(result.documents):,} documents"
    lines = [
      f"{head}, after {self.step:,} steps of training",
      f"perplexity per token {result.perplexity:,.3f}"
      + ("" if bits is None else f", bits per byte {bits:.4f}"),
      "",
      f"{'context':>17} {'tokens':>12} {'loss':>8} {'bits/byte':>10}",
    ]
    for bucket in result.positions:
      context = f"{bucket.first:,} to {bucket.last:,}"
      bits = bucket.bits_per_byte
      lines.append(
        f"{context:>17} {bucket.tokens:>12,} {bucket.loss:>8.4f} "
        f"{'' if bits is None else f'{bits:.4f}':>10}"
      )
    return lines
