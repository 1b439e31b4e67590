"""DeepTransformers: softmax attention whose memory is a network.

`x -> q, k, v -> memory over exponential features -> output`, in the place of
attention in a Transformer (arXiv 2505.23735, section 4.2 and Eq. 25). At
`lam = 0`, with every token kept and written in full, it is a Transformer's
attention; then `deep_transformer` makes that very layer, so that checkpoints of
Transformers load.
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from atlas_jax import memory as am
from atlas_jax.attention import exponential as ex
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.layers.cached_mixer import check_attention
from atlas_jax.layers.exponential_memory_mixer import check_temperature
from atlas_jax.layers.exponential_mixer import ExponentialMixer, gate_memory
from atlas_jax.layers.gates import MemoryGates
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.mixer import Mixer
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.layers.rotary import rotate
from atlas_jax.layers.temperature import Temperature


def deep_transformer(
  dim: int,
  heads: int,
  *,
  lam: float = 1.0,
  learn_lam: bool = False,
  gated: bool | None = None,
  kv_heads: int = 0,
  rope_base: float = 10000.0,
  qk_norm: bool = False,
  softmax_scale: float | None = None,
  temperature: float = 0.0,
  normalised: bool = True,
  expansion: float = 4.0,
  chunk: int | None = None,
  error_clip: float | None = None,
  rngs: Source,
  **options: Any,
) -> Mixer:
  """The DeepTransformer with these options.

  Args:
    dim: Width of x; `heads` must divide it.
    heads: Queries per token, each of width K = dim / heads.
    lam: Share of the deep part: `(1 - lam) attention + lam memory`.
    learn_lam: lam is a parameter and starts at this value.
    gated: Whether tokens decay and are written in part; None: only if there is
      a deep part.
    kv_heads: Keys and values per token, each shared by heads / kv_heads
      queries; 0: as many as queries.
    rope_base: Of the rotary embedding in scores; 0: none. The network sees
      queries and keys as they are before.
    qk_norm: Normalises queries and keys of every head.
    softmax_scale: Factor on q k; None: `K ** -0.5`.
    temperature: 0: none. Else queries and keys have length 1, and every head
      learns a factor on their product that stays below this.
    normalised: Divides by the sum of shares. Without, `lam` must be 1, and a
      temperature of at most 8 given.
    expansion: Hidden width of the memory as a multiple of K.
    chunk: Tokens after which slopes are taken at the memory's new weights;
      None: always at its first.
    error_clip: Limit on what a token writes, see `ExponentialMemory` in
      `atlas_jax.attention.exponential`; None: 2 with a chunk, since writes may
      grow from chunk to chunk, and no limit without.
    rngs: Source of the starting weights.
    **options: `norm_epsilon`, `scale`, `output_scale`, `dtype`, `param_dtype`
      and `implementation`, see `AttentionMixer`.

  Returns:
    A `DeepTransformerMixer`; an `AttentionMixer` where lam is 0 for good,
    nothing is gated and there is no temperature.

  Raises:
    UserError: Options that do not fit together.
  """
  deep = bool(lam) or learn_lam
  if gated is None:
    gated = deep
  if not 0 <= lam <= 1:
    raise UserError(f"lam {lam}: use a number from 0 to 1")
  attention: dict[str, Any] = {
    "kv_heads": kv_heads,
    "rope_base": rope_base,
    "qk_norm": qk_norm,
    "softmax_scale": softmax_scale,
    "rngs": rngs,
    **options,
  }
  if not deep and not gated and not temperature and normalised:
    return AttentionMixer(dim, heads, **attention)
  if chunk is not None and error_clip is None:
    error_clip = 2.0
  memory = ex.ExponentialMemory(
    linear=not deep,
    normalised=normalised,
    attends=deep and (learn_lam or lam != 1),
    expansion=expansion,
    chunk=chunk if deep else None,
    error_clip=error_clip if deep else None,
  )
  return DeepTransformerMixer(
    dim,
    heads,
    memory,
    lam=lam if deep else 1.0,
    learn_lam=learn_lam,
    gated=gated,
    temperature=temperature,
    **attention,
  )


class DeepTransformerMixer(ExponentialMixer):
  """A layer that mixes tokens by attention with a deep memory.

  Made by `deep_transformer`, which says what the options are. Its state grows,
  see `ExponentialMixer`.

  Args:
    dim, heads, lam, learn_lam, gated, temperature: As there.
    memory: Which memory; it attends if lam is learned or not 1.
    decay_start, rate_start: See `MemoryGates`; the largest rate is 1.
    kv_heads, rope_base, qk_norm, softmax_scale, norm_epsilon, scale,
      output_scale, dtype, param_dtype, implementation: As of `AttentionMixer`.
    rngs: Source of the starting weights.

  Raises:
    UserError: Options that do not fit together.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    memory: ex.ExponentialMemory,
    *,
    lam: float = 1.0,
    learn_lam: bool = False,
    gated: bool = True,
    temperature: float = 0.0,
    decay_start: float = 0.999,
    rate_start: float = 0.9,
    kv_heads: int = 0,
    rope_base: float = 10000.0,
    qk_norm: bool = False,
    softmax_scale: float | None = None,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    kv_heads = kv_heads or heads
    check_attention(dim, heads, rope_base, implementation)
    if kv_heads < 1 or heads % kv_heads:
      raise UserError(
        f"{kv_heads} heads of keys do not divide {heads} heads of queries"
      )
    if temperature and (qk_norm or softmax_scale is not None):
      raise UserError(
        "a temperature is for queries and keys of length 1: leave qk_norm and "
        "softmax_scale away"
      )
    if softmax_scale is not None and not softmax_scale > 0:
      raise UserError(f"softmax_scale {softmax_scale}: use a positive number")
    check_temperature(memory, temperature)
    width = dim // heads
    self.dim = dim
    self.heads = heads
    self.kv_heads = kv_heads
    self.definition = memory
    self.chunk = memory.chunk or 1
    self.rope_base = rope_base
    self.score_scale = width**-0.5 if softmax_scale is None else softmax_scale
    self.dtype = jnp.dtype(dtype)
    self.implementation = implementation
    # Flax fixes at the first assignment whether an attribute holds arrays.
    share = jnp.asarray(lam, param_dtype)
    self.lam = nnx.Param(share) if learn_lam else float(lam)

    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.query = linear(dim, dim, scale=scale)
    self.key = linear(dim, kv_heads * width, scale=scale)
    self.value = linear(dim, kv_heads * width, scale=scale)

    def norm() -> RMSNorm | None:
      if not qk_norm:
        return None
      return RMSNorm(width, epsilon=norm_epsilon, param_dtype=param_dtype)

    def temper() -> Temperature | None:
      if not temperature:
        return None
      return Temperature(kv_heads, temperature, param_dtype=param_dtype)

    def gates() -> MemoryGates | None:
      if not gated:
        return None
      return MemoryGates(
        dim,
        kv_heads,
        gate_memory(memory),
        decay_start=decay_start,
        rate_max=1.0,
        rate_start=rate_start,
        param_dtype=param_dtype,
      )

    self.query_norm, self.key_norm = norm(), norm()
    self.temperature = temper()
    self.gates = gates()
    start = ex.init_params(
      rngs.params(),
      memory,
      kv_heads,
      width,
      param_dtype,
      key_length=1.0 if temperature else width**0.5,
    )
    self.start = nnx.Dict({name: nnx.Param(x) for name, x in start.items()})
    self.output = linear(dim, dim, scale=scale * output_scale)

  def init_tails(self, batch: int) -> None:
    """There are none."""
    del batch

  def inputs(
    self,
    x: Float[Array, "B T D"],
    tails: None,
    position: Int[Array, "#B T"],
    arrangement: Arrangement,
  ) -> tuple[ex.Inputs, None]:
    """Vectors of arranged tokens."""
    del tails, arrangement
    query = self._heads(self.query(x), self.query_norm)
    key = self._heads(self.key(x), self.key_norm)
    value = self._heads(self.value(x))
    if self.temperature is not None:
      query, key = self.temperature.unit(query), self.temperature.unit(key)
    inputs = ex.Inputs(
      query,
      key,
      value,
      self._score(query, position),
      self._score(key, position),
    )
    return inputs, None

  def outputs(
    self, y: Float[Array, "B T H K"], x: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """What was read, as outputs in x's type."""
    return self.output(y.reshape(x.shape)).astype(x.dtype)

  def _heads(
    self, x: Float[Array, "B T N*K"], norm: RMSNorm | None = None
  ) -> Float[Array, "B T N K"]:
    """Splits heads and normalises them."""
    x = x.reshape(*x.shape[:2], -1, self.dim // self.heads)
    return x if norm is None else norm(x)

  def _score(
    self, x: Float[Array, "B T N K"], position: Int[Array, "#B T"]
  ) -> Float[Array, "B T N K"]:
    """The vectors of the kernel: turned, and scaled by half the exponent."""
    if self.rope_base:
      x = rotate(x, position, self.rope_base)
    if self.temperature is not None:
      return self.temperature(x)
    wide = x.astype(am.state_dtype(x.dtype)) * self.score_scale**0.5
    return wide.astype(x.dtype)
