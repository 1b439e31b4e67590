"""Exponential-kernel memories in their special cases, in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.attention import exponential as ex
from tests.attention.exponential_cases import inputs_of
from tests.layers.helpers import assert_close, jit

LENGTH = 9


@pytest.fixture(autouse=True)
def x64():
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


def tokens_of(window=1):
  """Vectors of 4 query heads on 2 heads of keys, and gates."""
  memory = ex.ExponentialMemory(linear=True, window=window)
  return inputs_of(memory, LENGTH, batch=1)


def opened(gates):
  """Gates that keep all and write all."""
  return gates._replace(
    log_decay=jnp.zeros_like(gates.log_decay),
    rate=jnp.ones_like(gates.rate),
    window=jnp.ones_like(gates.window),
  )


def read(memory, inputs, gates):
  return jit(lambda *x: ex.apply(memory, {}, *x).y)(inputs, gates)


def each_head(inputs):
  """Numpy vectors [T, .] of every query head, with the number of its keys."""
  arrays = jax.tree.map(np.asarray, inputs)
  for head in range(arrays.query.shape[2]):
    shared = head // 2
    yield (
      head,
      shared,
      arrays.score_query[0, :, head],
      arrays.score_key[0, :, shared],
      arrays.value[0, :, shared],
    )


def test_a_linear_deep_transformer_is_softmax_attention():
  inputs, gates = tokens_of()
  y = read(ex.ExponentialMemory(linear=True), inputs, opened(gates))
  expected = jax.nn.dot_product_attention(
    *(
      x.astype(jnp.float32)
      for x in (inputs.score_query, inputs.score_key, inputs.value)
    ),
    scale=1.0,
    is_causal=True,
  )
  assert_close(y, expected, 1e-6)


def test_without_a_normaliser_it_is_the_sum_of_eq_26():
  inputs, gates = tokens_of()
  memory = ex.ExponentialMemory(linear=True, normalised=False)
  y = read(memory, inputs, opened(gates))
  for head, _, query, key, value in each_head(inputs):
    weights = np.tril(np.exp(query @ key.T))
    np.testing.assert_allclose(y[0, :, head], weights @ value, rtol=1e-12)


def test_linear_swdt_sums_over_windows():
  inputs, gates = tokens_of(window=3)
  memory = ex.ExponentialMemory(
    linear=True, normalised=False, window=3, chunk=4
  )
  y = read(memory, inputs, gates)
  for head, shared, query, key, value in each_head(inputs):
    alpha = np.exp(gates.log_decay[0, :, shared, 0])
    rate = np.asarray(gates.rate[0, :, shared])
    gamma = np.asarray(gates.window[0, :, shared])
    share = np.zeros(LENGTH)
    for t in range(LENGTH):
      share *= alpha[t]
      for j in range(min(3, t + 1)):
        share[t - j] += rate[t] * gamma[t, j]
      expected = (share * np.exp(key @ query[t])) @ value
      np.testing.assert_allclose(y[0, t, head], expected, rtol=1e-10)


def test_linear_dot_appends_what_it_has_not_predicted():
  # M_t = M_(t-1) + eta (v_t - M_(t-1) phi(k_t)) phi(k_t)^T: every token's slope
  # at the weights before it, with the 2 of the slope in the rate.
  inputs, gates = tokens_of()
  gates = opened(gates)
  gates = gates._replace(rate=jnp.full_like(gates.rate, 0.3))
  memory = ex.ExponentialMemory(
    objective=am.L2(), linear=True, normalised=False, chunk=1
  )
  y = read(memory, inputs, gates)
  for head, _, query, key, value in each_head(inputs):
    errors = []
    for t in range(LENGTH):
      predicted = sum(
        (0.6 * errors[i] * np.exp(key[i] @ key[t]) for i in range(t)),
        np.zeros_like(value[t]),
      )
      errors.append(value[t] - predicted)
      expected = sum(
        0.6 * errors[i] * np.exp(key[i] @ query[t]) for i in range(t + 1)
      )
      np.testing.assert_allclose(y[0, t, head], expected, rtol=1e-9)


def test_polynomials_of_growing_degree_are_the_exponential():
  # exp(s) less its Taylor polynomial is at most |s|^(p+1) e^|s| / (p+1)!.
  inputs, gates = tokens_of()
  gates = gates._replace(window=jnp.ones_like(gates.window))
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  inputs = inputs._replace(
    score_query=unit(inputs.score_query)[:, :, ::2],
    score_key=unit(inputs.score_key),
    query=inputs.query[:, :, ::2],
  )
  exact = read(
    ex.ExponentialMemory(linear=True, normalised=False), inputs, gates
  )
  written = jnp.sum(
    jnp.abs(gates.rate[..., None] * inputs.value), axis=(1, -1)
  ).max()
  errors = []
  for degree in (1, 2, 4, 6):
    memory = am.Memory(
      features=am.Polynomial(degree=degree),
      network=am.Matrix(),
      objective=am.DotProduct(),
      optimizer=am.GradientDescent(),
      window=1,
      chunk=LENGTH,
      bound=None,
    )
    params = am.init_params(
      jax.random.key(0),
      memory,
      heads=2,
      key_width=4,
      value_width=4,
      dtype=jnp.float64,
    )
    params["start"] = jax.tree.map(jnp.zeros_like, params["start"])
    vectors = inputs.score_query, inputs.score_key, inputs.value
    out = jit(lambda *x, m=memory: am.apply(m, *x).y)(params, *vectors, gates)
    errors.append(float(jnp.max(jnp.abs(out - exact))))
    assert errors[-1] < written * math.e / math.factorial(degree + 1)
  # It falls as 1 / (p + 1)!, within what the scores make of it.
  for (p, error), (q, less) in zip(
    zip((1, 2, 4), errors[:-1], strict=True),
    zip((2, 4, 6), errors[1:], strict=True),
    strict=True,
  ):
    assert less < 2 * error * math.factorial(p + 1) / math.factorial(q + 1)
  assert errors[-1] > 1e-9


def test_a_deep_memory_with_lam_traced_to_zero_attends():
  inputs, gates = tokens_of()
  memory = ex.ExponentialMemory(expansion=2.0, attends=True)
  params = ex.init_params(jax.random.key(0), memory, 2, 4, jnp.float64)
  mixed = jit(lambda lam, *x: ex.apply(memory, params, *x, lam=lam).y)
  attention = read(ex.ExponentialMemory(linear=True), inputs, gates)
  assert_close(mixed(jnp.float64(0.0), inputs, gates), attention, 1e-12)
  # lam stands outside the inner objective: what is mixed is linear in it.
  ends = [mixed(jnp.float64(x), inputs, gates) for x in (0.0, 0.5, 1.0)]
  assert_close(ends[1], (ends[0] + ends[2]) / 2, 1e-12)
  deep = ex.ExponentialMemory(expansion=2.0)
  alone = jit(lambda *x: ex.apply(deep, params, *x).y)(inputs, gates)
  assert_close(ends[2], alone, 1e-12)
  assert not np.allclose(ends[0], ends[2])


def test_an_empty_history_leaves_the_starting_weights():
  inputs, gates = tokens_of()
  gates = gates._replace(rate=jnp.zeros_like(gates.rate))
  memory = ex.ExponentialMemory(expansion=2.0)
  params = ex.init_params(jax.random.key(0), memory, 2, 4, jnp.float64)
  y = jit(lambda *x: ex.apply(memory, params, *x).y)(inputs, gates)
  arrays = jax.tree.map(np.asarray, params)
  for head in range(4):
    query = np.asarray(inputs.query[0, :, head])
    inner, outer = arrays["in"][head // 2], arrays["out"][head // 2]
    z = query @ inner.T + arrays["bias"][head // 2]
    expected = query + np.asarray(jax.nn.gelu(z)) @ outer.T
    np.testing.assert_allclose(y[0, :, head], expected, rtol=1e-10)
