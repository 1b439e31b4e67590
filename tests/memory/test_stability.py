"""Hostile inputs: everything stays finite, whatever a layer may send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.memory.bounds import LONGEST_MOMENTUM
from tests.memory.cases import Tokens, finite

WIDTH = 8


def bounded(features=None, network=None, optimizer=None, **changes):
  """A memory with the default bound."""
  small = {"chunk": 8, "window": 4} | changes
  return am.Memory(
    features or am.Polynomial(2, key_width=4),
    network or am.MLP(expansion=2),
    optimizer=optimizer or am.GradientDescent(),
    **small,
  )


MEMORIES = {
  "atlas": bounded(optimizer=am.Muon(every=4)),
  "omeganet": bounded(),
  "titans": bounded(am.Identity(), optimizer=am.Momentum(), window=1),
  "depth_four": bounded(
    am.Identity(), am.MLP(depth=4, expansion=2, bias=True), am.GradientDescent()
  ),
}
NORMED = am.MLP(expansion=2, layer_norm=True)
LOOSE = am.Bound(error_clip=1e4)
MEMORIES |= {
  "ttt": bounded(
    am.Identity(bias=True),
    am.MLP(expansion=2, layer_norm=True, bias=True),
    objective=am.L2(factor=0.5),
    retention=am.NoRetention(),
    window=1,
    rate_by_position=True,
    bound=LOOSE,
  ),
  "moneta": bounded(
    am.Identity(),
    NORMED,
    objective=am.Lp(),
    retention=am.LqRetention(),
    window=1,
    bound=LOOSE,
  ),
  "yaad": bounded(
    am.Identity(),
    NORMED,
    objective=am.SwitchedHuber(),
    window=1,
    bound=LOOSE,
  ),
  "memora": bounded(
    am.Identity(),
    NORMED,
    objective=am.L2(factor=0.5),
    retention=am.KLRetention(),
    window=1,
    bound=LOOSE,
  ),
  "memora_with_thresholds": bounded(
    am.Identity(),
    NORMED,
    objective=am.SwitchedHuber(),
    retention=am.KLRetention(),
    window=1,
    bound=LOOSE,
  ),
  "lact": bounded(
    am.Identity(),
    am.GatedMLP(expansion=1.0, activation="silu", residual=False),
    am.ChunkMuon(),
    objective=am.DotProduct(),
    retention=am.WeightNorm(),
    window=1,
    read="start",
  ),
}
MORE_MEMORIES = {
  "ttt_linear": bounded(
    am.Identity(bias=True),
    am.MLP(depth=1, layer_norm=True),
    objective=am.L2(factor=0.5),
    retention=am.NoRetention(),
    window=1,
    chunk=16,
    rate_by_position=True,
    bound=LOOSE,
  ),
  "powers_without_norm": bounded(
    objective=am.Lp(4.0), retention=am.LqRetention(6.0)
  ),
  "gated": bounded(
    am.Identity(), am.GatedMLP(expansion=2), am.Momentum(), read="before"
  ),
  "matrix": bounded(am.Identity(), am.Matrix()),
  "depth_one": bounded(network=am.MLP(depth=1), optimizer=am.Momentum()),
  "depth_three": bounded(am.Identity(), am.MLP(depth=3), am.Momentum()),
  "depth_four_momentum": bounded(
    network=am.MLP(depth=4), optimizer=am.Momentum()
  ),
  "depth_four_muon": bounded(
    network=am.MLP(depth=4), optimizer=am.Muon(every=8)
  ),
  "normalised_huber": bounded(
    network=am.MLP(layer_norm=True), objective=am.Huber()
  ),
  "diagonal_budget": bounded(
    optimizer=am.Momentum(), bound=am.Bound(budget="diagonal")
  ),
  "dot_product": bounded(objective=am.DotProduct()),
}

NAMES = (
  "ordinary",
  "one token",
  "one token, open",
  "open",
  "open, no momentum",
  "alternating extremes",
  "alternating extremes, open",
  "zero keys",
  "zero everything",
  "huge values",
  "huge values, once",
  "huge keys",
  "huge keys, open",
  "forget all",
  "forget all, open",
  "keep all",
  "write nothing",
  "no threshold",
  "look at nothing",
  "almost shut",
  "almost open",
  "absurd values",
)
NEVER = -np.inf  # log of a gate that is exactly 0


def ordinary(memory, length, seed=0) -> Tokens:
  """One row of one head, with ordinary gates."""
  random = np.random.default_rng(seed)
  normal = lambda *shape: random.normal(size=(length, 1, *shape))
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  vectors = unit(normal(WIDTH)), unit(normal(WIDTH)), normal(WIDTH)
  gates = am.Gates(
    -np.exp(normal(memory.retention.groups) - 4),
    -np.exp(normal() - 2),
    0.1 * np.exp(-np.square(normal())),
    np.exp(-np.square(normal(memory.window))),
  )
  if memory.objective.gated:
    gates = gates._replace(threshold=3 * np.exp(normal()))
  if memory.steps_once:
    matrices = len(memory.entries(WIDTH, WIDTH))
    gates = gates._replace(matrix_rate=np.exp(normal(matrices)))
  return Tokens(*vectors, gates)


def gates(tokens: Tokens, **constants) -> Tokens:
  changed = {
    name: np.full_like(getattr(tokens.gates, name), value)
    for name, value in constants.items()
    if getattr(tokens.gates, name) is not None
  }
  return tokens._replace(gates=tokens.gates._replace(**changed))


def opened(tokens: Tokens) -> Tokens:
  """Every gate as far open as it goes."""
  return gates(tokens, log_decay=0.0, log_momentum=0.0, rate=1.0, window=1.0)


def repeated(tokens: Tokens) -> Tokens:
  return jax.tree.map(lambda x: np.repeat(x[:1], len(x), 0), tokens)


def scaled(tokens: Tokens, **factors) -> Tokens:
  changed = {name: f * getattr(tokens, name) for name, f in factors.items()}
  return tokens._replace(**changed)


def alternating(tokens: Tokens, size: float) -> Tokens:
  one = repeated(tokens)
  sign = np.where(np.arange(len(one.key)) % 2, -1.0, 1.0)[:, None, None]
  return one._replace(value=size * sign * np.ones_like(one.value))


def hostile(memory, length) -> dict[str, Tokens]:
  """Rows that broke one memory or another."""
  base = ordinary(memory, length)
  one = repeated(base)
  rows = {
    "ordinary": base,
    "one token": one,
    "one token, open": opened(one),
    "open": opened(base),
    "open, no momentum": gates(opened(one), log_momentum=NEVER),
    "alternating extremes": alternating(base, 1e4),
    "alternating extremes, open": opened(alternating(base, 1e4)),
    "zero keys": opened(scaled(base, key=0.0, query=0.0)),
    "zero everything": scaled(base, key=0.0, query=0.0, value=0.0),
    "huge values": opened(scaled(base, value=1e4)),
    "huge values, once": scaled(one, value=1e4),
    "huge keys": scaled(base, key=1e4, query=1e4),
    "huge keys, open": opened(scaled(one, key=1e4, query=1e4, value=1e4)),
    "forget all": gates(base, log_decay=NEVER),
    "forget all, open": gates(opened(base), log_decay=NEVER),
    "keep all": gates(base, log_decay=0.0, log_momentum=0.0),
    "write nothing": gates(base, rate=0.0, matrix_rate=0.0),
    "no threshold": gates(opened(base), threshold=0.0),
    "look at nothing": gates(base, window=0.0),
    # Logits of 20 and -20: almost, but not exactly, 1 and 0.
    "almost shut": gates(
      base,
      log_decay=-20.0,
      log_momentum=-20.0,
      rate=2e-9,
      threshold=2e-9,
      matrix_rate=2e-9,
    ),
    "almost open": gates(
      one, log_decay=-2e-9, log_momentum=-2e-9, rate=1.0, window=1.0
    ),
    "absurd values": opened(scaled(base, value=1e30)),
  }
  assert rows.keys() == set(NAMES)
  return rows


# Within what a layer may send: activations up to 1e4.
WITHIN = [name for name in NAMES if name != "absurd values"]


def call(memory, length, backward: bool, names=NAMES):
  """Each hostile row's outputs, and gradients if asked for."""
  rows = hostile(memory, length)
  rows = {name: rows[name] for name in names}
  tokens = jax.tree.map(
    lambda *x: jnp.asarray(np.stack(x), jnp.float32), *rows.values()
  )
  params = am.init_params(
    jax.random.key(0), memory, heads=1, key_width=WIDTH, value_width=WIDTH
  )
  # Each row with parameters of its own, so that its gradients are told apart.
  apart = jax.tree.map(
    lambda p: jnp.broadcast_to(p, (len(rows), *p.shape)), params
  )

  def one_row(params, tokens):
    row = jax.tree.map(lambda x: x[None], tokens)
    out = am.apply(memory, params, *row)
    probe = jnp.cos(jnp.arange(out.y.size, dtype=jnp.float32))
    return jnp.sum(out.y * probe.reshape(out.y.shape)), out

  if backward:
    one_row = jax.grad(one_row, argnums=(0, 1), has_aux=True)
  made, out = jax.jit(jax.vmap(one_row))(apart, tokens)
  report = {}
  for i, name in enumerate(rows):
    row = functools.partial(jax.tree.map, lambda x, i=i: np.asarray(x[i]))
    loss = out.inner_loss if name != "absurd values" else ()
    report[name] = {
      "outputs": row((out.y, loss)),
      "state": row((out.state.weights, out.state.momentum)),
      "gradients": row(made) if backward else (),
    }
  return report


