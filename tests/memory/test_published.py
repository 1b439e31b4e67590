"""Published memories, each against a plain loop of its own equations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from tests.memory.calls import call, with_gates
from tests.memory.cases import (
  BATCH,
  HEADS,
  LENGTH,
  assert_close,
  at,
  make_params,
  make_tokens,
)
from tests.memory.memories import MEMORIES, MORE_MEMORIES

pytestmark = pytest.mark.usefixtures("x64")


def deep(memory):
  """The memory's function of weights and one input, and a head's start."""
  params, tokens = make_params(memory), make_tokens(memory)
  table = memory.entries(4, 4)

  def read(weights, norm, x):
    def linear(name, x):
      if table[name].lift.bias:
        x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
      return x @ weights[name].T

    shared = {"norm": norm, "features": {}}
    return memory.network.apply(linear, x[None], am.Identity(), shared)[0]

  return params, tokens, jax.jit(read)


def unbounded(memory, **changes):
  return dataclasses.replace(memory, bound=None, **changes)


@pytest.mark.parametrize("chunk", [1, 4])
def test_ttt_takes_the_mean_of_its_steps(chunk):
  """arXiv 2407.04620: after i tokens of a chunk, (1 / i + p_i) their sum."""
  memory = unbounded(MEMORIES["ttt"], chunk=chunk)
  params, tokens, read = deep(memory)
  tokens = with_gates(tokens, window=1.0)
  got = call(memory, params, tokens)
  add = functools.partial(jax.tree.map, jnp.add)

  @jax.jit
  @jax.grad
  def gradient(w, norm, key, value):
    return 0.5 * jnp.sum(jnp.square(read(w, norm, key) - value))

  for row in range(BATCH):
    for head in range(HEADS):
      own = lambda tree, head=head: jax.tree.map(lambda x: x[head], tree)
      w, norm = own(params["start"]), own(params["norm"])
      for t in range(LENGTH):
        place = t % chunk
        if place == 0:
          frozen, summed = w, jax.tree.map(jnp.zeros_like, w)
        q, k, v, gate = at(tokens, row, t, head)
        g = gradient(frozen, norm, k, v)
        summed = add(summed, jax.tree.map(lambda x, g=gate: g.rate * x, g))
        share = max(0.0, 1 / (place + 1) + float(params["position"][place]))
        w = add(frozen, jax.tree.map(lambda x, f=share: -f * x, summed))
        assert_close(got.y[row, t, head], read(w, norm, q), 1e-12)


def test_moneta_is_its_recurrence():
  """arXiv 2504.13173, Eq. 24-25, with chunks of one token."""
  memory = unbounded(
    MEMORIES["moneta"], chunk=1, retention=am.LqRetention(floor=1e-9)
  )
  params, tokens, read = deep(memory)
  tokens = with_gates(tokens, window=1.0)
  tokens = tokens._replace(
    gates=tokens.gates._replace(rate=0.02 * tokens.gates.rate)
  )
  got = call(memory, params, tokens)

  @jax.jit
  @jax.grad
  def gradient(w, norm, key, value):
    error = read(w, norm, key) - value
    return jnp.sum(jnp.power(jnp.square(error) + 1e-6, 1.5))

  a = {n: np.asarray(x[1]) for n, x in params["start"].items()}
  norm = {n: x[1] for n, x in params["norm"].items()}

  def weights(a):
    return {n: x / np.sum(x**4) ** 0.5 for n, x in a.items()}

  for t in range(LENGTH):
    q, k, v, gate = at(tokens, 1, t, 1)
    g = gradient(weights(a), norm, k, v)
    keep = np.exp(gate.log_decay[0])
    a = {n: keep * a[n] - gate.rate * np.asarray(g[n]) for n in a}
    assert_close(got.y[1, t, 1], read(weights(a), norm, q), 1e-9)


@pytest.mark.parametrize("chunk", [1, 4])
def test_memora_is_its_recurrence(chunk):
  """arXiv 2504.13173, Eq. 27, with true logarithms.

  Inside a chunk weights descend linearly from those of its start; at its end
  the logarithms take all of its steps instead.
  """
  memory = unbounded(MORE_MEMORIES["memora"], chunk=chunk)
  params, tokens, read = deep(memory)
  tokens = with_gates(tokens, window=1.0)
  got = call(memory, params, tokens)

  @jax.jit
  @jax.grad
  def gradient(w, norm, key, value):
    return 0.5 * jnp.sum(jnp.square(read(w, norm, key) - value))

  def simplex(z):
    share = np.exp(z - np.max(z))
    return memory.retention.total(z.shape) * share / np.sum(share)

  w = {n: simplex(np.asarray(x[1])) for n, x in params["start"].items()}
  norm = {n: x[1] for n, x in params["norm"].items()}
  start, logs = w, {n: np.log(x) for n, x in w.items()}
  for t in range(LENGTH):
    q, k, v, gate = at(tokens, 1, t, 1)
    g = gradient(start, norm, k, v)
    keep = np.exp(gate.log_decay[0])
    step = lambda x, g=g, keep=keep, eta=gate.rate: {
      n: keep * x[n] - eta * np.asarray(g[n]) for n in x
    }
    w, logs = step(w), step(logs)
    if (t + 1) % chunk == 0:
      start = w = {n: simplex(z) for n, z in logs.items()}
    assert_close(got.y[1, t, 1], read(w, norm, q), 1e-9)


def test_yaad_within_its_thresholds_is_half_the_square():
  memory = unbounded(MORE_MEMORIES["yaad"])
  plain = dataclasses.replace(memory, objective=am.L2(factor=0.5))
  params, tokens = make_params(memory), make_tokens(memory)
  tokens = with_gates(tokens, threshold=1e9)
  without = tokens._replace(gates=tokens.gates._replace(threshold=None))
  got, want = call(memory, params, tokens), call(plain, params, without)
  assert_close(got.y, want.y, 1e-12)


def test_lact_is_its_update():
  """arXiv 2505.23884: read, then momentum, orthogonalise, restore row norms."""
  memory = unbounded(
    MEMORIES["lact"], optimizer=am.ChunkMuon(steps=3, epsilon=1e-9)
  )
  params, tokens, _ = deep(memory)
  got = call(memory, params, tokens)
  w = {n: np.asarray(x[0]) for n, x in params["start"].items()}
  norms = {n: np.linalg.norm(x, axis=1, keepdims=True) for n, x in w.items()}
  s = dict.fromkeys(w, 0.0)
  chunk = memory.chunk
  order = ("in", "gate", "out")

  def silu(x):
    return x / (1 + np.exp(-x))

  for begin in range(0, LENGTH, chunk):
    now = slice(begin, begin + chunk)
    q, k, v, gate = at(tokens, 1, now, 0)
    read = (silu(q @ w["in"].T) * (q @ w["gate"].T)) @ w["out"].T
    assert_close(got.y[1, now, 0], jnp.asarray(read), 1e-8)
    if len(k) < chunk:
      break
    inner, linear = k @ w["in"].T, k @ w["gate"].T
    sigmoid = 1 / (1 + np.exp(-inner))
    back = v @ w["out"]
    slopes = {
      "in": back * linear * sigmoid * (1 + inner * (1 - sigmoid)),
      "gate": back * silu(inner),
      "out": v,
    }
    seen = {"in": k, "gate": k, "out": silu(inner) * linear}
    rate = gate.rate * gate.window[:, 0]
    mean = np.mean(np.exp(gate.log_momentum))
    for place, name in enumerate(order):
      share = (rate * gate.matrix_rate[:, place])[:, None]
      s[name] = mean * s[name] + (share * slopes[name]).T @ seen[name]
      x = s[name] / np.linalg.norm(s[name])
      tall = x.shape[0] > x.shape[1]
      x = x.T if tall else x
      for a, b, c in memory.optimizer.coefficients[:3]:
        g = x @ x.T
        x = a * x + (b * g + c * g @ g) @ x
      moved = w[name] + (x.T if tall else x)
      length = np.linalg.norm(moved, axis=1, keepdims=True)
      w[name] = norms[name] * moved / length
  assert begin > chunk
  assert_close(got.state.weights["out"][1, 0], jnp.asarray(w["out"]), 1e-8)
