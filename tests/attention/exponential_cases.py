"""Small memories over exponential features, their inputs, and calls of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax import memory as am
from atlas_jax.attention import exponential as ex
from tests.layers.helpers import jit

BATCH, LENGTH, HEADS, KEYS, WIDTH = 2, 11, 4, 2, 4

# Every part of the definition in at least two of them; windows reach over a
# chunk, and over several.
CASES = {
  "plain": ex.ExponentialMemory(expansion=2.0),
  "window": ex.ExponentialMemory(expansion=2.0, window=3),
  "attends": ex.ExponentialMemory(
    expansion=2.0, attends=True, chunk=4, window=2
  ),
  "dot": ex.ExponentialMemory(
    objective=am.L2(), expansion=2.0, window=3, chunk=4, error_clip=1.0
  ),
  "swdt": ex.ExponentialMemory(expansion=2.0, window=5, chunk=2),
  "bare": ex.ExponentialMemory(expansion=2.0, window=2, normalised=False),
  "bare_dot": ex.ExponentialMemory(
    objective=am.L2(),
    expansion=2.0,
    chunk=3,
    normalised=False,
    error_clip=0.5,
  ),
  "linear": ex.ExponentialMemory(
    objective=am.L2(), linear=True, chunk=2, window=3, error_clip=1.0
  ),
}


def inputs_of(memory, length=LENGTH, batch=BATCH, seed=0, scale=1.0):
  """Random vectors and gates, float64."""
  random = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(scale * random.standard_normal(shape))
  share = lambda *shape: jnp.asarray(random.uniform(0.2, 1.0, shape))
  queries, keys = (batch, length, HEADS, WIDTH), (batch, length, KEYS, WIDTH)
  inputs = ex.Inputs(
    normal(*queries),
    normal(*keys),
    normal(*keys),
    0.7 * normal(*queries),
    0.7 * normal(*keys),
  )
  gates = am.Gates(
    log_decay=jnp.log(share(*keys[:3], 1)),
    log_momentum=jnp.zeros(keys[:3]),
    rate=0.3 * share(*keys[:3]),
    window=share(*keys[:3], memory.window),
  )
  return inputs, gates


def params_of(memory):
  """Starting weights with nothing special about them, float64."""
  params = ex.init_params(
    jax.random.key(0), memory, KEYS, WIDTH, jnp.float64, key_length=2.0
  )
  random = np.random.default_rng(1)
  noisy = lambda x: x + 0.1 * jnp.asarray(random.standard_normal(x.shape))
  return jax.tree.map(noisy, params)


def output(memory, params, inputs, gates, state=None, implementation="xla"):
  """The output; lam is 0.7 where there is one."""
  lam = 0.7 if memory.attends else 1.0
  return ex.apply(
    memory, params, inputs, gates, state, lam=lam, implementation=implementation
  )


call = jit(output, static_argnames=("memory", "implementation"))


@functools.partial(jit, static_argnames=("memory", "implementation"))
def slopes(memory, params, tokens, implementation="xla"):
  """Gradients by everything, and the output."""

  def total(params, tokens):
    out = output(memory, params, *tokens, None, implementation)
    return jnp.sum(jnp.sin(out.y)), out

  return jax.grad(total, argnums=(0, 1), has_aux=True)(params, tokens)


@functools.partial(jit, static_argnames="memory")
def step(memory, params, inputs, gates, state):
  """One token."""
  lam = 0.7 if memory.attends else 1.0
  return ex.step(memory, params, inputs, gates, state, lam=lam)


def cut(tree, start, end):
  """Tokens from start to end."""
  return jax.tree.map(lambda x: x[:, start:end], tree)
