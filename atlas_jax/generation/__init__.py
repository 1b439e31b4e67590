"""Text from a language model: sampling, streaming, export."""

from atlas_jax.generation.export import Exported, export
from atlas_jax.generation.generator import Generator, Piece, Stream
from atlas_jax.generation.program import Context
from atlas_jax.generation.sampling import GREEDY, Sampling, sample

__all__ = [
  "GREEDY",
  "Context",
  "Exported",
  "Generator",
  "Piece",
  "Sampling",
  "Stream",
  "export",
  "sample",
]
