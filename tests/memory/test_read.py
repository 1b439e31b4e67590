"""Reading at fixed weights against the definition with writing shut off."""

import jax
import jax.numpy as jnp
import pytest

from atlas_jax import memory as am
from atlas_jax.memory.read import read
from tests.layers.helpers import assert_close, jit
from tests.memory.calls import call
from tests.memory.cases import make_params, make_tokens
from tests.memory.memories import MEMORIES

NAMES = (
  "atlas",
  "atlas_pp_sketch_channels",
  "titans",
  "logarithms_switched",
  "lact",
)


@pytest.mark.parametrize("name", NAMES)
def test_reading_is_the_memory_without_its_writes(name):
  memory = MEMORIES[name]
  with jax.enable_x64(True):
    params, tokens = make_params(memory), make_tokens(memory, length=9)
    state = call(memory, params, tokens).state
    size = memory.chunk - 1
    state = state._replace(
      count=jnp.zeros_like(state.count),
      pending=jax.tree.map(jnp.zeros_like, state.pending),
      momentum=jax.tree.map(jnp.zeros_like, state.momentum),
    )
    shut = tokens.gates._replace(
      log_decay=jnp.zeros_like(tokens.gates.log_decay),
      rate=jnp.zeros_like(tokens.gates.rate),
      matrix_rate=jax.tree.map(jnp.zeros_like, tokens.gates.matrix_rate),
    )
    first = jax.tree.map(lambda x: x[:, :size], tokens._replace(gates=shut))
    expected = jit(
      lambda params, tokens, state: am.apply(
        memory, params, *tokens, state=state, implementation="reference"
      )
    )(params, first, state)
    y = jit(lambda *arguments: read(memory, *arguments))(
      params, first.query, state.weights
    )
    assert y.dtype == jnp.float64
    assert_close(y, expected.y, 1e-10)
