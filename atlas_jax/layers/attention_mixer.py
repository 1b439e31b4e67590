"""Softmax attention between projections: full, or to a window of tokens.

`x -> q, k, v -> (RMSNorm of q and k) -> rotary embedding -> attention ->
output`, without biases: the attention of Llama (arXiv 2302.13971), grouped
queries as in arXiv 2305.13245. With a window it is sliding-window attention,
with global tokens besides the pattern of Longformer (arXiv 2004.05150).
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from atlas_jax import attention as aa
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.cached_mixer import CachedMixer, check_attention
from atlas_jax.layers.initial import Source, normal
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.layers.rotary import rotate


class AttentionMixer(CachedMixer):
  """A layer that mixes tokens by softmax attention.

  Without a window the state holds all tokens of the document and grows: a call
  adds room for its tokens, a step needs room made by `resize`. A row whose
  tokens had no room gives NaN from then on. With a window the state has
  constant size.

  Args:
    dim: Width of x; `heads` must divide it.
    heads: Queries per token, each of width K = dim / heads.
    kv_heads: Keys and values per token, each shared by heads / kv_heads
      queries; 0: as many as queries.
    window: Tokens that a token sees, itself included; 0: all before it.
    global_tokens: First tokens of a document that all later ones see, beyond
      the window.
    persistent: Learned tokens that all tokens see: rows of width dim, which go
      through the projections of keys and values and have no position.
    rope_base: Of the rotary embedding; 0: none, and no positions.
    qk_norm: Normalises queries and keys of every head.
    softmax_scale: Factor on q k; None: `K ** -0.5`.
    norm_epsilon: Of those norms.
    scale: Factor on all starting weights.
    output_scale: Further factor on those of the output projection.
    dtype: Type of activations and of the state. Softmax, norms and rotations
      are at least float32.
    param_dtype: Type of the parameters.
    implementation: "reference" (token by token), "xla" (in pieces), or "auto",
      which is the same.
    rngs: Source of the starting weights.

  Raises:
    UserError: Options that do not fit together.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    kv_heads: int = 0,
    window: int = 0,
    global_tokens: int = 0,
    persistent: int = 0,
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
    if min(window, global_tokens, persistent) < 0:
      raise UserError(
        f"window {window}, global_tokens {global_tokens}, persistent "
        f"{persistent}: use 0 or more"
      )
    if global_tokens and not window:
      raise UserError("global tokens need a window: all tokens see all")
    width = dim // heads
    self.dim = dim
    self.heads = heads
    self.kv_heads = kv_heads
    self.window = window
    self.global_tokens = global_tokens
    self.rope_base = rope_base
    self.softmax_scale = softmax_scale
    self.dtype = jnp.dtype(dtype)
    self.implementation = implementation

    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.query = linear(dim, dim, scale=scale)
    self.key = linear(dim, kv_heads * width, scale=scale)
    self.value = linear(dim, kv_heads * width, scale=scale)
    self.query_norm, self.key_norm = (
      RMSNorm(width, epsilon=norm_epsilon, param_dtype=param_dtype)
      if qk_norm
      else None
      for _ in range(2)
    )
    # As large as what a norm before the layer gives.
    self.persistent = (
      nnx.Param(normal(rngs, (persistent, dim), 1.0, param_dtype))
      if persistent
      else None
    )
    self.output = linear(dim, dim, scale=scale * output_scale)

  def init_state(self, batch: int) -> aa.Cache | aa.WindowCache:
    """The state of `batch` rows before their first token."""
    shape = (batch, 0, self.kv_heads, self.dim // self.heads)
    empty = jnp.zeros(shape, self.dtype)
    none = aa.Entries(empty, empty)
    if self.window:
      return aa.empty_window(none, self.window, self.global_tokens)
    return aa.Cache(none, jnp.zeros((batch,), jnp.int32))

  def attend(
    self,
    x: Float[Array, "B T D"],
    state: Any,
    arrangement: Arrangement,
    *,
    grow: bool,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """Outputs in x's type, anything at padding, and the state after."""
    restart, lengths = arrangement.restart, arrangement.lengths
    position = aa.positions(
      x.shape[1], restart, None if state is None else state.count
    )
    query = self._heads(self.query(x), self.query_norm, position)
    key = self._heads(self.key(x), self.key_norm, position)
    value = self._heads(self.value(x))
    options: dict[str, Any] = {
      "persistent": self._persistent(),
      "scale": self.softmax_scale,
    }
    entries = aa.Entries(key, value)
    before: Any = self.init_state(x.shape[0]) if state is None else state
    if self.implementation == "reference":
      y, after = aa.recurrent(
        query,
        key,
        value,
        past=before,
        window=self.window,
        global_tokens=self.global_tokens,
        restart=restart,
        valid=arrangement.valid,
        grow=grow,
        **options,
      )
    elif self.window and not grow:
      after = aa.append(before, entries, lengths=lengths)
      y = aa.step_window(query, after, **options)
    elif self.window:
      y = aa.window_attention(
        query,
        key,
        value,
        window=self.window,
        global_tokens=self.global_tokens,
        restart=restart,
        past=state,
        **options,
      )
      after = aa.extend_window(
        before, entries, restart=restart, lengths=lengths
      )
    elif grow:
      y = aa.full_attention(
        query, key, value, restart=restart, past=state, **options
      )
      after = aa.extend(state, entries, restart=restart, lengths=lengths)
    else:
      after = aa.extend(state, entries, lengths=lengths, grow=False)
      y = aa.step_attention(query, after, **options)
    return self.output(y.reshape(x.shape)).astype(x.dtype), after

  def _heads(
    self,
    x: Float[Array, "B T N*K"],
    norm: RMSNorm | None = None,
    position: Int[Array, "#B T"] | None = None,
  ) -> Float[Array, "B T N K"]:
    """Splits heads, normalises them and turns them to their positions."""
    x = x.reshape(*x.shape[:2], -1, self.dim // self.heads)
    if norm is not None:
      x = norm(x)
    if position is not None and self.rope_base:
      x = rotate(x, position, self.rope_base)
    return x

  def _persistent(self) -> aa.Entries | None:
    """Keys and values that all tokens see."""
    if self.persistent is None:
      return None
    rows = self.persistent[...][None]
    return aa.Entries(
      self._heads(self.key(rows), self.key_norm), self._heads(self.value(rows))
    )
