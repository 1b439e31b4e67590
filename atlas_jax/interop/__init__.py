"""Models that others have trained, from their files."""

from atlas_jax.interop.pretrained import SMOLLM2, Pretrained, load

__all__ = ["SMOLLM2", "Pretrained", "load"]