def assert_finite(report):
  bad = [
    f"{part} of {name!r}"
    for name, parts in report.items()
    for part, arrays in parts.items()
    if not finite(arrays)
  ]
  assert not bad, ", ".join(bad)


@pytest.mark.parametrize("name", MEMORIES)
def test_values_and_gradients_are_finite(name):
  memory = MEMORIES[name]
  report = call(memory, 4 * memory.chunk + 3, backward=True)
  assert_finite(report)
  # The caps hold: no weight has left its ball.
  for parts in report.values():
    weights, momentum = parts["state"]
    for w in weights.values():
      shape = w.shape[-2:]
      usual = memory.retention.start_scale(shape) * np.sqrt(np.prod(shape))
      cap = memory.bound.weight_cap * usual
      assert np.linalg.norm(w) <= cap * 1.001
    for s in momentum.values():
      cap = memory.bound.error_clip * np.sqrt(WIDTH)
      if memory.orthogonalises:
        cap = LONGEST_MOMENTUM
      assert np.linalg.norm(s) <= cap * 1.001


def test_the_bare_equations_diverge():
  """The rows above are hostile: without the bound they overflow."""
  memory = bounded(am.Identity(), optimizer=am.Momentum(), bound=None)
  report = call(memory, 128, backward=False)
  broken = [n for n, parts in report.items() if not finite(parts)]
  assert len(broken) >= 4, broken


@pytest.mark.full
@pytest.mark.parametrize("name", [*MEMORIES, *MORE_MEMORIES])
def test_values_are_finite_after_many_tokens(name):
  memory = {**MEMORIES, **MORE_MEMORIES}[name]
  assert_finite(call(memory, 65536, backward=False))


@pytest.mark.full
@pytest.mark.parametrize("name", [*MEMORIES, *MORE_MEMORIES])
def test_gradients_are_finite_over_many_tokens(name):
  memory = {**MEMORIES, **MORE_MEMORIES}[name]
  assert_finite(call(memory, 4096, backward=True, names=WITHIN))
