"""Attention to rows that are given, beside those that all queries see."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax import attention as aa
from atlas_jax.attention.core import in_pieces, widened
from atlas_jax.attention.full import seeing_persistent, with_persistent
from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.memory.config import state_dtype
from atlas_jax.memory.numerics import HIGHEST


class SegmentAttention(AttentionMixer):
  """An `AttentionMixer` in parts, for layers that bring rows of their own.

  Arguments as there, without a window.
  """

  def entries(
    self, rows: Float[Array, "B N D"], position: Int[Array, "#B N"]
  ) -> aa.Entries:
    """Keys and values of rows at these positions."""
    key = self._heads(self.key(rows), self.key_norm, position)
    return aa.Entries(key, self._heads(self.value(rows)))

  def over(
    self,
    x: Float[Array, "B T D"],
    position: Int[Array, "#B T"],
    entries: aa.Entries,
    seen: Bool[Array, "#B T S"],
  ) -> Float[Array, "B T D"]:
    """Attends from x to entries and to the persistent tokens, and projects.

    Args:
      x: Inputs.
      position: Of each input.
      entries: Keys and values of S rows.
      seen: Which input sees which row.
    """
    persistent = self._persistent()
    keys, values = (
      widened(x)
      for x in with_persistent(persistent, entries.key, entries.value)
    )

    def some(part: tuple[Array, Array]) -> Float[Array, "B T H K"]:
      query, mask = part[0], seeing_persistent(persistent, part[1][:, None])
      key, value = (x.astype(query.dtype) for x in (keys, values))
      return aa.attend(query, key, value, mask, scale=self.softmax_scale)

    y = in_pieces(some, (self._queries(x, position), seen))
    return self.output(y.reshape(x.shape)).astype(x.dtype)

  def over_by_definition(
    self,
    x: Float[Array, "B D"],
    position: Int[Array, "B"],
    entries: aa.Entries,
    seen: Bool[Array, "B S"],
  ) -> Float[Array, "B D"]:
    """As `over` for one token per row, from the definition of the softmax."""
    query = self._queries(x[:, None], position[:, None])[:, 0]
    keys, values = [entries.key], [entries.value]
    persistent = self._persistent()
    if persistent is not None:
      for all_, first in ((keys, persistent.key), (values, persistent.value)):
        all_.append(jnp.broadcast_to(first, (len(x), *first.shape[1:])))
      ones = jnp.ones((len(x), persistent.key.shape[1]), bool)
      seen = jnp.concatenate([seen, ones], axis=1)
    wide = state_dtype(x.dtype)
    key, value = (
      jnp.repeat(
        jnp.concatenate(parts, axis=1).astype(wide),
        self.heads // self.kv_heads,
        axis=2,
      )
      for parts in (keys, values)
    )
    scale = self.softmax_scale or query.shape[-1] ** -0.5
    score = scale * jnp.einsum(
      "bhk,bshk->bhs", query.astype(wide), key, precision=HIGHEST
    )
    score = jnp.where(seen[:, None], score, -jnp.inf)
    highest = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    weight = jnp.exp(score - highest)
    share = weight / jnp.sum(weight, axis=-1, keepdims=True)
    y = jnp.einsum("bhs,bshk->bhk", share, value, precision=HIGHEST)
    return self.output(y.reshape(x.shape).astype(x.dtype)).astype(x.dtype)

  def _queries(
    self, x: Float[Array, "B T D"], position: Int[Array, "#B T"]
  ) -> Float[Array, "B T H K"]:
    return self._heads(self.query(x), self.query_norm, position)
