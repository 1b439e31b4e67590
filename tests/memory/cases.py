"""Memories, inputs and comparisons that the tests of the memory share."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax import memory as am

BATCH, LENGTH, HEADS, WIDTH = 2, 13, 2, 4


class Tokens(NamedTuple):
  """What a layer hands to a memory, [B, T, H, ...]."""

  query: jax.Array
  key: jax.Array
  value: jax.Array
  gates: am.Gates


def value_width(memory: am.Memory) -> int:
  """Unequal to the key width where the network allows it."""
  return WIDTH + 2 if isinstance(memory.network, am.Matrix) else WIDTH


def make_params(memory, *, heads=HEADS, width=WIDTH, values=None, seed=0):
  """Outer parameters with noise on each, so that none has a special value.

  Drawn by numpy: compiling a random generator for every shape takes longer
  than the tests.
  """
  random = np.random.default_rng(seed)
  make = functools.partial(
    am.init_params,
    memory=memory,
    heads=heads,
    key_width=width,
    value_width=values or value_width(memory),
    dtype=jnp.float64,
  )
  shapes = jax.eval_shape(make, jax.random.key(0))

  def draw(path, leaf):
    noise = random.normal(size=leaf.shape)
    match path[-1].key:
      case "coefficient":
        degrees = np.arange(len(noise))
        start = [math.factorial(i) ** -0.5 for i in degrees]
        return np.array(start) + 0.1 * noise
      case "scale":
        return 1 + 0.1 * noise
      case "position":
        return 0.05 * noise
      case "offset":
        return 0.1 * noise
      case name if name.startswith("sketch"):
        return noise
      case _:
        return 1.1 * noise / math.sqrt(max(leaf.shape[-2:]))

  return jax.tree.map(jnp.asarray, jax.tree.map_with_path(draw, shapes))


def make_tokens(
  memory,
  *,
  batch=BATCH,
  length=LENGTH,
  heads=HEADS,
  width=WIDTH,
  values=None,
  seed=1,
) -> Tokens:
  """Random inputs with gates over the range that layers use."""
  random = np.random.default_rng(seed)
  normal = lambda *shape: random.normal(size=(batch, length, heads, *shape))
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  gates = am.Gates(
    np.log(sigmoid(normal(memory.retention.groups) + 2)),
    np.log(sigmoid(normal() + 1)),
    0.4 * sigmoid(normal()),
    sigmoid(normal(memory.window)),
  )
  if memory.objective.gated:
    # Errors are about as long: some tokens fall on each side.
    gates = gates._replace(threshold=4 * np.exp(0.3 * normal()))
  if memory.steps_once:
    matrices = len(memory.entries(width, values or value_width(memory)))
    gates = gates._replace(matrix_rate=0.1 * np.exp(normal(matrices)))
  tokens = Tokens(
    unit(normal(width)),
    unit(normal(width)),
    2 * normal(values or value_width(memory)),
    gates,
  )
  return jax.tree.map(jnp.asarray, tokens)


def at(tokens, *place):
  """The numbers of one place, as numpy arrays."""
  return jax.tree.map(lambda x: np.asarray(x[place]), tokens)


def split_state(state: am.MemoryState) -> tuple[Any, Any]:
  """The differentiable part of a state, and its counts."""
  state = am.without_cache(state)
  counts = (state.seen, state.count)
  return state._replace(seen=None, count=None), counts


def join_state(floats, counts) -> am.MemoryState:
  """The inverse of `split_state`."""
  return floats._replace(seen=counts[0], count=counts[1])


class Made(NamedTuple):
  """What a call makes; also weights for a linear function of it."""

  y: jax.Array
  inner_loss: jax.Array
  state: Any


class Result(NamedTuple):
  """What a call makes and the gradients of a linear function of it."""

  made: Made
  params: Any
  tokens: Tokens
  state: Any


def made_of(output: am.Output) -> Made:
  """The parts of an output that are compared, without a cache."""
  return Made(output.y, output.inner_loss, am.without_cache(output.state))


def make_probe(memory, params, *, length=LENGTH, seed=2) -> Made:
  """Random weights for every number that a call returns."""
  random = np.random.default_rng(seed)
  shape = (BATCH, length, HEADS)
  fresh = fresh_state(memory, params)
  state, _ = split_state(fresh)
  values = fresh.tail_value.shape[-1]
  draw = lambda x: jnp.asarray(random.normal(size=x.shape))
  return Made(
    draw(np.zeros((*shape, values))),
    draw(np.zeros(shape)),
    jax.tree.map(draw, state),
  )


def fresh_state(memory, params) -> am.MemoryState:
  """The state before the first token."""
  return am.init_state(memory, params, BATCH, key_width=WIDTH)


@functools.cache
def differentiated(memory, implementation="xla", form="dual", segments=4):
  """The compiled `(params, tokens, state, mask, segment_ids, probe) -> Result`.

  Mask and documents are always given, so that one compilation serves every
  test of a memory.
  """

  def loss(params, tokens, floats, counts, mask, segment_ids, probe):
    out = am.apply(
      memory,
      params,
      *tokens,
      join_state(floats, counts),
      mask=mask,
      segment_ids=segment_ids,
      max_segments=segments,
      implementation=implementation,
      form=form,
    )
    made = made_of(out)
    floats, _ = split_state(out.state)
    terms = jax.tree.map(
      lambda w, x: jnp.sum(w * x), probe, made._replace(state=floats)
    )
    return jax.tree.reduce(jnp.add, terms), made

  gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
  compiled = jax.jit(gradient)

  def run(params, tokens, state, mask, segment_ids, probe) -> Result:
    floats, counts = split_state(state)
    gradients, made = compiled(
      params, tokens, floats, counts, mask, segment_ids, probe
    )
    return Result(made, *gradients)

  return run


@functools.cache
def stepped(memory):
  """The compiled step of a memory."""
  return jax.jit(functools.partial(am.step, memory))


@functools.cache
def cached(memory):
  """The compiled `with_cache` of a memory."""
  function = functools.partial(am.with_cache, memory)
  return jax.jit(function)


def difference(got, want) -> float:
  """Largest relative difference of any array of two equal trees.

  Relative to the array's norm, and to a millionth of the whole tree's for
  arrays that are almost nothing.
  """
  assert jax.tree.structure(got) == jax.tree.structure(want)
  pairs = []
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    pairs.append((np.linalg.norm(a - b), np.linalg.norm(b)))
  if not pairs:
    return 0.0
  assert np.all(np.isfinite(pairs)), "not finite"
  floor = 1e-6 * max(size for _, size in pairs) + 1e-300
  return max(error / max(size, floor) for error, size in pairs)


def assert_close(got, want, limit: float) -> None:
  """Fails where two trees differ by more than `limit`, see `difference`."""
  error = difference(got, want)
  assert error <= limit, f"relative difference {error:.2e}, limit {limit:.0e}"


def same_bits(got, want) -> bool:
  """Whether all arrays of two trees are equal to the bit."""
  return jax.tree.all(
    jax.tree.map(
      lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), got, want
    )
  )


def finite(tree) -> bool:
  """Whether no array holds inf or NaN."""
  return all(bool(np.all(np.isfinite(x))) for x in jax.tree.leaves(tree))
