"""A language model: embedding, blocks, logits.

The blocks' parameters are stacked, layer by layer, along their first axis, and
one `jax.lax.scan` runs them: a model of 128 layers compiles as fast as one of
two. Blocks of several kinds in turn are stacked turn by turn. Everything here
works under jax's own transformations; use `nnx.split` and `nnx.merge` to have
the parameters as a tree.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.errors import UserError
from atlas_jax.layers import (
  Arrangement,
  Block,
  Linear,
  Mixer,
  RMSNorm,
  Sequence,
  SwiGLU,
  arrange,
)
from atlas_jax.layers.initial import Source, draw_once, normal
from atlas_jax.models.config import ModelConfig
from atlas_jax.models.registry import REGISTRY


class LanguageState(NamedTuple):
  """What later tokens need.

  Attributes:
    blocks: The mixers' states, with an axis of layers before that of rows:
      leaves [layers, B, ...]. With several kinds of mixers it is a tuple, in
      the order of the pattern, of leaves [layers / kinds, B, ...].
  """

  blocks: Any


class Hidden(NamedTuple):
  """What the blocks give; see `Output` for all but the first.

  Attributes:
    hidden: Normalised outputs of the last block, 0 at padding.
  """

  hidden: Float[Array, "B T D"]
  state: LanguageState | None
  metrics: dict[str, Float[Array, ""]]
  by_layer: dict[str, Float[Array, "layers"]]


class Output(NamedTuple):
  """What a language model gives.

  Attributes:
    logits: Of the token after each, float32; 0 at padding.
    state: The state after the last token; None for aligned documents.
    metrics: float32 scalars, means over layers, heads and valid tokens; see
      `atlas_jax.layers.MixerOutput`.
    by_layer: The same for each layer.
  """

  logits: Float[Array, "B T vocab"]
  state: LanguageState | None
  metrics: dict[str, Float[Array, ""]]
  by_layer: dict[str, Float[Array, "layers"]]


class LanguageModel(nnx.Module):
  """Predicts the next token of each of many texts.

  Initial weights: every matrix is normal with variance 1 / inputs, those that
  write to the residual stream (`mixer/output`, `mlp/down`) smaller by
  1 / sqrt(2 layers); norms are 1; gates as `MemoryGates` says; memories as
  `atlas_jax.memory.init_params` says. The embedding has variance 1 / dim and
  enters as it is. The blocks then outweigh it, so that a tied output matrix
  begins near uniform: multiplied by sqrt(dim), as some models do, the token
  just read would be by far its first guess.

  Args:
    config: Sizes and kinds.
    vocab: Number of tokens.
    rngs: Source of the starting weights.

  Raises:
    UserError: The configuration does not fit together.
  """

  def __init__(self, config: ModelConfig, vocab: int, *, rngs: nnx.Rngs):
    config.validate()
    if vocab < 1:
      raise UserError(f"a vocabulary of {vocab} tokens: use 1 or more")
    self.config = config
    self.vocab = vocab
    self.dtype = jnp.dtype(config.dtype)
    param_dtype = jnp.dtype(config.param_dtype)
    rows = -(-vocab // config.vocab_multiple) * config.vocab_multiple
    self.embedding = nnx.Param(
      normal(
        rngs,
        (rows, config.dim),
        config.init_scale * config.dim**-0.5,
        param_dtype,
      )
    )
    turns = config.layers // len(config.mixers)
    keys = jax.random.split(rngs.params(), turns)
    self.blocks = jax.lax.map(
      lambda key: draw_once(lambda rngs: _make_blocks(config, rngs), key),
      keys,
    )
    self.chunk = self.blocks.chunk
    self.longest = self.blocks.longest
    self.norm = RMSNorm(
      config.dim, epsilon=config.norm_epsilon, param_dtype=param_dtype
    )
    if not config.tie_embeddings:
      self.head = Linear(
        config.dim,
        rows,
        scale=config.init_scale,
        dtype=self.dtype,
        param_dtype=param_dtype,
        rngs=rngs,
      )

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    *,
    state: LanguageState | None = None,
    mask: Bool[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    max_segments: int | None = None,
    aligned: bool = False,
  ) -> Output:
    """Reads texts, or their next part, and predicts each next token.

    Args:
      tokens: Token ids; anything at padding.
      state: Where to go on; None is a fresh start.
      mask: False marks padding, anywhere in a row: nothing depends on it.
      segment_ids: Documents of each row, 0 for padding. The first continues
        the state, each further one starts afresh.
      max_segments: Largest number of documents in a row; needed inside jit
        for documents that are not aligned.
      aligned: Promises that documents start at multiples of the chunk, as
        those of our packer do; then no state is taken or returned.

    Raises:
      UserError: Arguments that contradict each other.
    """
    out = self.hidden(
      tokens,
      state=state,
      mask=mask,
      segment_ids=segment_ids,
      max_segments=max_segments,
      aligned=aligned,
    )
    return Output(self.logits(out.hidden), *out[1:])

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    *,
    state: LanguageState | None = None,
    mask: Bool[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    max_segments: int | None = None,
    aligned: bool = False,
  ) -> Hidden:
    """Everything but the logits; arguments as in a call."""
    batch, length = tokens.shape
    arrangement = arrange(
      batch,
      length,
      self._counts(state),
      continues=state is not None,
      mask=mask,
      segment_ids=segment_ids,
      max_segments=max_segments,
      aligned=aligned,
    )
    x = self._embed(arrangement.gather(tokens))
    if arrangement.valid is not None:
      x = jnp.where(arrangement.valid[..., None], x, jnp.zeros((), x.dtype))
    x, blocks, by_layer = self._run(x, state, arrangement)
    return Hidden(
      hidden=self.norm(arrangement.scatter(x)),
      state=None if blocks is None else LanguageState(blocks),
      metrics={name: jnp.mean(value) for name, value in by_layer.items()},
      by_layer=by_layer,
    )

  def logits(
    self, hidden: Float[Array, "*batch D"]
  ) -> Float[Array, "*batch vocab"]:
    """Turns normalised outputs into float32 logits of the vocabulary."""
    if self.config.tie_embeddings:
      matrix = self.embedding[...][: self.vocab].T
    else:
      matrix = self.head.kernel[...][:, : self.vocab]
    return jnp.matmul(
      hidden.astype(self.dtype),
      matrix.astype(self.dtype),
      preferred_element_type=jnp.float32,
    )

  def step(
    self,
    tokens: Int[Array, "B"],
    state: LanguageState,
    *,
    valid: Bool[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B vocab"], LanguageState]:
    """Reads one token per row at constant cost and memory.

    Args:
      tokens: Token ids.
      state: The state before them. One from `prepare` or from another step
        comes back with the same type, so that a loop can carry it; any other
        is prepared first.
      valid: Rows that have a token; the others stay as they are. None is all.

    Returns:
      Float32 logits of the next tokens, and the state after these.
    """

    def body(x: Array, layer: tuple[Mixer, Any]):
      block, before = layer
      return block.step(x, before, valid=valid)

    x, blocks = jax.lax.scan(
      body, self._embed(tokens), (self.blocks, state.blocks)
    )
    return self.logits(self.norm(x)), LanguageState(blocks)

  def prepare(self, state: LanguageState) -> LanguageState:
    """Adds to a state what `step` needs, derived from the rest of it.

    It replays the unfinished chunk, so it is worth doing once, after reading
    the prompt. Calls take a state with or without it and return one without.
    """

    def prepare(layer: tuple[Mixer, Any]) -> Any:
      block, before = layer
      return block.prepare(before)

    # A loop, as its conditions would run both branches under vmap.
    return LanguageState(jax.lax.map(prepare, (self.blocks, state.blocks)))

  def init_state(self, batch: int) -> LanguageState:
    """The state of `batch` rows before their first token."""
    return LanguageState(
      jax.vmap(lambda block: block.init_state(batch))(self.blocks)
    )

  def unprepare(self, state: LanguageState) -> LanguageState:
    """Takes from a state what only steps need."""
    return LanguageState(self.blocks.unprepare(state.blocks))

  def capacity(self, state: LanguageState) -> int | None:
    """Tokens for which a growing state has room; None: constant size."""
    return self.blocks.capacity(_shapes_of_one(state.blocks))

  def resize(self, state: LanguageState, capacity: int) -> LanguageState:
    """A growing state with room for this many tokens; others as they are.

    Room that is taken away must be empty: a row that held more gives NaN from
    then on.
    """
    return LanguageState(
      jax.vmap(lambda block, state: block.resize(state, capacity))(
        self.blocks, state.blocks
      )
    )

  def reset(
    self, state: LanguageState, rows: Bool[Array, "B"]
  ) -> LanguageState:
    """Makes the rows marked True fresh and leaves all others as they are.

    The state comes back as it is from a call, to be prepared anew for steps.
    """
    return LanguageState(
      jax.vmap(lambda block, state: block.reset(state, rows))(
        self.blocks, state.blocks
      )
    )

  def _embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
    return jnp.take(self.embedding[...], tokens, axis=0).astype(self.dtype)

  def _counts(self, state: LanguageState | None):
    """Tokens in the memories' unfinished chunks, the same in all layers."""
    blocks = None if state is None else state.blocks
    return self.blocks.counts(jax.tree.map(lambda leaf: leaf[0], blocks))

  def _run(
    self,
    x: Float[Array, "B T D"],
    state: LanguageState | None,
    arrangement: Arrangement,
  ) -> tuple[Array, Any, dict[str, Array]]:
    """All blocks, one after the other."""

    def body(x: Array, layer: tuple[Mixer, Any]):
      block, before = layer
      out = block.mix(x, before, arrangement)
      return out.y, (out.state, out.metrics)

    if self.config.remat:
      # Inside a scan nothing can undo the recomputation, so XLA may optimise
      # freely.
      body = jax.checkpoint(body, prevent_cse=False)
    before = None if state is None else state.blocks
    x, (after, metrics) = jax.lax.scan(body, x, (self.blocks, before))
    return x, after, metrics


def _shapes_of_one(blocks: Any) -> Any:
  """Shapes of the states of one turn of blocks."""
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), blocks
  )


def _make_blocks(config: ModelConfig, rngs: Source) -> Mixer:
  """One block with its starting weights, or one of each kind."""
  blocks = [_make_block(config, name, rngs) for name in config.mixers]
  return blocks[0] if len(blocks) == 1 else Sequence(blocks)


def _make_block(config: ModelConfig, name: str, rngs: Source) -> Block:
  """A block around the mixer of this name."""
  mixer = REGISTRY[name].make(config, rngs)
  param_dtype = jnp.dtype(config.param_dtype)
  mlp = SwiGLU(
    config.dim,
    config.hidden,
    scale=config.init_scale,
    output_scale=(2 * config.layers) ** -0.5,
    dtype=jnp.dtype(config.dtype),
    param_dtype=param_dtype,
    rngs=rngs,
  )
  return Block(
    config.dim,
    mixer,
    mlp,
    norm_epsilon=config.norm_epsilon,
    param_dtype=param_dtype,
  )
