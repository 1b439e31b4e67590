"""Models that others have trained, from their files."""

from atlas_jax.interop.as_run import as_run
from atlas_jax.interop.pretrained import SMOLLM2, Pretrained, load

__all__ = ["SMOLLM2", "Pretrained", "as_run", "load"]
