"""The sequence mixer: a test-time memory between projections.

`x -> q, k, v -> convolution, SiLU -> q, k to unit length -> memory -> RMSNorm
per head -> times SiLU(x gate) -> output`, with the memory's gates computed from
x (arXiv 2505.23735, section 5.1 and figure 3; norm and output gate as in its
sister papers, arXiv 2504.13173 section 5.4).
"""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.convolution import Convolution
from atlas_jax.layers.gates import MemoryGates
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.mixer import Mixer, MixerOutput, mean_over_valid
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.layers.tails import init_tail, look_back, next_tail
from atlas_jax.memory.numerics import unit


class Tails(NamedTuple):
  """The last inputs of the three convolutions, oldest first.

  With a token gate also the last tokens' weights; else these are empty.
  """

  query: Float[Array, "B N D"]
  key: Float[Array, "B N D"]
  value: Float[Array, "B N D"]
  weight: Float[Array, "B W-1 H"]


class MemoryMixerState(NamedTuple):
  """What later tokens need, at constant size; rows are independent."""

  memory: am.MemoryState
  tails: Tails


class MemoryMixer(Mixer):
  """A layer that mixes tokens through a memory which learns as it reads.

  Its metrics: `inner_loss` (how much tokens surprised the memory);
  `gate_decay` (alpha), `gate_momentum` (theta), `gate_rate` (eta) and
  `gate_window` (gamma, summed over the window), as far as the memory has them
  (`gate_rate` is the mean over its matrices where each has a rate), and
  `gate_threshold`; `memory_norm` (of the weights after the last whole chunk).

  Queries and keys have length 1, or sqrt(width) for a memory whose rate goes by
  position: test-time training divides that rate by the width.

  Args:
    dim: Width of x; `heads` must divide it.
    heads: Memories side by side, each of width dim / heads.
    memory: Which memory.
    conv_width: Taps of the convolutions, the current token included.
    decay_start, momentum_start, rate_max, rate_start, token_gate: See
      `MemoryGates`.
    qk_epsilon: Length below which q and k are not stretched to length 1.
    norm_epsilon: Of the RMSNorm of read-outs.
    scale: Factor on all starting weights of projections and convolutions.
    output_scale: Further factor on those of the output projection.
    dtype: Type of activations. Gates, norms and the memory are at least
      float32.
    param_dtype: Type of the parameters.
    implementation: "auto", "reference" or "xla", see `atlas_jax.memory.apply`.
    form: "dual" or "associative", likewise.
    rngs: Source of the starting weights.

  Raises:
    UserError: Heads that do not divide dim, or a memory that does not fit.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    memory: am.Memory | None = None,
    *,
    conv_width: int = 4,
    decay_start: float = 0.99,
    momentum_start: float = 0.9,
    rate_max: float | None = None,
    rate_start: float | None = None,
    token_gate: bool = False,
    qk_epsilon: float = 1e-6,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    form: str = "dual",
    rngs: Source,
  ):
    if heads < 1 or dim < 1 or dim % heads:
      raise UserError(f"{heads} heads do not divide the width {dim}")
    if conv_width < 1:
      raise UserError(f"conv_width {conv_width}: use 1 or more taps")
    width = dim // heads
    self.heads = heads
    self.dim = dim
    self.definition = memory or am.Memory()
    self.chunk = self.definition.chunk
    self.qk_epsilon = qk_epsilon
    by_position = self.definition.rate_by_position
    self.qk_length = math.sqrt(width) if by_position else 1.0
    self.dtype = jnp.dtype(dtype)
    self.implementation = implementation
    self.form = form

    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )

    def convolution() -> Convolution:
      return Convolution(
        conv_width, dim, scale=scale, param_dtype=param_dtype, rngs=rngs
      )

    self.query, self.key, self.value = (
      linear(dim, dim, scale=scale) for _ in range(3)
    )
    self.query_convolution = convolution()
    self.key_convolution = convolution()
    self.value_convolution = convolution()
    self.gates = MemoryGates(
      dim,
      heads,
      self.definition,
      decay_start=decay_start,
      momentum_start=momentum_start,
      rate_max=rate_max,
      rate_start=rate_start,
      token_gate=token_gate,
      param_dtype=param_dtype,
    )
    # Drawn in float32, as orthogonal matrices have no narrower algorithm.
    params = am.init_params(
      rngs.params(),
      self.definition,
      heads=heads,
      key_width=width,
      value_width=width,
    )
    self.memory = _as_variables(
      jax.tree.map(lambda leaf: leaf.astype(param_dtype), params)
    )
    self.norm = RMSNorm(
      (heads, width), epsilon=norm_epsilon, param_dtype=param_dtype
    )
    self.output_gate = linear(dim, dim, scale=scale)
    self.output = linear(dim, dim, scale=scale * output_scale)

  def step(
    self,
    x: Float[Array, "B D"],
    state: MemoryMixerState,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B D"], MemoryMixerState]:
    """Mixes one token per row at constant cost and memory.

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
    query, key, value, gates, tails = self._inputs(
      x[:, None], state.tails, arrangement
    )
    out = am.step(
      self.definition,
      self.memory_params(),
      query[:, 0],
      key[:, 0],
      value[:, 0],
      jax.tree.map(lambda gate: gate[:, 0], gates),
      state.memory,
      valid=valid,
      implementation=self.implementation,
    )
    y = self._outputs(out.y[:, None], x[:, None])[:, 0]
    if valid is not None:
      tails = jax.tree.map(
        lambda new, old: jnp.where(valid[:, None, None], new, old),
        tails,
        state.tails,
      )
    return y, MemoryMixerState(cast(am.MemoryState, out.state), tails)

  def prepare(self, state: MemoryMixerState) -> MemoryMixerState:
    """Adds to a state what `step` needs, derived from the rest of it.

    Calls take a state with or without it and return one without.
    """
    if self.implementation == "reference":
      return state
    memory = am.with_cache(
      self.definition, self.memory_params(), am.without_cache(state.memory)
    )
    return state._replace(memory=memory)

  def init_state(self, batch: int) -> MemoryMixerState:
    """The state of `batch` rows before their first token."""
    taps = self.query_convolution.kernel.shape[0]
    tail = jnp.zeros((batch, taps - 1, self.dim), self.dtype)
    memory = am.init_state(self.definition, self.memory_params(), batch)
    weight = jnp.zeros(
      (batch, self._looks_back, self.heads), am.state_dtype(self.dtype)
    )
    return MemoryMixerState(memory, Tails(tail, tail, tail, weight))

  def unprepare(self, state: MemoryMixerState) -> MemoryMixerState:
    """Takes from a state what only steps need."""
    return state._replace(memory=am.without_cache(state.memory))

  def counts(
    self, state: MemoryMixerState | None
  ) -> dict[int, Int[Array, "B"] | None]:
    """The tokens in the unfinished chunk of the memory."""
    return {self.chunk: None if state is None else state.memory.count}

  def carry_size(self, length: int) -> int:
    """One memory, weights and momentum, for each head and chunk."""
    size = self.definition.state_size(self._width, self._width)
    return -(-length // self.chunk) * self.heads * size

  def memory_params(self) -> dict[str, Any]:
    """The memory's outer parameters, as `atlas_jax.memory.apply` takes them."""
    # Flax drops empty branches: the identity map has no parameters.
    return {"features": {}, **nnx.to_pure_dict(nnx.state(self.memory))}

  @property
  def _width(self) -> int:
    return self.norm.scale.shape[-1]

  @property
  def _looks_back(self) -> int:
    """Earlier tokens whose weights are kept."""
    return self.definition.window - 1 if self.gates.weighs_tokens else 0

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: MemoryMixerState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    tails = None if state is None else state.tails
    query, key, value, gates, tails = self._inputs(x, tails, arrangement)
    segment_ids = arrangement.segment_ids
    out = am.apply(
      self.definition,
      self.memory_params(),
      query,
      key,
      value,
      gates,
      None if state is None else state.memory,
      segment_ids=segment_ids,
      aligned=segment_ids is not None,
      layout=arrangement.layout(self.chunk),
      implementation=self.implementation,
      form=self.form,
    )
    metrics = _metrics(self.definition, gates, out, arrangement.valid)
    after = None if out.state is None else MemoryMixerState(out.state, tails)
    return MixerOutput(self._outputs(out.y, x), after, metrics)

  def _inputs(
    self,
    x: Float[Array, "B T D"],
    tails: Tails | None,
    arrangement: Arrangement,
  ) -> tuple[Array, Array, Array, am.Gates, Tails]:
    """Queries, keys and values [B, T, H, K], gates, and the next tails."""
    new_tails = {}
    arrays = {}
    for name in ("query", "key", "value"):
      projected = getattr(self, name)(x)
      y, new_tails[name] = getattr(self, f"{name}_convolution")(
        projected,
        None if tails is None else getattr(tails, name),
        history=arrangement.history,
        lengths=arrangement.lengths,
      )
      y = jax.nn.silu(y).reshape(*x.shape[:2], self.heads, self._width)
      if name != "value":
        wide = y.astype(am.state_dtype(y.dtype))
        wide = self.qk_length * unit(wide, epsilon=self.qk_epsilon)
        y = wide.astype(y.dtype)
      arrays[name] = y
    before = None if tails is None else tails.weight
    gates, new_tails["weight"] = self._gates(x, before, arrangement)
    return (*arrays.values(), gates, Tails(**new_tails))

  def _gates(
    self,
    x: Float[Array, "B T D"],
    before: Float[Array, "B W-1 H"] | None,
    arrangement: Arrangement,
  ) -> tuple[am.Gates, Float[Array, "B W-1 H"]]:
    """The gates of all tokens, and the weights of the last ones."""
    gates = self.gates(x)
    if not self.gates.weighs_tokens:
      empty = jnp.zeros((x.shape[0], 0, self.heads), gates.rate.dtype)
      return gates, empty
    width = self.definition.window
    weight = self.gates.token_weight(x)
    if before is None:
      before = init_tail(width, weight)
    # Tokens of other documents are no concern: the memory masks them.
    weights = look_back(weight, before, width)
    after = next_tail(weight, before, arrangement.history, arrangement.lengths)
    return gates._replace(window=gates.window * weights), after

  def _outputs(
    self, y: Float[Array, "B T H V"], x: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """Read-outs to outputs in x's type."""
    y = self.norm(y).reshape(x.shape)
    return self.output(y * jax.nn.silu(self.output_gate(x))).astype(x.dtype)


def _as_variables(params: dict[str, Any]) -> nnx.Dict:
  """A tree of arrays as a tree of parameters, without empty branches."""
  return nnx.Dict(
    {
      name: _as_variables(value)
      if isinstance(value, dict)
      else nnx.Param(value)
      for name, value in params.items()
      if not isinstance(value, dict) or value
    }
  )


def _metrics(
  memory: am.Memory,
  gates: am.Gates,
  out: am.Output,
  valid: Bool[Array, "B T"] | None,
) -> dict[str, Float[Array, ""]]:
  """See `MemoryMixer`."""

  mean = functools.partial(mean_over_valid, valid=valid)
  metrics = {
    "inner_loss": mean(out.inner_loss),
    "gate_rate": mean(
      gates.rate if gates.matrix_rate is None else gates.matrix_rate
    ),
    "gate_window": mean(jnp.sum(gates.window, axis=-1)),
  }
  if memory.retention.groups:
    metrics["gate_decay"] = mean(jnp.exp(gates.log_decay))
  if gates.threshold is not None:
    metrics["gate_threshold"] = mean(gates.threshold)
  if memory.has_momentum:
    metrics["gate_momentum"] = mean(jnp.exp(gates.log_momentum))
  norm = jax.lax.stop_gradient(out.weight_norm)
  metrics["memory_norm"] = jnp.mean(norm).astype(jnp.float32)
  return metrics
