"""What the tests of models share."""

import functools

import jax
import jax.numpy as jnp

from atlas_jax import config as configs
from atlas_jax import models
from tests.layers.helpers import randomised

VOCAB = 11

# Two thin layers whose window of 5 reaches over chunks of 4.
TINY = models.ModelConfig(
  dim=16,
  layers=2,
  heads=2,
  mlp_hidden=24,
  vocab_multiple=8,
  memory=models.MemoryOptions(
    key_width=4, expansion=2.0, chunk=4, window=5, muon_every=2, muon_steps=2
  ),
)
TINY_TITANS = configs.replace(
  TINY, {"mixer": "titans", "memory": models.MemoryOptions(chunk=4)}
)


@functools.cache
def model_of(config=TINY):
  """A tiny model whose parameters are all somewhere in general."""
  return randomised(models.build(config, VOCAB), scale=0.2)


def tokens(batch=2, length=19, seed=2):
  """Random token ids."""
  return jax.random.randint(jax.random.key(seed), (batch, length), 0, VOCAB)


def batch_of(ids, segment_ids=None):
  """A training batch that predicts each token's successor."""
  segments = jnp.ones_like(ids) if segment_ids is None else segment_ids
  targets = jnp.roll(ids, -1, axis=1)
  same = jnp.roll(segments, -1, axis=1) == segments
  same = (same & (segments > 0)).at[:, -1].set(False)
  return {
    "tokens": ids,
    "targets": targets,
    "segment_ids": segments,
    "weights": same.astype(jnp.float32),
  }
