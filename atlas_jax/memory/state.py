"""The recurrent state of a memory: one type for prefill, segment and step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.errors import UserError
from atlas_jax.memory.config import Memory, state_dtype
from atlas_jax.memory.gates import Gates
from atlas_jax.memory.numerics import safe_norm

Weights = dict[str, Float[Array, "B H n d"]]


class Pending(NamedTuple):
  """Tokens of the unfinished chunk, oldest first, zero beyond the count."""

  key: Float[Array, "B C-1 H K"]
  value: Float[Array, "B C-1 H V"]
  gates: Gates


class MemoryState(NamedTuple):
  """Everything that later tokens may depend on, at constant size.

  Attributes:
    weights, momentum: at the start of the unfinished chunk, weights as they are
      stored (see `retention`); momentum is an empty dict for optimizers without
      one.
    tail_key, tail_value: the window - 1 tokens before that chunk, without
      gates, whose gradients are taken anew at the current weights.
    seen: how many of the tail are real, counted from the newest.
    pending: the tokens of the unfinished chunk.
    count: how many of the pending slots are filled.
    cache: derived quantities that make `step` cheap, or None. Never needed:
      it is rebuilt from the rest.
  """

  weights: Weights
  momentum: Weights
  tail_key: Float[Array, "B W-1 H K"]
  tail_value: Float[Array, "B W-1 H V"]
  seen: Int[Array, "B"]
  pending: Pending
  count: Int[Array, "B"]
  cache: Any = None


def init_state(
  memory: Memory,
  params: dict[str, Any],
  batch: int,
  *,
  key_width: int | None = None,
  dtype=None,
) -> MemoryState:
  """A fresh memory for `batch` rows: learned start weights, nothing seen.

  Args:
    memory: the memory's value.
    params: its outer parameters (`init_params`).
    batch: number of rows.
    key_width: width of keys; needed only when it differs from that of values.
    dtype: type of the carry; default at least float32, float64 if the
      parameters are.
  """
  start = params["start"]
  heads, value_width = start[last_matrix(start)].shape[:2]
  width = key_width or value_width
  dtype = dtype or state_dtype(start[last_matrix(start)].dtype)
  weights = {
    name: jnp.broadcast_to(w.astype(dtype), (batch, *w.shape))
    for name, w in start.items()
  }
  momentum = {}
  if memory.has_momentum:
    momentum = jax.tree.map(jnp.zeros_like, weights)
  tail, slots = memory.window - 1, memory.chunk - 1

  def zeros(*shape: int) -> Array:
    return jnp.zeros((batch, *shape), dtype)

  gates = Gates(
    log_decay=zeros(slots, heads, memory.retention.groups),
    log_momentum=zeros(slots, heads),
    rate=zeros(slots, heads),
    window=zeros(slots, heads, memory.window),
    threshold=zeros(slots, heads) if memory.objective.gated else None,
    matrix_rate=zeros(slots, heads, len(start)) if memory.steps_once else None,
  )
  return MemoryState(
    weights=weights,
    momentum=momentum,
    tail_key=zeros(tail, heads, width),
    tail_value=zeros(tail, heads, value_width),
    seen=jnp.zeros((batch,), jnp.int32),
    pending=Pending(
      zeros(slots, heads, width), zeros(slots, heads, value_width), gates
    ),
    count=jnp.zeros((batch,), jnp.int32),
  )


def check_state(
  memory: Memory,
  params: dict[str, Any],
  state: MemoryState,
  batch: int,
  key_width: int,
) -> None:
  """Refuses a state of another memory, of other widths or rows.

  A state of another chunk or window would be read at the wrong places.

  Raises:
    UserError: names the first part that does not fit.
  """
  wanted = jax.eval_shape(
    lambda: init_state(
      memory,
      params,
      batch,
      key_width=key_width,
      dtype=state.tail_key.dtype,
    )
  )
  have, want = (
    {
      jax.tree_util.keystr(path): (jnp.shape(leaf), jnp.result_type(leaf).name)
      for path, leaf in jax.tree_util.tree_leaves_with_path(
        x._replace(cache=None)
      )
    }
    for x in (state, wanted)
  )
  for name in sorted({*have, *want}):
    if have.get(name) != want.get(name):
      raise UserError(
        f"the state does not belong to this memory and these inputs: {name} is "
        f"{have.get(name, 'absent')} but must be {want.get(name, 'absent')}"
      )


def last_matrix(start: dict[str, Any]) -> str:
  """Name of the matrix whose rows are the value channels."""
  return "matrix" if "matrix" in start else "out"


def reset(
  memory: Memory,
  params: dict[str, Any],
  state: MemoryState,
  rows: Bool[Array, "B"],
) -> MemoryState:
  """Makes the named rows fresh; all others stay as they are to the bit."""
  state = state._replace(cache=None)
  fresh = init_state(
    memory,
    params,
    state.count.shape[0],
    key_width=state.tail_key.shape[-1],
    dtype=state.tail_key.dtype,
  )

  def choose(new: Array, old: Array) -> Array:
    return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)

  return jax.tree.map(choose, fresh, state)


def norm(weights: Weights) -> Float[Array, "B H"]:
  """Frobenius norm of all weights of each head (of `state.weights`)."""
  norms = [safe_norm(w, (-2, -1))[..., 0] for w in jax.tree.leaves(weights)]
  return safe_norm(jnp.concatenate(norms, -1), -1)[..., 0]
