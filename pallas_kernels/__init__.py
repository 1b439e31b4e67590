"""TPU kernels of atlas-jax. Imports jax only and knows nothing of Atlas."""
