"""Dot and SWDT: a memory over exponential features, as a recurrent layer.

`x -> q, k, v -> convolution, SiLU -> q, k to unit length -> memory -> RMSNorm
per head -> times SiLU(x gate) -> output`, as `MemoryMixer` around its memories
(arXiv 2505.23735, sections 4.2, 4.3 and 5.1 and Table 1).
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from atlas_jax import memory as am
from atlas_jax.attention import exponential as ex
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.convolution import Convolution
from atlas_jax.layers.exponential_mixer import (
  ConvolutionTails,
  ExponentialMixer,
  gate_memory,
)
from atlas_jax.layers.gates import MemoryGates
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.layers.temperature import LARGEST_TEMPERATURE, Temperature

# `M_t = alpha_t M_(t-1) - eta_t sum_window gamma_i grad |M(phi*(k_i)) - v_i|^2`
# (Eq. 27, Table 1).
DOT = ex.ExponentialMemory(
  objective=am.L2(), window=16, chunk=64, error_clip=2.0
)

# `M_t = alpha_t M_(t-1) + eta_t sum_window gamma_i grad <M(phi*(k_i)), v_i>`
# (Table 1).
SWDT = ex.ExponentialMemory(
  objective=am.DotProduct(), window=16, chunk=64, error_clip=2.0
)


class ExponentialMemoryMixer(ExponentialMixer):
  """A layer that mixes tokens through a memory over exponential features.

  Its state grows, see `ExponentialMixer`.

  Args:
    dim: Width of x; `heads` must divide it.
    heads: Memories side by side, each of width dim / heads.
    memory: Which memory, `DOT` or `SWDT` or one like them.
    temperature: What the factor on the product of q and k, both of length 1,
      stays below; each head learns its own, from half of it. At most 8 without
      a normaliser.
    conv_width: Taps of the convolutions, the current token included.
    decay_start, rate_max, rate_start: See `MemoryGates`.
    qk_epsilon: Length below which q and k are not stretched to length 1.
    norm_epsilon: Of the RMSNorm of read-outs.
    scale: Factor on all starting weights of projections and convolutions.
    output_scale: Further factor on those of the output projection.
    dtype: Type of activations and of what the state keeps of tokens. Gates,
      norms and the memory's sums are at least float32.
    param_dtype: Type of the parameters.
    implementation: "reference" (token by token), "xla" (in blocks), or "auto",
      which is the same.
    rngs: Source of the starting weights.

  Raises:
    UserError: Heads that do not divide dim, or options that do not fit.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    memory: ex.ExponentialMemory = DOT,
    *,
    temperature: float = LARGEST_TEMPERATURE,
    conv_width: int = 4,
    decay_start: float = 0.999,
    rate_max: float | None = None,
    rate_start: float = 0.1,
    qk_epsilon: float = 1e-6,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    if heads < 1 or dim < 1 or dim % heads:
      raise UserError(f"{heads} heads do not divide the width {dim}")
    if conv_width < 1:
      raise UserError(f"conv_width {conv_width}: use 1 or more taps")
    if memory.attends:
      raise UserError("lam is an option of deep_transformer only")
    check_temperature(memory, temperature)
    self.dim = dim
    self.heads = self.kv_heads = heads
    self.definition = memory
    self.chunk = memory.chunk or 1
    self.lam = 1.0
    self.dtype = jnp.dtype(dtype)
    self.implementation = implementation

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
    self.temperature = Temperature(
      heads, temperature, epsilon=qk_epsilon, param_dtype=param_dtype
    )
    self.gates = MemoryGates(
      dim,
      heads,
      gate_memory(memory),
      decay_start=decay_start,
      rate_max=rate_max,
      rate_start=rate_start,
      param_dtype=param_dtype,
    )
    start = ex.init_params(
      rngs.params(), memory, heads, dim // heads, param_dtype
    )
    self.start = nnx.Dict({name: nnx.Param(x) for name, x in start.items()})
    self.norm = RMSNorm(
      (heads, dim // heads), epsilon=norm_epsilon, param_dtype=param_dtype
    )
    self.output_gate = linear(dim, dim, scale=scale)
    self.output = linear(dim, dim, scale=scale * output_scale)

  def init_tails(self, batch: int) -> ConvolutionTails:
    """The tails of rows before their first token."""
    taps = self.query_convolution.kernel.shape[0]
    tail = jnp.zeros((batch, taps - 1, self.dim), self.dtype)
    return ConvolutionTails(tail, tail, tail)

  def inputs(
    self,
    x: Float[Array, "B T D"],
    tails: ConvolutionTails | None,
    position: Int[Array, "#B T"],
    arrangement: Arrangement,
  ) -> tuple[ex.Inputs, ConvolutionTails]:
    """Vectors of arranged tokens, and the next tails."""
    del position
    vectors, after = {}, {}
    for name in ("query", "key", "value"):
      y, after[name] = getattr(self, f"{name}_convolution")(
        getattr(self, name)(x),
        None if tails is None else getattr(tails, name),
        history=arrangement.history,
        lengths=arrangement.lengths,
      )
      y = jax.nn.silu(y).reshape(*x.shape[:2], self.heads, -1)
      vectors[name] = y if name == "value" else self.temperature.unit(y)
    inputs = ex.Inputs(
      **vectors,
      score_query=self.temperature(vectors["query"]),
      score_key=self.temperature(vectors["key"]),
    )
    return inputs, ConvolutionTails(**after)

  def outputs(
    self, y: Float[Array, "B T H K"], x: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """What was read, as outputs in x's type."""
    y = self.norm(y).reshape(x.shape)
    return self.output(y * jax.nn.silu(self.output_gate(x))).astype(x.dtype)


def check_temperature(memory: ex.ExponentialMemory, temperature: float) -> None:
  """Refuses temperatures at which sums without a normaliser lose tokens.

  Raises:
    UserError: Says what to change.
  """
  if memory.normalised or 0 < temperature <= LARGEST_TEMPERATURE:
    return
  raise UserError(
    "without a normaliser, queries and keys must have length 1 and a "
    f"temperature of at most {LARGEST_TEMPERATURE:g}, not {temperature:g}: set "
    "temperature, or normalised to true"
  )
