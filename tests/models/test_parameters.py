"""Names, shapes and counts of parameters, which checkpoints depend on."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from atlas_jax import config as configs
from atlas_jax import models
from tests.models.helpers import TINY, TINY_TITANS, VOCAB

ATLAS = """
blocks/mixer/gates/decay/bias 2,2,1
blocks/mixer/gates/decay/kernel 2,16,2,1
blocks/mixer/gates/momentum/bias 2,2,1
blocks/mixer/gates/momentum/kernel 2,16,2,1
blocks/mixer/gates/rate/bias 2,2,1
blocks/mixer/gates/rate/kernel 2,16,2,1
blocks/mixer/gates/window/bias 2,2,5
blocks/mixer/gates/window/kernel 2,16,2,5
blocks/mixer/key/kernel 2,16,16
blocks/mixer/key_convolution/kernel 2,4,16
blocks/mixer/memory/features/coefficient 2,3
blocks/mixer/memory/features/narrow 2,8,4
blocks/mixer/memory/start/in 2,2,16,15
blocks/mixer/memory/start/out 2,2,8,16
blocks/mixer/norm/scale 2,2,8
blocks/mixer/output/kernel 2,16,16
blocks/mixer/output_gate/kernel 2,16,16
blocks/mixer/query/kernel 2,16,16
blocks/mixer/query_convolution/kernel 2,4,16
blocks/mixer/value/kernel 2,16,16
blocks/mixer/value_convolution/kernel 2,4,16
blocks/mixer_norm/scale 2,16
blocks/mlp/down/kernel 2,24,16
blocks/mlp/gate/kernel 2,16,24
blocks/mlp/up/kernel 2,16,24
blocks/mlp_norm/scale 2,16
embedding 16,16
norm/scale 16
"""

# Relative to the above.
TITANS_LACKS = {
  *("gates/window/bias", "gates/window/kernel"),
  *("memory/features/coefficient", "memory/features/narrow"),
}


def table(config):
  params = nnx.to_pure_dict(nnx.state(models.abstract(config, VOCAB)))
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def _bytes(tree):
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_names_and_shapes_are_pinned():
  lines = [
    f"{name} {','.join(map(str, shape))}"
    for name, shape in sorted(table(TINY).items())
  ]
  assert lines == ATLAS.strip().splitlines()


def test_a_mixer_has_only_the_parameters_it_uses():
  lacks = {f"blocks/mixer/{name}" for name in TITANS_LACKS}
  assert table(TINY).keys() - table(TINY_TITANS).keys() == lacks
  assert table(TINY_TITANS).keys() < table(TINY).keys()
  untied = configs.replace(TINY, {"tie_embeddings": False})
  assert table(untied).keys() - table(TINY).keys() == {"head/kernel"}


def test_size_counts_what_is_there():
  size = models.size(TINY, VOCAB, length=10)
  model = models.build(TINY, VOCAB)
  assert size.parameters == sum(leaf.size for leaf in jax.tree.leaves(model))
  start = 2 * 2 * (16 * 15 + 8 * 16)
  assert size.start == start
  assert size.start_share == start / size.parameters
  assert size.embedding == 16 * 16
  assert size.state_bytes == _bytes(model.init_state(1))
  step = lambda model: model.step(
    jnp.zeros((1,), jnp.int32), model.init_state(1)
  )
  assert size.state_bytes + size.cache_bytes == _bytes(
    jax.eval_shape(step, model)[1]
  )
  # Three chunks of 4, two heads, weights and momentum, float32.
  assert size.carry_bytes == 3 * 2 * 2 * (16 * 15 + 8 * 16) * 4


@pytest.mark.parametrize("mixer", models.MIXERS)
@pytest.mark.parametrize(
  ("layers", "dim", "heads", "millions"),
  [(12, 768, 16, 109.5), (24, 1024, 16, 335), (24, 1536, 16, 730)],
)
def test_start_weights_are_a_small_share(mixer, layers, dim, heads, millions):
  config = models.ModelConfig(
    mixer=mixer, layers=layers, dim=dim, heads=heads, match="transformer"
  )
  size = models.size(config, 32000)
  assert size.start_share <= 0.15
  assert size.parameters == pytest.approx(millions * 1e6, rel=0.02)
