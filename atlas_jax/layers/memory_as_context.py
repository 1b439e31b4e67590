"""Memory as context: attention to what a memory recalls (Titans, MAC).

A text is read segment by segment. For every token the memory, as it stood at
the segment's start, is asked; attention mixes the answers and the segment's own
tokens; what comes out is written into the memory, which gates it in turn.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from atlas_jax import attention as aa
from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.gated_product import GatedProduct
from atlas_jax.layers.initial import Source
from atlas_jax.layers.mixer import Mixer, MixerOutput
from atlas_jax.layers.recall import Recall
from atlas_jax.layers.rows import choose_rows
from atlas_jax.layers.segment_attention import SegmentAttention
from atlas_jax.layers.segments import Segments, cut
from atlas_jax.memory import dispatch


class SegmentCache(NamedTuple):
  """What steps need of the unfinished segment, derived from its tokens.

  Attributes:
    memory: After the last token, ready for a step.
    entries: Keys and values of what was recalled, S places, and of the tokens,
      S more; anything behind the last token.
  """

  memory: Any
  entries: aa.Entries


class MemoryAsContextState(NamedTuple):
  """What later tokens need, at constant size.

  Attributes:
    memory: At the start of the unfinished segment: what is asked.
    pending: The inputs of that segment, oldest first, zero beyond the count.
    count: How many there are.
    cache: Only between steps, else None.
  """

  memory: Any
  pending: Float[Array, "B S-1 D"]
  count: Int[Array, "B"]
  cache: SegmentCache | None = None


class MemoryAsContext(Mixer):
  """`y = attention([p; h; x]), o = output(RMSNorm(y) * SiLU(RMSNorm(M(y))))`.

  arXiv 2501.00663, Eq. 21-25, token by token. Token i of a segment sees the
  persistent tokens p, and of its segment the recalled rows h_j and the tokens
  x_j with j <= i. h_j is what the memory, as it was when the segment began,
  answers to x_j (see `Recall`); it has the position of x_j in the segment, and
  p has none. The memory is a whole layer that reads y; its running state gates
  y as in `MemoryAsGate`. Metrics are the memory's, means over tokens.

  Segments start with the document. Splits, steps and documents give the numbers
  of one call.

  Args:
    attention: Attention in parts, without a window.
    memory: Any `MemoryMixer`, or a mixer whose memory is a matrix that can be
      asked, see `Recall`.
    segment: S, a multiple of the memory's chunk.
    norm_epsilon: Of the norms.
    scale: Factor on the starting weights of the layer's own projections.
    output_scale: Further factor on those of the last one.
    dtype: Type of activations.
    param_dtype: Type of the parameters.
    implementation: "xla", "reference" (token by token), or "auto", which is
      "xla".
    rngs: Source of the starting weights.

  Raises:
    UserError: Parts that do not fit together.
  """

  def __init__(
    self,
    attention: SegmentAttention,
    memory: Mixer,
    *,
    segment: int = 256,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    if attention.dim != memory.dim:
      raise UserError(
        f"attention of width {attention.dim} and a memory of width "
        f"{memory.dim}: make them equal"
      )
    if attention.window:
      raise UserError("memory as context attends to whole segments: no window")
    if segment < 1 or segment % memory.chunk:
      raise UserError(
        f"a segment of {segment} tokens is no multiple of the memory's chunk "
        f"of {memory.chunk}: make it one, or the chunk smaller"
      )
    self.dim = memory.dim
    self.chunk = segment
    self.dtype = jnp.dtype(dtype)
    self.implementation = dispatch.resolve(implementation)
    self.attention = attention
    self.memory = memory
    self.recall = Recall(
      memory,
      norm_epsilon=norm_epsilon,
      scale=scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.product = GatedProduct(
      self.dim,
      norm_epsilon=norm_epsilon,
      scale=scale * output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def init_state(self, batch: int) -> MemoryAsContextState:
    """The state of `batch` rows before their first token."""
    return MemoryAsContextState(
      self.memory.init_state(batch),
      jnp.zeros((batch, self.chunk - 1, self.dim), self.dtype),
      jnp.zeros((batch,), jnp.int32),
    )

  def counts(
    self, state: MemoryAsContextState | None
  ) -> dict[int, Int[Array, "B"] | None]:
    """The tokens in the unfinished segment."""
    return {self.chunk: None if state is None else state.count}

  def carry_size(self, length: int) -> int:
    """The memory's carry for each of its chunks, and for each segment."""
    segments = -(-length // self.chunk)
    return self.memory.carry_size(length) + segments * self.memory.carry_size(1)

  def prepare(self, state: MemoryAsContextState) -> MemoryAsContextState:
    """Adds what steps need, by reading the unfinished segment again."""
    if self.implementation == "reference":
      return state
    x = jnp.pad(state.pending, ((0, 0), (0, 1), (0, 0)))
    y, entries = self._attended(x, state.memory)
    out = self._written(y, state.memory, state.count)
    cache = SegmentCache(self.memory.prepare(out.state), entries)
    return state._replace(cache=cache)

  def unprepare(self, state: MemoryAsContextState) -> MemoryAsContextState:
    """Takes from a state what only steps need."""
    return state._replace(cache=None)

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: MemoryAsContextState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    kind = x.dtype
    x = x.astype(self.dtype)
    aligned = arrangement.segment_ids is not None
    before = self.init_state(x.shape[0]) if state is None else state
    if self.implementation == "reference":
      y, after = self._definition(x, self.unprepare(before), arrangement)
      metrics = {}
    else:
      layout = arrangement.layout(self.chunk)
      slots, segments = cut(x, before.pending, arrangement, self.chunk)
      memory, y, metrics = self._scan(before.memory, segments)
      if layout is None:
        y, after = y[:, : x.shape[1]], None
        if not aligned:
          after = self._left(x, memory)
      else:
        y = am.layout.from_slots(layout, y)
        pending = am.layout.left_over(layout, slots)
        after = MemoryAsContextState(memory, pending, layout.count)
        if layout.fits is not None:
          # Too many documents, found inside jit.
          y = jnp.where(layout.fits[:, None, None], y, jnp.nan)
    if arrangement.valid is not None:
      y = jnp.where(arrangement.valid[..., None], y, jnp.zeros((), y.dtype))
    return MixerOutput(y.astype(kind), None if aligned else after, metrics)

  def step(
    self,
    x: Float[Array, "B D"],
    state: MemoryAsContextState,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], MemoryAsContextState]:
    """Mixes one token per row, see `Mixer.step`."""
    if self.implementation == "reference":
      return super().step(x, state, valid=valid)
    self.check_step(x, state, valid)
    if state.cache is None:
      state = self.prepare(state)
    assert state.cache is not None
    if valid is None:
      valid = jnp.ones(x.shape[:1], bool)
    now = jnp.where(valid[:, None], x, jnp.zeros((), x.dtype))
    now = now.astype(self.dtype)
    position = state.count[:, None]
    new = self._rows(now[:, None], position, state.memory)
    place = jnp.arange(self.chunk, dtype=jnp.int32)[None]
    place = jnp.concatenate([place, place], axis=1)
    here = (place == position) & valid[:, None]

    def put(old: Array, new: Array) -> Array:
      """The two new rows where their token stands."""
      new = jnp.repeat(new, self.chunk, axis=1)
      return jnp.where(here[..., None, None], new, old)

    entries = jax.tree.map(put, state.cache.entries, new)
    y = self.attention.over(
      now[:, None], position, entries, (place <= position)[:, None]
    )[:, 0]
    y = jnp.where(valid[:, None], y, jnp.zeros((), y.dtype))
    m, running = self.memory.step(y, state.cache.memory, valid=valid)
    out = self.product(y, m.astype(y.dtype)).astype(x.dtype)
    out = jnp.where(valid[:, None], out, jnp.zeros((), out.dtype))

    count = state.count + valid.astype(jnp.int32)
    full = count == self.chunk
    # Not a choice at every token: it would write all weights.
    memory = jax.lax.cond(
      jnp.any(full),
      lambda new, old: choose_rows(full, self.memory.unprepare(new), old),
      lambda new, old: old,
      running,
      state.memory,
    )
    here = here[:, : self.chunk - 1, None]
    pending = jnp.where(here, now[:, None], state.pending)
    pending = jnp.where(
      full[:, None, None], jnp.zeros((), pending.dtype), pending
    )
    after = MemoryAsContextState(
      memory,
      pending,
      jnp.where(full, 0, count),
      SegmentCache(running, entries),
    )
    return out, after

  def _scan(
    self, memory: Any, segments: Segments
  ) -> tuple[Any, Float[Array, "B n*S D"], dict[str, Float[Array, ""]]]:
    """Segment by segment: the memory after the last whole one, and outputs."""
    batch = segments.x.shape[1]
    fresh = self.memory.init_state(batch)
    # Its scores are as many as those of attention to 2 S tokens, at any T.
    attended = jax.checkpoint(
      lambda x, memory: self._attended(x, memory)[0], prevent_cse=False
    )

    def one(memory: Any, segment: Segments):
      x, lengths, restart = segment
      if restart is not None:
        memory = choose_rows(restart, fresh, memory)
      y = attended(x, memory)
      out = self._written(y, memory, lengths)
      y = self.product(y, out.y.astype(y.dtype))
      tokens, after = jnp.float32(batch * self.chunk), out.state
      if lengths is not None:
        tokens = jnp.sum(lengths).astype(jnp.float32)
        after = choose_rows(lengths == self.chunk, after, memory)
      weighted = {name: tokens * value for name, value in out.metrics.items()}
      return after, (y, weighted, tokens)

    memory, (y, metrics, tokens) = jax.lax.scan(one, memory, segments)
    count = jnp.maximum(jnp.sum(tokens), 1.0)
    metrics = {name: jnp.sum(v) / count for name, v in metrics.items()}
    y = jnp.moveaxis(y, 0, 1).reshape(batch, -1, self.dim)
    return memory, y, metrics

  def _attended(
    self, x: Float[Array, "B S D"], memory: Any
  ) -> tuple[Float[Array, "B S D"], aa.Entries]:
    """Attention of a segment from its start, and its keys and values."""
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    entries = self._rows(x, place, memory)
    seen = jnp.concatenate([place, place], axis=1)[:, None] <= place[..., None]
    return self.attention.over(x, place, entries, seen), entries

  def _rows(
    self, x: Float[Array, "B T D"], position: Int[Array, "#B T"], memory: Any
  ) -> aa.Entries:
    """Keys and values of what is recalled for tokens, then of the tokens."""
    recalled = self.attention.entries(
      self.recall(self.memory, memory, x), position
    )
    own = self.attention.entries(x, position)
    return jax.tree.map(
      lambda *rows: jnp.concatenate(rows, axis=1), recalled, own
    )

  def _written(
    self, y: Float[Array, "B S D"], memory: Any, lengths: Array | None
  ) -> MixerOutput:
    """Writes a segment from its start into the memory, as far as it goes."""
    batch, size = y.shape[:2]
    valid = None
    if lengths is not None:
      valid = jnp.arange(size, dtype=jnp.int32)[None] < lengths[:, None]
      y = jnp.where(valid[..., None], y, jnp.zeros((), y.dtype))
    # No chunk of the memory is open: counts would only cost empty slots.
    layouts = {
      chunk: am.layout.plan(size, chunk, batch, lengths=lengths)
      for chunk in self.memory.counts(None)
    }
    arrangement = Arrangement(
      layouts=layouts or None, valid=valid, lengths=lengths
    )
    return self.memory.mix(y, memory, arrangement)

  def _left(self, x: Float[Array, "B T D"], memory: Any):
    """The state after tokens from a document's start on."""
    batch, length = x.shape[:2]
    left = length % self.chunk
    pending = x[:, length - left :]
    hole = self.chunk - 1 - left
    return MemoryAsContextState(
      memory,
      jnp.pad(pending, ((0, 0), (0, hole), (0, 0))),
      jnp.full((batch,), left, jnp.int32),
    )

  def _definition(
    self,
    x: Float[Array, "B T D"],
    state: MemoryAsContextState,
    arrangement: Arrangement,
  ) -> tuple[Float[Array, "B T D"], MemoryAsContextState]:
    """Token by token, those of the unfinished segment once more."""
    batch, length = x.shape[:2]
    size, open_ = self.chunk, self.chunk - 1
    fresh = self.memory.init_state(batch)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    restart, valid = arrangement.restart, arrangement.valid
    if restart is None:
      restart = jnp.zeros((batch, length), bool)
    if valid is None:
      valid = jnp.ones((batch, length), bool)

    def token(carry, inputs):
      asked, running, recalled, own, count = carry
      x, begins, counts = inputs
      asked = choose_rows(begins, fresh, asked)
      running = choose_rows(begins, self.memory.prepare(fresh), running)
      count = jnp.where(begins, 0, count)
      here = ((place == count[:, None]) & counts[:, None])[..., None]
      answer = self.recall(self.memory, asked, x[:, None])
      recalled = jnp.where(here, answer, recalled)
      own = jnp.where(here, x[:, None], own)
      rows = [self.attention.entries(r, place) for r in (recalled, own)]
      entries = jax.tree.map(lambda *r: jnp.concatenate(r, axis=1), *rows)
      seen = place <= count[:, None]
      y = self.attention.over_by_definition(
        x, count, entries, jnp.concatenate([seen, seen], axis=1)
      )
      m, running = self.memory.step(y, running, valid=counts)
      out = self.product(y, m.astype(y.dtype))
      count = count + counts.astype(jnp.int32)
      full = count == size
      asked = choose_rows(full, self.memory.unprepare(running), asked)
      count = jnp.where(full, 0, count)
      return (asked, running, recalled, own, count), out

    empty = jnp.zeros((batch, size, self.dim), self.dtype)
    running = self.memory.prepare(state.memory)
    carry = (state.memory, running, empty, empty, jnp.zeros_like(state.count))
    again = jnp.arange(open_, dtype=jnp.int32)[None] < state.count[:, None]
    tokens = (
      jnp.concatenate([state.pending, x], axis=1),
      jnp.pad(restart, ((0, 0), (open_, 0))),
      jnp.concatenate([again, valid], axis=1),
    )
    tokens = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tokens)
    (asked, _, _, own, count), y = jax.lax.scan(token, carry, tokens)
    real = (place < count[:, None])[..., None]
    pending = jnp.where(real, own, jnp.zeros((), own.dtype))[:, :open_]
    y = jnp.moveaxis(y, 0, 1)[:, open_:]
    return y, MemoryAsContextState(asked, pending, count)
