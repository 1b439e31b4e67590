"""Starting weights from one draw."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlas_jax.layers import SwiGLU
from atlas_jax.layers.initial import draw_once


def test_one_draw_fills_every_matrix():
  make = lambda rngs: SwiGLU(64, 128, scale=2.0, rngs=rngs)
  draw = lambda key: draw_once(make, key)
  mlp = draw(jax.random.key(0))
  for layer, inputs in ((mlp.gate, 64), (mlp.up, 64), (mlp.down, 128)):
    kernel = layer.kernel[...]
    np.testing.assert_allclose(jnp.std(kernel), 2 / inputs**0.5, rtol=0.05)
    assert abs(float(jnp.mean(kernel))) < 0.02
  # No number is used twice.
  values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mlp)])
  assert len(np.unique(values)) > 0.99 * len(values)
  text = str(
    jax.make_jaxpr(lambda key: nnx.split(draw(key))[1])(jax.random.key(0))
  )
  assert text.count("random_bits") == 1
