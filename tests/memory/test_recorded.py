"""Against recorded outputs of other implementations (`reference/README.md`)."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from tests.memory.cases import assert_close

pytestmark = pytest.mark.usefixtures("x64")

REFERENCE = pathlib.Path(__file__).parent / "reference"
NETWORKS = {
  "linear": am.MLP(depth=1, layer_norm=True),
  "mlp": am.MLP(layer_norm=True, bias=True),
}


def ttt_params(name, recorded):
  """Our parameters from theirs: outputs first, biases as last columns."""
  matrices = {"linear": ("out",), "mlp": ("in", "out")}[name]
  start = {}
  for i, matrix in enumerate(matrices):
    kernel = recorded[f"{name}_ttt_dense_{i}"]
    bias = recorded[f"{name}_ttt_bias_{i}"]
    start[matrix] = np.swapaxes(np.concatenate([kernel, bias], axis=1), 1, 2)
  norm = {
    "scale": recorded[f"{name}_ttt_norm_scale"],
    "offset": recorded[f"{name}_ttt_norm_bias"],
  }
  position = recorded[f"{name}_position"]
  params = {"start": start, "norm": norm, "position": position, "features": {}}
  return jax.tree.map(jnp.asarray, params)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", NETWORKS)
def test_ttt_is_its_authors(name, implementation):
  memory = am.Memory(
    am.Identity(bias=True),
    NETWORKS[name],
    objective=am.L2(factor=0.5),
    optimizer=am.GradientDescent(),
    retention=am.NoRetention(),
    window=1,
    chunk=16,
    bound=None,
    rate_by_position=True,
  )
  recorded = np.load(REFERENCE / "ttt.npz")
  rate = jnp.asarray(recorded[f"{name}_rate"])
  gates = am.Gates(
    log_decay=jnp.zeros((*rate.shape, 0)),
    log_momentum=jnp.zeros_like(rate),
    rate=rate,
    window=jnp.ones((*rate.shape, 1)),
  )
  vectors = [jnp.asarray(recorded[n]) for n in ("query", "key", "value")]
  run = functools.partial(am.apply, memory, implementation=implementation)
  params = ttt_params(name, recorded)
  y = jax.jit(run)(params, *vectors, gates).y
  # Their 1 / i is rounded to float32, and so is their slope of GELU.
  assert_close(y, jnp.asarray(recorded[f"{name}_output"]), 1e-6)
  # The descent matters: without it the outputs are others.
  still = jax.jit(run)(params, *vectors, gates._replace(rate=0 * rate)).y
  assert float(jnp.linalg.norm(still - y)) > 0.01 * float(jnp.linalg.norm(y))
