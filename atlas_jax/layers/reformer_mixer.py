"""Attention to like tokens only, found by hashing (arXiv 2001.04451).

One projection gives queries; keys are the same vectors at unit length, and the
query's own length is the inverse temperature (as in the authors' code, whose
keys of length sqrt(K) are divided by sqrt(K); the paper leaves that out). A
token attends to all earlier tokens of its document that share its bucket in any
round, and to itself only if there is none. The paper sorts tokens by bucket
and cuts them into chunks, which changes with what follows; here nothing is cut,
so that a sequence can be read in any parts and step by step.
"""

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax import attention as aa
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.cached_mixer import CachedMixer, check_attention
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.rms_norm import RMSNorm
from atlas_jax.layers.rotary import rotate
from atlas_jax.memory.config import state_dtype
from atlas_jax.memory.numerics import unit


class ReformerMixer(CachedMixer):
  """A layer that mixes tokens whose queries are alike.

  Buckets are those of the vectors before the rotary embedding: alike is what
  has the same direction, wherever it stands. The hashes are functions of the
  seed and the sizes, the same in every layer, and no parameters. A vector on
  the border of two buckets may fall into another one when it is computed in
  another way.

  The state holds all tokens of the document and grows, see `CachedMixer`.

  Args:
    dim: Width of x; `heads` must divide it.
    heads: Queries per token, each of width K = dim / heads.
    buckets: Of every hash: even, or 1, which is attention to all.
    rounds: Hashes.
    hash_seed: Of the random rotations that make them.
    rope_base: Of the rotary embedding; 0: none, and no positions.
    qk_norm: Normalises the queries of every head before all else.
    softmax_scale: Factor on q k.
    qk_epsilon: Length below which a key is not stretched to length 1.
    norm_epsilon: Of the norm of queries.
    scale: Factor on all starting weights.
    output_scale: Further factor on those of the output projection.
    dtype: Type of activations and of the state. Softmax, hashes and rotations
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
    buckets: int = 32,
    rounds: int = 4,
    hash_seed: int = 0,
    rope_base: float = 10000.0,
    qk_norm: bool = False,
    softmax_scale: float = 1.0,
    qk_epsilon: float = 1e-6,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    check_attention(dim, heads, rope_base, implementation)
    if buckets < 1 or (buckets > 1 and buckets % 2):
      raise UserError(f"{buckets} buckets: use an even number, or 1")
    if rounds < 1 or hash_seed < 0:
      raise UserError(
        f"rounds {rounds}, hash_seed {hash_seed}: use 1 or more rounds and a "
        "seed of 0 or more"
      )
    self.dim = dim
    self.heads = heads
    self.buckets = buckets
    self.rounds = rounds
    self.hash_seed = hash_seed
    self.rope_base = rope_base
    self.softmax_scale = softmax_scale
    self.qk_epsilon = qk_epsilon
    self.dtype = jnp.dtype(dtype)
    self.implementation = implementation

    linear = functools.partial(
      Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.query = linear(dim, dim, scale=scale)
    self.value = linear(dim, dim, scale=scale)
    self.query_norm = (
      RMSNorm(dim // heads, epsilon=norm_epsilon, param_dtype=param_dtype)
      if qk_norm
      else None
    )
    self.output = linear(dim, dim, scale=scale * output_scale)

  def init_state(self, batch: int) -> aa.Cache:
    """The state of `batch` rows before their first token."""
    empty = jnp.zeros(
      (batch, 0, self.heads, self.dim // self.heads), self.dtype
    )
    bucket = jnp.zeros((batch, 0, self.heads, self.rounds), jnp.int32)
    return aa.Cache(
      aa.Entries(empty, empty, bucket), jnp.zeros((batch,), jnp.int32)
    )

  def attend(
    self,
    x: Float[Array, "B T D"],
    state: aa.Cache | None,
    arrangement: Arrangement,
    *,
    grow: bool,
  ) -> tuple[Float[Array, "B T D"], aa.Cache]:
    """Outputs in x's type, anything at padding, and the state after."""
    restart, lengths = arrangement.restart, arrangement.lengths
    query, entries = self._inputs(x, state, arrangement)
    key, value, bucket = entries
    scale = self.softmax_scale
    if self.implementation == "reference":
      y, after = aa.recurrent(
        query,
        key,
        value,
        bucket=bucket,
        past=self.init_state(x.shape[0]) if state is None else state,
        restart=restart,
        valid=arrangement.valid,
        scale=scale,
        grow=grow,
      )
      assert isinstance(after, aa.Cache)
    elif grow:
      y = aa.full_attention(
        query,
        key,
        value,
        bucket=bucket,
        restart=restart,
        past=state,
        scale=scale,
      )
      after = aa.extend(state, entries, restart=restart, lengths=lengths)
    else:
      after = aa.extend(state, entries, lengths=lengths, grow=False)
      y = aa.step_attention(query, after, bucket=bucket, scale=scale)
    return self.output(y.reshape(x.shape)).astype(x.dtype), after

  def _inputs(
    self,
    x: Float[Array, "B T D"],
    state: aa.Cache | None,
    arrangement: Arrangement,
  ) -> tuple[Float[Array, "B T H K"], aa.Entries]:
    """Queries, and what is kept of the tokens."""
    split = (*x.shape[:2], self.heads, self.dim // self.heads)
    query = self.query(x).reshape(split)
    if self.query_norm is not None:
      query = self.query_norm(query)
    value = self.value(x).reshape(split)
    wide = query.astype(state_dtype(query.dtype))
    key = unit(wide, epsilon=self.qk_epsilon)
    bucket = aa.bucket_of(
      key, rounds=self.rounds, buckets=self.buckets, seed=self.hash_seed
    )
    key = key.astype(query.dtype)
    if self.rope_base:
      position = aa.positions(
        x.shape[1], arrangement.restart, None if state is None else state.count
      )
      query, key = (rotate(y, position, self.rope_base) for y in (query, key))
    return query, aa.Entries(key, value, bucket)
