"""What mixers have in common whose memory has exponential features."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from atlas_jax import memory as am
from atlas_jax.attention import exponential as ex
from atlas_jax.attention.documents import positions
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.gates import MemoryGates
from atlas_jax.layers.mixer import Mixer, MixerOutput


class ConvolutionTails(NamedTuple):
  """The last inputs of the three convolutions, oldest first."""

  query: Float[Array, "B N D"]
  key: Float[Array, "B N D"]
  value: Float[Array, "B N D"]


class ExponentialMixerState(NamedTuple):
  """What later tokens need; rows are independent.

  Attributes:
    memory: All tokens of the document; it grows.
    tails: Of the convolutions, if there are any.
  """

  memory: ex.State
  tails: ConvolutionTails | None


class ExponentialMixer(Mixer):
  """A mixer that keeps what every token of the document wrote.

  Its state grows: a call adds room for its tokens, a step needs room made by
  `resize`, and a row whose tokens had no room gives NaN from then on.

  A subclass makes inputs of x, and outputs of what the memory reads.

  Attributes:
    heads: Queries per token, each of width dim / heads.
    kv_heads: Keys and values per token.
    definition: Which memory.
    start: The memory's starting weights; none for a linear one.
    gates: Its decay, rate and window; None: keep all, write all.
    lam: Share of the deep part, for a memory that attends as well.
    dtype: Type of activations.
    implementation: "auto", "reference" or "xla".
  """

  heads: int
  kv_heads: int
  definition: ex.ExponentialMemory
  start: nnx.Dict
  gates: MemoryGates | None
  lam: float | nnx.Param
  dtype: jnp.dtype
  implementation: str

  def inputs(
    self,
    x: Float[Array, "B T D"],
    tails: ConvolutionTails | None,
    position: Int[Array, "#B T"],
    arrangement: Arrangement,
  ) -> tuple[ex.Inputs, ConvolutionTails | None]:
    """Vectors of arranged tokens, and the next tails.

    Args:
      x: Arranged inputs.
      tails: Those of the state; None for a fresh start.
      position: Of each token in its document.
      arrangement: Where padding and documents are.
    """
    raise NotImplementedError

  def outputs(
    self, y: Float[Array, "B T H K"], x: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """What was read, as outputs in x's type."""
    raise NotImplementedError

  def init_tails(self, batch: int) -> ConvolutionTails | None:
    """The tails of rows before their first token."""
    raise NotImplementedError

  def init_state(self, batch: int) -> ExponentialMixerState:
    """The state of `batch` rows before their first token."""
    width = self.dim // self.heads
    memory = ex.init_state(
      self.definition, batch, self.kv_heads, width, self.dtype
    )
    return ExponentialMixerState(memory, self.init_tails(batch))

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: ExponentialMixerState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, x being 0 at padding."""
    chunk = self.definition.chunk
    memory = None if state is None else state.memory
    inputs, tails = self._inputs(x, state, arrangement)
    out = ex.apply(
      self.definition,
      self._params(),
      inputs,
      self._gates(x),
      memory,
      lam=self._lam(),
      restart=arrangement.restart,
      valid=arrangement.valid,
      lengths=arrangement.lengths,
      layout=None if chunk is None else arrangement.layout(chunk),
      segment_ids=arrangement.segment_ids,
      implementation=self.implementation,
    )
    after = None
    if out.state is not None:
      after = ExponentialMixerState(out.state, tails)
    return MixerOutput(self._outputs(out.y, x, arrangement.valid), after, {})

  def step(
    self,
    x: Float[Array, "B D"],
    state: ExponentialMixerState,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], ExponentialMixerState]:
    """Mixes one token per row, within the room that the state has.

    Raises:
      UserError: Outside jit, where a row has no room.
    """
    self.check_step(x, state, valid)
    x = x[:, None]
    arrangement = Arrangement()
    if valid is not None:
      arrangement = Arrangement(
        valid=valid[:, None], lengths=valid.astype(jnp.int32)
      )
      x = arrangement.gather(x)
    inputs, tails = self._inputs(x, state, arrangement)
    y, memory = ex.step(
      self.definition,
      self._params(),
      inputs,
      self._gates(x),
      state.memory,
      lam=self._lam(),
      valid=valid,
      implementation=self.implementation,
    )
    y = self._outputs(y, x, arrangement.valid)[:, 0]
    return y, ExponentialMixerState(memory, tails)

  def counts(
    self, state: ExponentialMixerState | None
  ) -> dict[int, Int[Array, "B"] | None]:
    """The tokens in the unfinished chunk of the memory, if it has chunks."""
    if self.definition.chunk is None:
      return {}
    return {self.chunk: None if state is None else state.memory.count}

  def prepare(self, state: ExponentialMixerState) -> ExponentialMixerState:
    """Adds to a state what `step` needs, derived from the rest of it."""
    if self.implementation == "reference":
      return state
    memory = ex.prepare(self.definition, self._params(), state.memory)
    return state._replace(memory=memory)

  def unprepare(self, state: ExponentialMixerState) -> ExponentialMixerState:
    """Takes from a state what only steps need."""
    return state._replace(memory=ex.unprepare(state.memory))

  def capacity(self, state: ExponentialMixerState) -> int:
    """Tokens for which a state has room, those it holds included."""
    return ex.capacity(self.definition, state.memory)

  def resize(
    self, state: ExponentialMixerState, capacity: int
  ) -> ExponentialMixerState:
    """A state with room for at least this many tokens."""
    memory = ex.resize(self.definition, state.memory, capacity)
    return state._replace(memory=memory)

  def carry_size(self, length: int) -> int:
    """The sums of the memory's outer matrix, for each head and block."""
    width = self.dim // self.heads
    return ex.carry_size(self.definition, self.kv_heads, width, length)

  def _inputs(
    self,
    x: Float[Array, "B T D"],
    state: ExponentialMixerState | None,
    arrangement: Arrangement,
  ) -> tuple[ex.Inputs, ConvolutionTails | None]:
    count = tails = None
    if state is not None:
      count = ex.tokens_of_state(self.definition, state.memory)
      tails = state.tails
    position = positions(x.shape[1], arrangement.restart, count)
    return self.inputs(x, tails, position, arrangement)

  def _outputs(
    self,
    y: Float[Array, "B T H K"],
    x: Float[Array, "B T D"],
    valid: Bool[Array, "B T"] | None,
  ) -> Float[Array, "B T D"]:
    """Outputs, 0 at padding."""
    y = self.outputs(y, x)
    if valid is None:
      return y
    return jnp.where(valid[..., None], y, jnp.zeros((), y.dtype))

  def _params(self) -> dict[str, Array]:
    return nnx.to_pure_dict(nnx.state(self.start))

  def _lam(self) -> Float[Array, ""] | float:
    return self.lam[...] if isinstance(self.lam, nnx.Param) else self.lam

  def _gates(self, x: Float[Array, "B T D"]) -> am.Gates:
    if self.gates is not None:
      return self.gates(x)
    shape = (*x.shape[:2], self.kv_heads)
    ones = jnp.ones(shape, am.state_dtype(x.dtype))
    zeros = jnp.zeros_like(ones)
    window = jnp.ones((*shape, self.definition.window), ones.dtype)
    return am.Gates(zeros[..., None], zeros, ones, window)


def gate_memory(memory: ex.ExponentialMemory) -> am.Memory:
  """A memory that needs the same gates, for `MemoryGates`."""
  return am.Memory(
    features=am.Identity(),
    network=am.Matrix(),
    objective=memory.objective,
    optimizer=am.GradientDescent(),
    retention=am.ScalarRetention(),
    window=memory.window,
    chunk=1,
  )
