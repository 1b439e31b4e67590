"""The bound at the start of every deep mixer, with the gates of its layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import memory as am
from atlas_jax.layers import MemoryMixer
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.memory.coefficients import coefficients
from atlas_jax.memory.factors import factors, prepare, prepare_heads, working
from atlas_jax.models import MIXERS
from tests.memory.cases import assert_close

# Every two of OmegaNet's tokens overlap by the constant feature a_0 = 1: its
# budget divides by 8.6, and without that feature by 2.3.
DIVISORS = {"omeganet": 12.0}


def inputs(memory, length, width):
  """Parameters of a layer's memory, and queries, keys, values and gates."""
  layer = MemoryMixer(2 * width, 2, memory, rngs=nnx.Rngs(0))
  x = np.random.default_rng(1).normal(size=(1, length, 2 * width))

  @jax.jit
  def made(layer, x):
    return layer._inputs(x, None, Arrangement())[:4]

  return layer.memory_params(), made(layer, jnp.asarray(x, jnp.float32))


# LaCT takes one step of length 1 whatever its gradients.
@pytest.mark.parametrize("name", [n for n in MIXERS if n != "lact"])
def test_the_bound_leaves_ordinary_tokens_their_equation(name):
  """Before training it shortens no token, and no chunk to less than half."""
  memory, width = MIXERS[name], 64
  params, tokens = inputs(memory, memory.chunk, width)
  tail = memory.window - 1

  @jax.jit
  def limits(params, key, value, gate):
    own = prepare_heads(memory, params, jnp.float32)
    shared = {
      **prepare(memory, params, width, jnp.float32),
      **jax.tree.map(lambda leaf: leaf[0], own),
    }
    weights = working(memory, {n: w[0] for n, w in params["start"].items()})
    key, value = (jnp.pad(x, ((tail, 0), (0, 0))) for x in (key, value))
    factor = factors(memory, shared, weights, key, value, gate.threshold)
    table = memory.entries(width, width)
    c = coefficients(memory, shared, table, gate, jnp.int32(0), factor)
    return factor.clip[tail:], c.scale[-1]

  first_head = jax.tree.map(lambda leaf: leaf[0, :, 0], tokens[1:])
  clip, divisor = limits(params, *first_head)
  assert np.mean(np.asarray(clip) == 1) >= 0.9
  assert float(divisor) < DIVISORS.get(name, 2.0)


@pytest.mark.parametrize("name", ["atlas", "atlas_pp"])
def test_muons_momentum_outlives_chunks(name):
  """The bound lets it be as long as its gradients make it (Eq. 32-33)."""
  memory = dataclasses.replace(
    MIXERS[name],
    features=am.Polynomial(degree=2, key_width=4),
    optimizer=am.Muon(every=4),
    window=4,
    chunk=8,
  )
  free = dataclasses.replace(memory, bound=None)
  width = 8
  params, (query, key, value, gates) = inputs(memory, 4 * memory.chunk, width)
  # Errors as long as those of wider memories.
  tokens = query, key, 4 * value, gates
  run = lambda memory: jax.jit(
    lambda params, tokens: am.apply(memory, params, *tokens)
  )(params, tokens)
  got, want = run(memory), run(free)
  lengths = [
    float(jnp.linalg.norm(s, axis=(-2, -1)).max())
    for s in want.state.momentum.values()
  ]
  # Longer than a clipped gradient: such a cap would be seen.
  assert min(lengths) > 2 * width**0.5
  assert_close(got.state.momentum, want.state.momentum, 1e-5)
  assert_close(got.state.weights, want.state.weights, 1e-5)
  assert_close(got.y, want.y, 1e-5)
