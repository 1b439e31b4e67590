"""Reading a memory without writing to it."""

from typing import Any

import jax
from jaxtyping import Array, Float

from atlas_jax.memory.config import Memory
from atlas_jax.memory.factors import plain, prepare, prepare_heads, working
from atlas_jax.memory.state import Weights, last_matrix


def read(
  memory: Memory,
  params: dict[str, Any],
  query: Float[Array, "B T H K"],
  weights: Weights,
) -> Float[Array, "B T H V"]:
  """What a memory answers to queries at fixed weights.

  Args:
    memory: the memory's value.
    params: its outer parameters (`init_params`).
    query: of any floating-point type.
    weights: as a state holds them: `state.weights` are those of the start of
      the unfinished chunk.

  Returns:
    read-outs in the type of the weights, at least float32.
  """
  kept = weights[last_matrix(weights)]
  query = query.astype(kept.dtype)
  shared = prepare(memory, params, query.shape[-1], kept.dtype)
  own = prepare_heads(memory, params, kept.dtype)
  table = memory.entries(query.shape[-1], kept.shape[-2])

  def one_head(own, query: Float[Array, "T K"], weights):
    outer = {**shared, **own}
    linear = plain(outer, table, working(memory, weights))
    return memory.network.apply(linear, query, memory.features, outer)

  one_row = jax.vmap(one_head, in_axes=(0, 1, 0), out_axes=1)
  return jax.vmap(one_row, in_axes=(None, 0, 0))(own, query, weights)
