"""Every memory at many lengths and in float32; with --full only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from tests.memory.cases import assert_close, make_params, make_tokens
from tests.memory.memories import MEMORIES, MORE_MEMORIES

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.full]

ALL = {**MEMORIES, **MORE_MEMORIES}
SHORT = (1, 2, 3, 4, 5, 7, 8, 9, 77)
LONG = (1023, 1334)


@pytest.fixture(autouse=True)
def few_programs():
  """Drops what a test compiled: a process cannot hold programs without end."""
  yield
  applied.cache_clear()
  jax.clear_caches()


@functools.cache
def applied(memory, implementation="xla"):
  return jax.jit(
    functools.partial(am.apply, memory, implementation=implementation)
  )


def calm(memory, length):
  """Inputs with small steps, which keep also an unbounded memory finite."""
  tokens = make_tokens(memory, length=length)
  rate = tokens.gates.rate * (0.2 if length < 100 else 0.01)
  return tokens._replace(gates=tokens.gates._replace(rate=rate))


def apart(got, want) -> np.ndarray:
  """Relative distance of two outputs [B, T, H, V], up to each token."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  size = np.sqrt(np.mean(np.square(want)))
  error = np.sqrt(np.mean(np.square(got - want), axis=(0, 2, 3)))
  assert np.all(np.isfinite(error))
  return np.maximum.accumulate(error / size)


def compare(name, length, dtype, limit):
  """The fast form, in one call and in two, against the definition.

  A memory that learns can be chaotic: a change of its inputs by one rounding
  error may grow without limit. Where it does, the forms must stay as near to
  each other as a call is to itself with its inputs so changed.
  """
  memory = ALL[name]
  to = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
  params, tokens = to((make_params(memory), calm(memory, length)))
  want = applied(memory, "reference")(params, *tokens)
  got = applied(memory)(params, *tokens)
  # Norms have a relative slack of 1e-12.
  slight = 1e-12 if dtype == jnp.float64 else 1e-6
  moved = tokens._replace(
    key=tokens.key * (1 + slight), value=tokens.value * (1 - slight)
  )
  near = apart(applied(memory)(params, *moved).y, got.y)
  allowed = np.maximum(limit, 30 * near)
  assert np.all(apart(got.y, want.y) <= allowed)
  assert np.all(apart(got.y[:, :16], want.y[:, :16]) <= limit)
  if length > 2:
    cut = length // 3 + 1
    run = applied(memory)
    start = run(params, *jax.tree.map(lambda x: x[:, :cut], tokens))
    rest = jax.tree.map(lambda x: x[:, cut:], tokens)
    end = run(params, *rest, start.state)
    y = jnp.concatenate([start.y, end.y], axis=1)
    assert np.all(apart(y, got.y) <= allowed)
    if allowed[-1] < 1e-3:
      assert_close(end.state, got.state, 30 * allowed[-1])
      assert_close(end.state, want.state, 30 * allowed[-1])


@pytest.mark.parametrize("length", SHORT)
@pytest.mark.parametrize("name", ALL)
def test_short_calls_in_float64(name, length):
  compare(name, length, jnp.float64, 1e-8)


@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("name", ALL)
def test_long_calls_in_float64(name, length):
  compare(name, length, jnp.float64, 1e-6)


@pytest.mark.parametrize("length", [5, 64, 255])
@pytest.mark.parametrize("name", ALL)
def test_calls_in_float32(name, length):
  """1e-5 without Muon, 1e-4 with it."""
  memory = ALL[name]
  limit = 1e-4 if memory.orthogonalises else 1e-5
  compare(name, length, jnp.float32, limit)


@pytest.mark.parametrize("length", [64, 255, 1023])
def test_muon_every_sixteen_in_float32(length):
  memory = am.Memory(
    am.Polynomial(2, key_width=2),
    am.MLP(expansion=1.5),
    optimizer=am.Muon(every=16),
    window=8,
    chunk=32,
  )
  ALL["muon_every_sixteen"] = memory
  compare("muon_every_sixteen", length, jnp.float32, 1e-4)


@pytest.mark.parametrize("length", [1024, 16384])
@pytest.mark.parametrize("name", ["omeganet", "titans", "atlas"])
def test_bfloat16_inputs_over_many_tokens(name, length):
  """Stated tolerance: 2 % of the outputs' norm against float32, Muon 10 %."""
  memory = ALL[name]
  tokens = make_tokens(memory, length=length)
  params = jax.tree.map(lambda x: x.astype(jnp.float32), make_params(memory))
  # The same rounded inputs, so that only the computation differs.
  to = lambda dtype, tree: jax.tree.map(lambda x: x.astype(dtype), tree)
  rounded = to(jnp.bfloat16, tokens)
  got = applied(memory, "xla")(params, *rounded).y
  want = applied(memory, "xla")(params, *to(jnp.float32, rounded)).y
  error = np.asarray(got, np.float32) - want
  limit = 0.1 if memory.orthogonalises else 0.02
  assert np.linalg.norm(error) < limit * np.linalg.norm(want)
