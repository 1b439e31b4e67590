"""How well a memory remembers, without any training around it.

`one_fact`: a single association is written in one go among tokens that are
ignored, and asked for 100 tokens later. `stream`: associations are shown one
after another, several times, and all are asked for at the end. Errors are
relative, `|y - v|^2 / |v|^2`: 0 is perfect, 1 is what a memory that says zero
gets.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax import memory as am
from atlas_jax.memory.numerics import unit

RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_BEFORE, _AFTER = 40, 100


def one_fact(
  memory: am.Memory, width: int = 32, seeds: int = 8
) -> Float[Array, "rates"]:
  """Mean relative error of the fact, for every rate of `RATES`."""
  length = _BEFORE + 1 + _AFTER
  written = jnp.zeros((length,)).at[_BEFORE].set(1.0)
  # The last token is the fact once more, unwritten; all others differ.
  pairs = jnp.arange(length, dtype=jnp.int32).at[-1].set(_BEFORE)
  return _errors(memory, written, pairs, length - 1, width, seeds)


def stream(
  memory: am.Memory,
  pairs: int = 32,
  times: int = 8,
  width: int = 32,
  seeds: int = 8,
) -> Float[Array, "rates"]:
  """Mean relative error over all `pairs`, for every rate of `RATES`.

  `pairs * times` should be a multiple of the chunk.
  """
  shown = pairs * times
  index = jnp.arange(shown + pairs, dtype=jnp.int32)
  written = (index < shown).astype(jnp.float32)
  return _errors(memory, written, index % pairs, shown, width, seeds)


def _errors(
  memory: am.Memory,
  written: Float[Array, "T"],
  pairs: Int[Array, "T"],
  first: int,
  width: int,
  seeds: int,
) -> Float[Array, "rates"]:
  """Token t is pair `pairs[t]`: written where `written` is 1, and asked for.

  Errors are means over the tokens from `first` on.

  Each combination of a rate and a seed is one head. All is kept (decay 1), the
  momentum factor is 0, and a token writes itself only.
  """
  length, rates = written.shape[0], len(RATES)
  heads = rates * seeds
  keys = jax.random.split(jax.random.key(3), 3)
  draw = lambda key: jax.random.normal(key, (1, length, 1, seeds, width))
  spread = lambda x: jnp.broadcast_to(
    x[:, pairs], (1, length, rates, seeds, width)
  ).reshape(1, length, heads, width)
  key, value = spread(unit(draw(keys[0]))), spread(draw(keys[1]))
  rate = jnp.repeat(jnp.asarray(RATES, jnp.float32), seeds)[None, None]
  window = jnp.arange(memory.window, dtype=jnp.int32) == 0
  shape = (1, length, heads)
  gates = am.Gates(
    log_decay=jnp.zeros((*shape, 1)),
    log_momentum=jnp.full(shape, -jnp.inf),
    rate=rate * written[None, :, None],
    window=jnp.broadcast_to(
      window.astype(jnp.float32), (*shape, memory.window)
    ),
  )
  # All rates start from the same weights.
  params = am.init_params(
    keys[2], memory, heads=seeds, key_width=width, value_width=width
  )
  tile = lambda w: jnp.tile(w, (rates, *[1] * (w.ndim - 1)))
  params["start"] = jax.tree.map(tile, params["start"])
  y = jax.jit(lambda *args: am.apply(memory, params, *args).y)(
    key, key, value, gates
  )
  error = jnp.sum(jnp.square(y - value), -1) / jnp.sum(jnp.square(value), -1)
  error = jnp.mean(error[0, first:].reshape(-1, rates, seeds), axis=(0, 2))
  return jnp.where(jnp.isfinite(error), error, jnp.inf)
