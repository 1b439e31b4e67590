"""Hyena of order 2: gates around a convolution as long as the text.

`x -> x1, x2, v -> convolution of 3 taps -> u = x1 v -> y_t = sum_j h_(t-j) u_j
+ skip u_t -> output(x2 y)` (arXiv 2302.10866, Definition 3.1 and section 3.3).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from atlas_jax import attention as aa
from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.convolution import Convolution
from atlas_jax.layers.hyena_filter import HyenaFilter
from atlas_jax.layers.initial import Source, normal
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.long_convolution import long_convolution
from atlas_jax.layers.mixer import Mixer, MixerOutput
from atlas_jax.memory import dispatch

_TAPS = 3


class HyenaState(NamedTuple):
  """What later tokens need; it grows.

  Attributes:
    cache: u of all tokens of the document, as keys of one head of width D; its
      values have width 0.
    tail: The last inputs of the short convolution.
    filter: The filters at as many distances as the cache has room for, the
      same in each row; only between steps, else None.
  """

  cache: aa.Cache
  tail: Float[Array, "B 2 3*D"]
  filter: Float[Array, "B S D"] | None = None


class HyenaMixer(Mixer):
  """A layer that mixes tokens by long convolutions between gates.

  A document of more than `max_length` tokens is refused outside jit and gives
  NaN for the tokens beyond it inside. A call adds room to the state for its
  tokens, a step needs room made by `resize`, and a row whose tokens had no room
  gives NaN from then on. A sequence costs O(T log T), packed documents
  O(T log^2 T), a step O(T). It has no metrics.

  By Fourier transforms a token may move earlier ones by rounding errors.

  Args:
    dim: Width of x.
    heads: Not used: every channel has a filter of its own.
    max_length: Tokens of the longest document; the filters' window and features
      are stretched over it.
    filter_features, filter_width, frequency: See `HyenaFilter`.
    norm_epsilon: Not used: there is no norm.
    scale: Factor on the starting weights of projections and short convolution.
    output_scale: Further factor on those of the output projection.
    dtype: Type of activations and state. Filters and sums are at least float32.
    param_dtype: Type of the parameters.
    implementation: "xla" (Fourier transforms), "reference" (sums, token by
      token), or "auto", which is "xla".
    rngs: Source of the starting weights.

  Raises:
    UserError: Sizes or an implementation that cannot be.
  """

  def __init__(
    self,
    dim: int,
    heads: int = 1,
    *,
    max_length: int = 4096,
    filter_features: int = 33,
    filter_width: int = 64,
    frequency: float = 1.0,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    del heads, norm_epsilon
    self.dim = dim
    self.max_length = self.longest = max_length
    self.dtype = jnp.dtype(dtype)
    self.implementation = dispatch.resolve(implementation)
    self.filter = HyenaFilter(
      max_length,
      dim,
      features=filter_features,
      width=filter_width,
      frequency=frequency,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.skip = nnx.Param(normal(rngs, (dim,), 1.0, param_dtype))

    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.streams = linear(dim, 3 * dim, scale=scale)
    self.convolution = Convolution(
      _TAPS, 3 * dim, scale=scale, param_dtype=param_dtype, rngs=rngs
    )
    self.output = linear(dim, dim, scale=scale * output_scale)

  def init_state(self, batch: int) -> HyenaState:
    """The state of `batch` rows before their first token, without room."""
    empty = jnp.zeros((batch, 0, self.dim), self.dtype)
    cache = aa.Cache(_entries(empty), jnp.zeros((batch,), jnp.int32))
    return HyenaState(
      cache, jnp.zeros((batch, _TAPS - 1, 3 * self.dim), self.dtype)
    )

  def capacity(self, state: HyenaState) -> int:
    """Tokens for which there is room, those it holds included."""
    return aa.room(state.cache)

  def resize(self, state: HyenaState, capacity: int) -> HyenaState:
    """The state with room for this many tokens."""
    resized = state._replace(cache=aa.resize(state.cache, capacity))
    return resized if state.filter is None else self.prepare(resized)

  def prepare(self, state: HyenaState) -> HyenaState:
    """Adds the filters, which no step should have to work out."""
    if self.implementation == "reference":
      return state
    room, batch = aa.room(state.cache), state.cache.count.shape[0]
    filters = _padded(self.filter(room), room)
    return state._replace(
      filter=jnp.broadcast_to(filters[None], (batch, *filters.shape))
    )

  def unprepare(self, state: HyenaState) -> HyenaState:
    """Takes the filters away."""
    return state._replace(filter=None)

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: HyenaState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`.

    Raises:
      UserError: Outside jit, where a document is too long.
    """
    gate, u, tail = self._streams(x, state, arrangement)
    cache = None if state is None else state.cache
    restart, lengths = arrangement.restart, arrangement.lengths
    valid = arrangement.valid
    if self.implementation == "reference":
      y, after = self._definition(u, cache, restart, valid)
    else:
      y = self._convolved(u, cache, restart)
      after = aa.extend(cache, _entries(u), restart=restart, lengths=lengths)
    place = aa.positions(
      x.shape[1], restart, None if cache is None else cache.count
    )
    y = self._outputs(gate, u, self._within(y, place, valid), valid)
    if arrangement.segment_ids is not None:
      return MixerOutput(y.astype(x.dtype), None, {})
    return MixerOutput(y.astype(x.dtype), HyenaState(after, tail), {})

  def step(
    self,
    x: Float[Array, "B D"],
    state: HyenaState,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], HyenaState]:
    """Mixes one token per row, within the room that the state has.

    Raises:
      UserError: Outside jit, where a row has no room or is too long.
    """
    self.check_step(x, state, valid)
    aa.check_room(state.cache, valid)
    if self.implementation != "reference" and state.filter is None:
      state = self.prepare(state)
    arrangement = Arrangement()
    if valid is not None:
      arrangement = Arrangement(
        valid=valid[:, None], lengths=valid.astype(jnp.int32)
      )
    tokens = arrangement.gather(x[:, None])
    gate, u, tail = self._streams(tokens, state, arrangement)
    after = aa.extend(
      state.cache, _entries(u), lengths=arrangement.lengths, grow=False
    )
    if state.filter is None:
      y, _ = self._definition(u, state.cache, None, arrangement.valid)
    else:
      y = _newest(after, state.filter)[:, None]
    # A row without room has counted itself out of all bounds.
    y = self._within(y, after.count[:, None] - 1, arrangement.valid)
    y = self._outputs(gate, u, y, arrangement.valid)
    return y[:, 0].astype(x.dtype), HyenaState(after, tail, state.filter)

  def _streams(
    self, x: Array, state: HyenaState | None, arrangement: Arrangement
  ) -> tuple[Array, Array, Array]:
    """The gate x2, u = x1 v, and the next tail."""
    y, tail = self.convolution(
      self.streams(x),
      None if state is None else state.tail,
      history=arrangement.history,
      lengths=arrangement.lengths,
    )
    first, gate, value = jnp.split(y, 3, axis=-1)
    return gate, first * value, tail

  def _convolved(
    self,
    u: Float[Array, "B T D"],
    cache: aa.Cache | None,
    restart: Bool[Array, "B T"] | None,
  ) -> Float[Array, "B T D"]:
    """The long convolution over what is cached and what is new."""
    length = u.shape[1]
    u = u.astype(am.state_dtype(u.dtype))
    count = None if cache is None else cache.count
    start = None
    if restart is not None:
      start = aa.document_starts(length, restart, count)
    if cache is not None:
      # The cached tokens end where the new ones begin.
      room = aa.room(cache)
      place = jnp.arange(room, dtype=jnp.int32)[None] - room
      place = place + cache.count[:, None]
      old = jnp.take_along_axis(
        cache.entries.key[:, :, 0], jnp.clip(place, 0)[..., None], axis=1
      )
      old = jnp.where((place >= 0)[..., None], old, jnp.zeros((), old.dtype))
      u = jnp.concatenate([old.astype(u.dtype), u], axis=1)
      if start is not None:
        first = jnp.broadcast_to(-cache.count[:, None], place.shape)
        start = jnp.concatenate(
          [first, jnp.broadcast_to(start, (len(u), length))], axis=1
        )
        start = start + room
    filters = self.filter(u.shape[1]).astype(u.dtype)
    return long_convolution(u, filters, start)[:, u.shape[1] - length :]

  def _definition(
    self,
    u: Float[Array, "B T D"],
    cache: aa.Cache | None,
    restart: Bool[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
  ) -> tuple[Float[Array, "B T D"], aa.Cache]:
    """The long convolution and the cache after it, token by token."""
    batch, length = u.shape[:2]
    kind = am.state_dtype(u.dtype)
    if restart is None:
      restart = jnp.zeros((batch, length), bool)
    if valid is None:
      valid = jnp.ones((batch, length), bool)
    if cache is None:
      cache = self.init_state(batch).cache
    held = jnp.pad(
      cache.entries.key[:, :, 0].astype(u.dtype), ((0, 0), (0, length), (0, 0))
    )
    room = held.shape[1]
    filters = _padded(self.filter(room), room).astype(kind)
    places = jnp.arange(room, dtype=jnp.int32)[None]

    def token(carry: tuple[Array, Array], inputs: tuple[Array, Array, Array]):
      held, count = carry
      u, begins, counts = inputs
      count = jnp.where(begins, 0, count)
      here = (places == count[:, None]) & counts[:, None]
      held = jnp.where(here[..., None], u[:, None], held)
      distance = count[:, None] - places
      tap = filters[jnp.clip(distance, 0, room - 1)]
      tap = jnp.where((distance >= 0)[..., None], tap, jnp.zeros((), kind))
      y = jnp.sum(tap * held.astype(kind), axis=1)
      return (held, count + counts.astype(jnp.int32)), y

    by_time = jax.tree.map(
      lambda leaf: jnp.moveaxis(leaf, 1, 0), (u, restart, valid)
    )
    (held, count), y = jax.lax.scan(token, (held, cache.count), by_time)
    real = (places < count[:, None])[..., None]
    held = jnp.where(real, held, jnp.zeros((), held.dtype))
    return jnp.moveaxis(y, 0, 1), aa.Cache(_entries(held), count)

  def _within(
    self,
    y: Float[Array, "B T D"],
    place: Int[Array, "#B T"],
    valid: Bool[Array, "B T"] | None,
  ) -> Float[Array, "B T D"]:
    """NaN for tokens beyond the longest document."""
    late = place >= self.max_length
    if valid is not None:
      late = late & valid
    # Lengths that are known inside jit too.
    known = y.shape[1] > self.max_length and valid is None
    if known or (not isinstance(late, Tracer) and np.asarray(late).any()):
      raise UserError(
        f"a text has more than the {self.max_length} tokens that this Hyena "
        "was made for: shorten it, or make a model with a larger max_length"
      )
    return jnp.where(late[..., None], jnp.asarray(jnp.nan, y.dtype), y)

  def _outputs(
    self,
    gate: Array,
    u: Array,
    y: Array,
    valid: Bool[Array, "B T"] | None,
  ) -> Float[Array, "B T D"]:
    """From sums to outputs."""
    y = y + self.skip[...].astype(y.dtype)[None, None] * u.astype(y.dtype)
    y = self.output(gate * y.astype(gate.dtype))
    if valid is None:
      return y
    return jnp.where(valid[..., None], y, jnp.zeros((), y.dtype))


def _entries(u: Float[Array, "B S D"]) -> aa.Entries:
  """u as a cache takes it."""
  return aa.Entries(u[:, :, None], u[:, :, None, :0])


def _padded(filters: Float[Array, "L D"], length: int) -> Float[Array, "S D"]:
  """Filters with zeros up to a length."""
  return jnp.pad(filters, ((0, length - len(filters)), (0, 0)))


def _newest(
  cache: aa.Cache, filters: Float[Array, "B S D"]
) -> Float[Array, "B D"]:
  """The long convolution at the last token of a cache."""
  place = jnp.arange(filters.shape[1], dtype=jnp.int32)[None]
  distance = cache.count[:, None] - 1 - place
  tap = jnp.take_along_axis(
    filters, jnp.clip(distance, 0, place.shape[1] - 1)[..., None], axis=1
  )
  tap = jnp.where((distance >= 0)[..., None], tap, jnp.zeros((), tap.dtype))
  u = cache.entries.key[:, :, 0].astype(tap.dtype)
  return jnp.sum(tap * u, axis=1)
