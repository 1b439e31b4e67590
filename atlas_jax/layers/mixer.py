"""What every mixer is: one interface from prompt to token, for any family.

A mixer maps [B, T, D] to [B, T, D], lets each token see those before it and
hands on a state. Any split of a sequence into calls and steps gives the same
numbers; padding and packed documents are invisible.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement, arrange


class MixerOutput(NamedTuple):
  """What a mixer gives.

  Attributes:
    y: Outputs in x's type; 0 at padding.
    state: The state after the last token; None for aligned documents.
    metrics: float32 scalars, means over valid tokens and heads, each under its
      own name; which ones there are depends on the mixer.
  """

  y: Float[Array, "B T D"]
  state: Any
  metrics: dict[str, Float[Array, ""]]


class Mixer(nnx.Module):
  """A layer that mixes tokens.

  A subclass sets `dim` and implements `init_state` and `mix`; `step` is a call
  on one token unless it has a better way. States are trees of arrays whose
  first axis is the row.

  Attributes:
    dim: Width D of inputs and outputs.
    chunk: Tokens that must not be shared by two documents: aligned documents
      start at multiples of it. 1 for mixers that take documents anywhere.
    longest: Tokens of the longest document, later ones being NaN; None: any.
  """

  dim: int
  chunk: int = 1
  longest: int | None = None

  def init_state(self, batch: int) -> Any:
    """The state of `batch` rows before their first token."""
    raise NotImplementedError

  def mix(
    self, x: Float[Array, "B T D"], state: Any, arrangement: Arrangement
  ) -> MixerOutput:
    """Mixes arranged tokens, x being 0 at padding.

    Args:
      x: Inputs; any float type.
      state: Where to go on; None is a fresh start.
      arrangement: Where padding and documents are.
    """
    raise NotImplementedError

  def __call__(
    self,
    x: Float[Array, "B T D"],
    *,
    state: Any = None,
    mask: Bool[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    max_segments: int | None = None,
    aligned: bool = False,
    arrangement: Arrangement | None = None,
  ) -> MixerOutput:
    """Mixes a sequence, or the next part of one.

    Args:
      x: Inputs; any float type.
      state: Where to go on; None is a fresh start.
      mask, segment_ids, max_segments, aligned: Padding and documents, see
        `arrange`.
      arrangement: The same, worked out once for many layers; x is then
        arranged already, and y is.

    Returns:
      Outputs, the state after the last token, and metrics.

    Raises:
      UserError: Arguments that contradict each other.
    """
    self.check_inputs(x)
    self.check_state(state, x.shape[0])
    if arrangement is not None:
      if mask is not None or segment_ids is not None or aligned:
        raise UserError(
          "an arrangement already holds mask and documents: give it alone"
        )
      return self.mix(x, state, arrangement)
    batch, length = x.shape[:2]
    arrangement = arrange(
      batch,
      length,
      self.counts(state),
      continues=state is not None,
      mask=mask,
      segment_ids=segment_ids,
      max_segments=max_segments,
      aligned=aligned,
    )
    out = self.mix(arrangement.gather(x), state, arrangement)
    return out._replace(y=arrangement.scatter(out.y))

  def step(
    self,
    x: Float[Array, "B D"],
    state: Any,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], Any]:
    """Mixes one token per row.

    Args:
      x: Inputs; any float type.
      state: The state before the token. One from `prepare` or from another
        step comes back with the same type; any other is prepared first.
      valid: Rows that have a token; the others stay as they are. None is all.

    Returns:
      Outputs (0 in rows without a token), and the state after the token.
    """
    self.check_step(x, state, valid)
    arrangement = Arrangement()
    if valid is not None:
      x = jnp.where(valid[:, None], x, jnp.zeros((), x.dtype))
      arrangement = Arrangement(
        valid=valid[:, None], lengths=valid.astype(jnp.int32)
      )
    out = self.mix(x[:, None], state, arrangement)
    y = out.y[:, 0]
    if valid is not None:
      y = jnp.where(valid[:, None], y, jnp.zeros((), y.dtype))
    return y, out.state

  def counts(self, state: Any) -> dict[int, Int[Array, "B"] | None]:
    """By chunk of its memories, the tokens in the unfinished chunk.

    Args:
      state: The state; None: a fresh start, for which counts are None.
    """
    del state
    return {}

  def prepare(self, state: Any) -> Any:
    """Adds to a state what `step` needs, derived from the rest of it.

    Calls take a state with or without it and return one without.
    """
    return state

  def unprepare(self, state: Any) -> Any:
    """Takes from a state what only steps need."""
    return state

  def capacity(self, state: Any) -> int | None:
    """Tokens for which a growing state has room; None: constant size."""
    del state
    return None

  def resize(self, state: Any, capacity: int) -> Any:
    """A growing state with room for this many tokens; others as they are.

    Room that is taken away must be empty: a row that held more gives NaN from
    then on.
    """
    del capacity
    return state

  def fresh_like(self, state: Any, batch: int) -> Any:
    """The state of `batch` fresh rows with the room of another state.

    Args:
      state: As it is from a call; growing parts may have different rooms.
      batch: Rows.
    """
    fresh, room = self.init_state(batch), self.capacity(state)
    return fresh if room is None else self.resize(fresh, room)

  def carry_size(self, length: int) -> int:
    """Numbers per row kept from chunk to chunk for the backward pass.

    Args:
      length: Tokens per row.
    """
    del length
    return 0

  def reset(self, state: Any, rows: Bool[Array, "B"]) -> Any:
    """Makes the rows marked True fresh and leaves all others as they are.

    The state comes back as it is from a call, to be prepared anew for steps.
    """
    state = self.unprepare(state)
    fresh = self.fresh_like(state, rows.shape[0])

    def choose(new: Array, old: Array) -> Array:
      return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, fresh, state)

  def check_inputs(self, x: Array) -> None:
    """Refuses inputs that are no floating-point [B, T, D].

    Raises:
      UserError: says what x is and what it must be.
    """
    shape = cast(tuple[int, ...], jnp.shape(x))
    if len(shape) != 3 or shape[-1] != self.dim:
      raise UserError(f"x is {shape} but must be [B, T, {self.dim}]")
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise UserError(f"x is {x.dtype}: give floating-point inputs")

  def check_step(
    self, x: Array, state: Any, valid: Bool[Array, "B"] | None
  ) -> None:
    """Refuses what is no token per row, or no state of so many rows.

    Raises:
      UserError: says what does not fit.
    """
    self.check_inputs(x[:, None])
    self.check_state(state, x.shape[0])
    if valid is not None and (
      valid.shape != x.shape[:1] or valid.dtype != jnp.bool_
    ):
      raise UserError(
        f"valid is {valid.dtype}{list(valid.shape)} but must be "
        f"bool[{x.shape[0]}]"
      )

  def check_state(self, state: Any, batch: int) -> None:
    """Refuses a state of another layer or another number of rows.

    Raises:
      UserError: names the first array that differs.
    """
    if state is None:
      return
    try:
      state = self.unprepare(state)
      fresh = jax.eval_shape(lambda: self.fresh_like(state, batch))
    except (AttributeError, IndexError, TypeError, ValueError) as error:
      raise UserError(
        f"the state, a {type(state).__name__}, does not belong to this layer"
      ) from error
    want = jax.tree_util.tree_leaves_with_path(fresh)
    have = jax.tree_util.tree_leaves_with_path(state)
    known = {path: leaf.shape for path, leaf in have}
    for path, leaf in want:
      if len(have) != len(want) or known.get(path) != leaf.shape:
        raise UserError(
          "the state does not belong to this layer and these inputs: "
          f"{jax.tree_util.keystr(path)} is {known.get(path)} but must be "
          f"{leaf.shape}"
        )


def shortest(lengths: Iterable[int | None]) -> int | None:
  """The smallest of the numbers that are there."""
  return min((x for x in lengths if x is not None), default=None)


def mean_over_valid(
  x: Float[Array, "B T ..."], valid: Bool[Array, "B T"] | None
) -> Float[Array, ""]:
  """The mean over tokens that are no padding, as a metric: without gradient."""
  x = jax.lax.stop_gradient(x).astype(jnp.float32)
  if valid is None:
    return jnp.mean(x)
  kept = valid.reshape(*valid.shape, *[1] * (x.ndim - 2))
  count = jnp.sum(valid, dtype=jnp.float32) * (x.size // valid.size)
  return jnp.sum(jnp.where(kept, x, 0.0)) / jnp.maximum(count, 1.0)
