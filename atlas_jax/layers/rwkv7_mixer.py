"""RWKV-7's time mixing."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.group_norm import GroupNorm
from atlas_jax.layers.initial import Source, normal
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.matrix_mixer import (
  split_heads,
  width_of,
)
from atlas_jax.layers.mixer import Mixer, MixerOutput, mean_over_valid
from atlas_jax.layers.tails import next_tail, shift
from atlas_jax.memory import dispatch, state_dtype
from atlas_jax.memory.numerics import HIGHEST, unit
from atlas_jax.recurrences import rwkv7
from atlas_jax.recurrences.chunks import without_padding

# The lowest log decay of a token, reached where its gate is open.
_LOWEST = -float(np.exp(-0.5))

# Depth that the starting values below are for, as a share of the layers.
_DEPTH = 0.5

# Powers of the token shift's starting values, times 1 - depth.
_SHIFTS = {
  "query": 0.2,
  "decay": 0.9,
  "key": 0.7,
  "value": 0.7,
  "rate": 0.9,
  "gate": 0.2,
}


class RWKV7State(NamedTuple):
  """What later tokens need, at constant size; rows are independent.

  Attributes:
    memory: M after the last token.
    last: The last token's input.
  """

  memory: Float[Array, "B H V K"]
  last: Float[Array, "B 1 D"]


class LowRank(nnx.Module):
  """`activation(x down) up + bias`, at least float32.

  `down` starts at 0, so that nothing depends on x before training, and `up` as
  normal variables of variance `0.01 / rank`.

  Args:
    dim: Width of x and of the output.
    rank: Width in between.
    activation: Of what is in between.
    bias: What the bias starts at; None: there is none.
    param_dtype: Type of the parameters.
    rngs: Source of the starting weights.
  """

  def __init__(
    self,
    dim: int,
    rank: int,
    activation: Callable[[Array], Array],
    *,
    bias: np.ndarray | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: Source,
  ):
    self.activation = activation
    self.down = nnx.Param(jnp.zeros((dim, rank), param_dtype))
    self.up = nnx.Param(normal(rngs, (rank, dim), 0.1 / rank**0.5, param_dtype))
    self.bias = (
      None if bias is None else nnx.Param(jnp.asarray(bias, param_dtype))
    )

  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The map of every token by itself."""
    x = x.astype(state_dtype(x.dtype))
    x = jnp.dot(x, self.down[...].astype(x.dtype), precision=HIGHEST)
    x = self.activation(x)
    x = jnp.dot(x, self.up[...].astype(x.dtype), precision=HIGHEST)
    if self.bias is None:
      return x
    return x + self.bias[...].astype(x.dtype)[None, None]


