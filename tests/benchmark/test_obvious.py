"""The baselines compute what the library computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax import memory as am
from atlas_jax.benchmark import layer, obvious

SHAPE = layer.Shape(dim=16, heads=2, chunk=4)


def setup(window: int, rate: float):
  """A memory, its inputs, and a rate at which the bound's budget matters."""
  memory = layer.memory_of(SHAPE, window)
  params = layer.init(jax.random.key(0), SHAPE, memory)
  x = jax.random.normal(jax.random.key(1), (2, 8, SHAPE.dim))
  query, key, value, gates = layer.inputs(params, x, SHAPE.heads)
  gates = gates._replace(rate=rate * gates.rate)
  return memory, (params["memory"], query, key, value, gates)


def assert_equal(found, wanted, args):
  """Same outputs and same gradients of all inputs and start weights."""

  def both(function):
    run = lambda args: (jnp.sum(jnp.sin(y := function(*args))), y)
    return jax.tree.leaves(jax.jit(jax.grad(run, has_aux=True))(args))

  for one, two in zip(both(found), both(wanted), strict=True):
    scale = np.max(np.abs(two)) + 1e-6
    np.testing.assert_allclose(one, two, atol=2e-5 * scale)


def test_materialised_equals_the_library():
  memory, args = setup(window=3, rate=20.0)
  ours = lambda *args: am.apply(memory, *args).y
  assert_equal(lambda *a: obvious.materialised(memory, *a), ours, args)


def test_the_budget_matters_where_the_baselines_are_compared():
  memory, args = setup(window=3, rate=20.0)
  bound = dataclasses.replace(memory.bound, budget=None)
  loose = dataclasses.replace(memory, bound=bound)
  one, two = (
    jax.jit(lambda *args, memory=memory: am.apply(memory, *args).y)(*args)
    for memory in (memory, loose)
  )
  assert not np.allclose(one, two, rtol=0.01)


def test_token_scan_equals_the_library_at_chunk_1():
  memory, args = setup(window=3, rate=20.0)
  exact = dataclasses.replace(memory, chunk=1)
  ours = lambda *args: am.apply(exact, *args).y
  assert_equal(lambda *a: obvious.token_scan(memory, *a), ours, args)


def test_materialised_with_a_window_of_one_token():
  memory, args = setup(window=1, rate=20.0)
  wanted = jax.jit(lambda *args: am.apply(memory, *args).y)(*args)
  found = jax.jit(lambda *a: obvious.materialised(memory, *a))(*args)
  np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_attention_in_blocks_equals_jax():
  keys = jax.random.split(jax.random.key(0), 3)
  args = [jax.random.normal(key, (2, 200, 2, 8)) for key in keys]
  wanted = jax.nn.dot_product_attention(*args, is_causal=True)
  memory = layer.memory_of(SHAPE, 1)
  for method in (layer.ATTENTION, layer.BLOCKED):
    found = layer.core_of(method, memory)(None, *args, None)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
