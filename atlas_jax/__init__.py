"""atlas-jax: sequence models whose memory learns at test time, in JAX."""

__version__ = "0.1.0"