class RWKV7Mixer(Mixer):
  """`M_t = M_{t-1} (Diag(w_t) - c_t (a_t * c_t)^T) + v_t k~_t^T`, `M_t r_t`.

  arXiv 2503.14456, Eq. 3-22, as in the author's code. With
  `x_i = x + m_i * (x_{t-1} - x)` (a token shift of its own for every use) and
  low-rank maps f of rank 32 or more:

  - `r, k, v = x_r W_r, x_k W_k, x_v W_v`;
  - `log w = -exp(-1/2) sigmoid(f_w(x_w))`, tanh inside f_w, per key channel;
  - `a = sigmoid(f_a(x_a))`, `c = k * z / |k * z|` per head, and
    `k~ = k * (1 + (a - 1) * u)`, z and u learned per channel;
  - the read-out goes through a group norm per head, `(r . (k~ * e)) v` is
    added, e learned, and all is multiplied by `f_g(x_g)`, a sigmoid inside f_g.

  The paper's mixing of values with those of the first layer (Eq. 10) is left
  out: it would tie blocks to each other. Starting values that the author's code
  lets depend on depth are those of a layer halfway. Metrics: `gate_decay` and
  `gate_rate`, the means of w and a.

  Args:
    dim: Width of x.
    heads: Memories side by side, each of width dim / heads.
    decay_rank, rate_rank, gate_rank: Ranks of f_w, f_a and f_g; 0: the source's
      rule, `2.5 sqrt(dim)` (f_g: `5 sqrt(dim)`) to a multiple of 32.
    norm_epsilon: Of the group norm, times ten widths of a head.
    scale: Factor on the starting weights of the four projections.
    output_scale: Further factor on those of the output projection.
    dtype: Type of activations. Memories, decays and norms are at least float32.
    param_dtype: Type of the parameters.
    implementation: "auto", "xla", or "reference": token by token.
    rngs: Source of the starting weights.

  Raises:
    UserError: Heads that do not divide dim, a negative rank, or an unknown
      implementation.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    decay_rank: int = 0,
    rate_rank: int = 0,
    gate_rank: int = 0,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    dispatch.resolve(implementation)
    if min(decay_rank, rate_rank, gate_rank) < 0:
      raise UserError("a rank is negative: use 1 or more, or 0 for the rule")
    self.dim = dim
    self.heads = heads
    self.width = width_of(dim, heads, 1.0, "keys")
    self.dtype = jnp.dtype(dtype)
    self.implementation = implementation

    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )

    def low_rank(
      rank: int,
      factor: float,
      activation: Callable[[Array], Array],
      bias: np.ndarray | None,
    ) -> LowRank:
      rank = rank or max(32, 32 * round(factor * dim**0.5 / 32))
      return LowRank(
        dim, rank, activation, bias=bias, param_dtype=param_dtype, rngs=rngs
      )

    start = _starts(heads, self.width)
    self.query = linear(dim, dim, scale=scale)
    self.key = linear(dim, dim, scale=0.1 * scale)
    self.value = linear(dim, dim, scale=scale)
    self.output = linear(dim, dim, scale=scale * output_scale)
    self.decay = low_rank(decay_rank, 2.5, jnp.tanh, start["decay"])
    self.rate = low_rank(rate_rank, 2.5, _identity, start["rate"])
    self.gate = low_rank(gate_rank, 5.0, jax.nn.sigmoid, None)
    self.shifts = nnx.Dict(
      {
        name: nnx.Param(jnp.asarray(start[f"shift_{name}"], param_dtype))
        for name in _SHIFTS
      }
    )
    self.erased = nnx.Param(jnp.asarray(start["erased"], param_dtype))
    self.written = nnx.Param(jnp.full((dim,), 1.02, param_dtype))
    self.bonus = nnx.Param(jnp.full((heads, self.width), -0.04, param_dtype))
    self.norm = GroupNorm(
      (heads, self.width),
      epsilon=10 * self.width * norm_epsilon,
      start=_DEPTH**0.7,
      param_dtype=param_dtype,
    )

  def init_state(self, batch: int) -> RWKV7State:
    """The state of `batch` rows before their first token."""
    shape = (batch, self.heads, self.width, self.width)
    return RWKV7State(
      jnp.zeros(shape, state_dtype(self.dtype)),
      jnp.zeros((batch, 1, self.dim), self.dtype),
    )

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: RWKV7State | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, see `Mixer.mix`."""
    tokens, last = self._shifted(x, state, arrangement)
    heads = lambda y: split_heads(y, self.width)
    log_decay = _LOWEST * jax.nn.sigmoid(self.decay(tokens["decay"]))
    rate = jax.nn.sigmoid(self.rate(tokens["rate"]))
    wide = rate.dtype
    query, key, value = (
      getattr(self, name)(tokens[name]).astype(wide)
      for name in ("query", "key", "value")
    )
    erased, written = (
      parameter[...].astype(wide)[None, None]
      for parameter in (self.erased, self.written)
    )
    erased = unit(heads(key * erased))
    query, value = heads(query), heads(value)
    key = heads(key * (1 + (rate - 1) * written))
    y, memory = rwkv7(
      query,
      key,
      value,
      erased,
      heads(rate),
      heads(log_decay),
      None if state is None else state.memory,
      restart=arrangement.restart,
      valid=arrangement.valid,
      lowest_decay=_LOWEST,
      implementation=self.implementation,
    )
    bonus = self.bonus[...].astype(wide)[None, None]
    own = jnp.sum(query * key * bonus, axis=-1, keepdims=True)
    y = self.norm(y) + own * value
    y = y.reshape(x.shape) * self.gate(tokens["gate"])
    y = self.output(y.astype(self.dtype)).astype(x.dtype)
    after = None
    if arrangement.segment_ids is None:
      after = RWKV7State(memory, last)
    metrics = {
      "gate_decay": mean_over_valid(jnp.exp(log_decay), arrangement.valid),
      "gate_rate": mean_over_valid(rate, arrangement.valid),
    }
    return MixerOutput(without_padding(y, arrangement.valid), after, metrics)

  def _shifted(
    self,
    x: Float[Array, "B T D"],
    state: RWKV7State | None,
    arrangement: Arrangement,
  ) -> tuple[dict[str, Float[Array, "B T D"]], Float[Array, "B 1 D"]]:
    """x moved towards the token before, for every use, and the last token."""
    history = arrangement.history
    tail = jnp.zeros_like(x[:, :1]) if state is None else state.last
    before = shift(x, tail, 1)
    if history is not None:
      follows = (history > 0)[..., None]
      before = jnp.where(follows, before, jnp.zeros_like(before))
    change = before - x
    tokens = {
      name: x + change * amount[...].astype(x.dtype)[None, None]
      for name, amount in self.shifts.items()
    }
    return tokens, next_tail(x, tail, history, arrangement.lengths)


def _identity(x: Array) -> Array:
  return x


def _starts(heads: int, width: int) -> dict[str, np.ndarray]:
  """Starting values per channel, as in the author's code."""
  dim = heads * width
  index = np.arange(dim)
  along = index / max(dim - 1, 1)
  middle = max(width - 1, 1) / 2
  zigzag = (index % width - middle) / middle
  zigzag = zigzag * np.abs(zigzag)
  slope = -6 + 6 * along ** (1 + _DEPTH**0.3)
  return {
    "decay": slope + 0.5 + 2.5 * zigzag,
    "rate": -0.19 + 0.3 * zigzag + 0.4 * (along - 0.5),
    "erased": 0.71 - 0.1 * (along - 0.5),
    **{
      f"shift_{name}": 1 - (index / dim) ** (power * (1 - _DEPTH))
      for name, power in _SHIFTS.items()
    },
  }
