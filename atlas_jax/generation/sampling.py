"""Draws a token for each row from its logits.

A row's draw is a function of its own logits, settings, seed and number of
tokens drawn before, so that it does not depend on the batch the row is in. All
settings are arrays: changing them compiles nothing.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt32

from atlas_jax.config import field
from atlas_jax.errors import UserError

NOT_FINITE = -1
"""What is drawn from logits that are not all finite."""

_SEEDS = 2**32
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn.

  First the logits are divided by the temperature, then all but the `top_k`
  most likely tokens are dropped, then of those left all but the fewest that
  together have a share of at least `top_p`. Tokens with equal logits are kept
  or dropped together.

  Raises:
    UserError: A value is out of its range.
  """

  temperature: float = field(
    1.0, "0 takes the most likely token; 1 draws as the model predicts."
  )
  top_k: int = field(
    0, "Draw only among this many of the most likely tokens; 0: among all."
  )
  top_p: float = field(
    1.0,
    "Draw only among the fewest tokens that together have this share; 1: "
    "among all.",
  )

  def __post_init__(self):
    if not 0.0 <= self.temperature < math.inf:
      raise UserError(
        f"the temperature is {self.temperature}; give a finite number, 0 "
        "(always the most likely token) or more"
      )
    if not 0 <= self.top_k <= _MOST:
      raise UserError(
        f"top_k is {self.top_k}; give a number of tokens, or 0 for all"
      )
    if not 0.0 < self.top_p <= 1.0:
      raise UserError(f"top_p is {self.top_p}; give a share above 0, up to 1")


GREEDY = Sampling(temperature=0.0)
"""Takes the most likely token."""


class Controls(NamedTuple):
  """Settings of each row, as arrays."""

  seed: UInt32[Array, "B"]
  temperature: Float32[Array, "B"]
  top_k: Int[Array, "B"]
  top_p: Float32[Array, "B"]


def controls(
  batch: int, sampling: Sampling, seed: int | Sequence[int]
) -> Controls:
  """Settings for a batch whose rows differ by their seeds.

  Args:
    batch: Number of rows.
    sampling: For all rows.
    seed: One for each row; or one number, and row i has `seed + i`.

  Raises:
    UserError: The seeds are too few or too many, or out of range.
  """
  seeds = (
    [seed + row for row in range(batch)]
    if isinstance(seed, int | np.integer)
    else list(seed)
  )
  if len(seeds) != batch:
    raise UserError(
      f"there are {len(seeds)} seeds for {batch} prompts; give one for each, "
      "or a single number"
    )
  for value in seeds:
    if not 0 <= value < _SEEDS:
      raise UserError(
        f"the seed {value} is out of range; give 0 to {_SEEDS - 1}"
      )

  def full(value: float, dtype) -> Array:
    return jnp.full((batch,), value, dtype)

  return Controls(
    seed=jnp.array(seeds, jnp.uint32),
    temperature=full(sampling.temperature, jnp.float32),
    top_k=full(sampling.top_k, jnp.int32),
    top_p=full(sampling.top_p, jnp.float32),
  )


def sample(
  logits: Float[Array, "B vocab"],
  controls: Controls,
  drawn: UInt32[Array, "B"],
) -> Int[Array, "B"]:
  """Draws one token for each row.

  Args:
    logits: Of the next token.
    controls: Each row's settings.
    drawn: How many tokens each row has drawn before, with its seed.

  Returns:
    Token ids, int32; `NOT_FINITE` in rows with a logit that is NaN or
    infinite.
  """
  finite = jnp.all(jnp.isfinite(logits), axis=-1)
  # Differences from the largest, so that no temperature makes them overflow.
  logits = logits - jnp.max(logits, axis=-1, keepdims=True)
  greedy = controls.temperature == 0.0
  scale = jnp.where(greedy, 1.0, controls.temperature)
  scaled = logits / scale[:, None]
  truncates = (controls.top_k > 0) | (controls.top_p < 1.0)
  # Sorting a large vocabulary costs as much as a small model's step.
  kept = jax.lax.cond(
    jnp.any(truncates & ~greedy),
    lambda x: jax.vmap(_truncate)(x, controls.top_k, controls.top_p),
    lambda x: x,
    scaled,
  )

  def draw(logits: Array, seed: Array, drawn: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(seed), drawn)
    return jax.random.categorical(key, logits)

  tokens = jnp.where(
    greedy,
    jnp.argmax(logits, axis=-1),
    jax.vmap(draw)(kept, controls.seed, drawn),
  )
  return jnp.where(finite, tokens, NOT_FINITE).astype(jnp.int32)


def _truncate(
  logits: Float[Array, "vocab"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "vocab"]:
  """One row's logits, with -inf for dropped tokens."""
  ordered = jnp.flip(jnp.sort(logits))
  rank = jnp.arange(logits.size, dtype=jnp.int32)
  inside = (top_k == 0) | (rank < top_k)
  share = jax.nn.softmax(jnp.where(inside, ordered, -jnp.inf))
  # A token stays if those before it do not reach the share, the first in any
  # case: a share may be 0 in float32. The sum of all is 1 only up to rounding,
  # which must drop no token where top_p is 1.
  before = jnp.cumsum(share) - share
  inside &= (before < top_p) | (top_p >= 1.0) | (rank == 0)
  least = jnp.min(jnp.where(inside, ordered, jnp.inf))
  return jnp.where(logits >= least, logits, -jnp.inf)
