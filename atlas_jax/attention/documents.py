"""Where in a call the document of each token begins."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def document_starts(
  length: int,
  restart: Bool[Array, "B T"] | None = None,
  count: Int[Array, "B"] | None = None,
) -> Int[Array, "#B T"]:
  """The index of the first token of each token's document.

  A token sees the tokens from there to itself: the tokens of a document are
  consecutive. The place of token t in its document is `t` less its start.

  Args:
    length: T.
    restart: Tokens that begin a document; None: none does.
    count: Tokens of the document that goes on from a state; None: 0.

  Returns:
    int32; negative, `-count`, where the document began before the call.
  """
  begin = jnp.zeros((1,), jnp.int32) if count is None else -count
  begin = begin[:, None]
  if restart is None:
    return jnp.broadcast_to(begin, (begin.shape[0], length))
  index = jnp.arange(length, dtype=jnp.int32)[None]
  found = jax.lax.cummax(jnp.where(restart, index, -1), axis=1)
  return jnp.where(found >= 0, found, begin)


def positions(
  length: int,
  restart: Bool[Array, "B T"] | None = None,
  count: Int[Array, "B"] | None = None,
) -> Int[Array, "#B T"]:
  """The place of each token in its document; arguments as above, int32."""
  index = jnp.arange(length, dtype=jnp.int32)[None]
  return index - document_starts(length, restart, count)


def last_start(
  restart: Bool[Array, "B T"] | None, count: Int[Array, "B"]
) -> Int[Array, "B"]:
  """The start of the document that is the last in each row."""
  if restart is None:
    return -count
  index = jnp.arange(restart.shape[1], dtype=jnp.int32)[None]
  found = jnp.max(jnp.where(restart, index, -1), axis=1, initial=-1)
  return jnp.where(found >= 0, found, -count)
