"""What the tests of layers and models share."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import memory as am
from atlas_jax.layers.initial import Draws, draw_once

Module = TypeVar("Module", bound=nnx.Module)

# Tests compile more than they run: most of the time goes into optimising.
jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)

# One small memory for each row of the paper's table that is a mixer. A window
# of 5 reaches over chunks of 4.
FEATURES = am.Polynomial(degree=2, key_width=4)
MEMORIES = {
  "atlas": am.Memory(
    features=FEATURES,
    network=am.MLP(expansion=2.0),
    optimizer=am.Muon(every=2, steps=2, epsilon=1e-2),
    window=5,
    chunk=4,
  ),
  "atlas_pp": am.Memory(
    features=FEATURES,
    network=am.GatedMLP(expansion=2.0),
    optimizer=am.Muon(every=4, steps=2, epsilon=1e-2),
    window=3,
    chunk=8,
  ),
  "omeganet": am.Memory(
    features=FEATURES,
    network=am.MLP(expansion=2.0),
    optimizer=am.GradientDescent(),
    window=5,
    chunk=4,
  ),
  "titans": am.Memory(
    features=am.Identity(),
    network=am.MLP(expansion=2.0),
    optimizer=am.Momentum(),
    window=1,
    chunk=8,
  ),
}

# The one with most parts and the one with fewest; the others in `make
# test-full`.
SOME = [
  pytest.param(
    name, marks=() if name in ("atlas", "titans") else pytest.mark.full
  )
  for name in MEMORIES
]


def tolerance(memory: am.Memory) -> float:
  """Largest relative error between two ways to compute the same."""
  return 1e-4 if memory.orthogonalises else 1e-5


def made(build: Callable[[Draws], Module]) -> Module:
  """A module made from one draw, compiled as a whole."""
  return jit(lambda key: draw_once(build, key))(jax.random.key(0))


def randomised(module: Module, scale: float = 0.3) -> Module:
  """The module with noise on every parameter, so that nothing is special."""
  random = np.random.default_rng(1)
  graph, params = nnx.split(module)

  def noisy(leaf):
    noise = scale * random.standard_normal(leaf.shape)
    return leaf + jnp.asarray(noise, leaf.dtype)

  return nnx.merge(graph, jax.tree.map(noisy, nnx.to_pure_dict(params)))


def assert_close(actual, expected, tolerance: float) -> None:
  """Trees agree relative to the largest entry of each expected leaf."""
  flat, tree = jax.tree_util.tree_flatten_with_path(expected)
  assert jax.tree.structure(actual) == tree
  for (path, want), have in zip(flat, jax.tree.leaves(actual), strict=True):
    want, have = np.asarray(want, np.float64), np.asarray(have, np.float64)
    assert have.shape == want.shape, path
    scale = max(1e-3, np.max(np.abs(want), initial=0.0))
    np.testing.assert_allclose(
      have / scale, want / scale, rtol=0, atol=tolerance, err_msg=str(path)
    )


def finite(tree) -> bool:
  """Whether every number of a tree is finite."""
  return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))
