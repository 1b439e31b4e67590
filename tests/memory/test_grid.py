"""Every memory at many lengths and in float32; with --full only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from tests.memory.cases import (
  MEMORIES,
  MORE_MEMORIES,
  assert_close,
  made_of,
  make_params,
  make_tokens,
)

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.full]

ALL = {**MEMORIES, **MORE_MEMORIES}
SHORT = (1, 2, 3, 4, 5, 7, 8, 9, 77)
LONG = (1023, 1334)


@functools.cache
def applied(memory, implementation):
  return jax.jit(
    functools.partial(am.apply, memory, implementation=implementation)
  )


def calm(memory, length):
  """Inputs whose gates keep an unbounded memory finite."""
  tokens = make_tokens(memory, length=length)
  if memory.bound is not None and memory.bound.budget is not None:
    return tokens
  rate = tokens.gates.rate * 0.1
  return tokens._replace(gates=tokens.gates._replace(rate=rate))


def compare(name, length, dtype, limit):
  memory = ALL[name]
  to = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
  params, tokens = to((make_params(memory), calm(memory, length)))
  want = applied(memory, "reference")(params, *tokens)
  got = applied(memory, "xla")(params, *tokens)
  assert_close(made_of(got), made_of(want), limit)
  if length > 2:
    cut = min(length - 1, length // 3 + 1)
    first = jax.tree.map(lambda x: x[:, :cut], tokens)
    rest = jax.tree.map(lambda x: x[:, cut:], tokens)
    run = applied(memory, "xla")
    start = run(params, *first)
    end = run(params, *rest, start.state)
    y = jnp.concatenate([start.y, end.y], axis=1)
    assert_close(y, got.y, limit)
    assert_close(end.state, got.state, limit)


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
  """1e-5 without Muon; 1e-4 with it, at lengths up to 64."""
  memory = ALL[name]
  if memory.orthogonalises and length > 64:
    pytest.skip("rounding grows with the number of orthogonalised steps")
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
