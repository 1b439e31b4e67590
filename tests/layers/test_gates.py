"""Gates: where they start, what they reach, and that they stay finite."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import memory as am
from atlas_jax.layers import MemoryGates
from atlas_jax.layers.gates import EDGE, default_rate, logit

MEMORY = am.Memory(chunk=16)


def with_logits(memory, z):
  """Gates whose every logit is z."""
  gates = MemoryGates(8, 2, memory, rate_max=0.5)
  for affine in (gates.decay, gates.momentum, gates.rate, gates.window):
    affine.bias = nnx.Param(jnp.full_like(affine.bias[...], z))
  return gates


def test_start_values_do_not_depend_on_x():
  gates = MemoryGates(
    8,
    2,
    MEMORY,
    decay_start=0.98,
    momentum_start=0.7,
    rate_max=0.5,
    rate_start=0.2,
  )
  x = 100 * jax.random.normal(jax.random.key(0), (2, 3, 8))
  out = gates(x)
  np.testing.assert_allclose(jnp.exp(out.log_decay), 0.98, rtol=1e-6)
  np.testing.assert_allclose(jnp.exp(out.log_momentum), 0.7, rtol=1e-6)
  np.testing.assert_allclose(out.rate, 0.1, rtol=1e-5)
  np.testing.assert_allclose(out.window[..., 0], 1 / (1 + math.exp(-2)))
  np.testing.assert_allclose(out.window[..., 1:], 0.5)


@pytest.mark.parametrize("z", [-1e4, -20.0, 0.0, 20.0, 1e4])
def test_values_and_slopes_are_finite_and_in_range(z):
  gates = with_logits(MEMORY, z)
  x = jnp.zeros((1, 1, 8))
  out = gates(x)
  for gate in jax.tree.leaves(out):
    assert jnp.all(jnp.isfinite(gate))
  assert jnp.all(out.log_decay <= 0)
  assert jnp.all(out.log_momentum <= 0)
  assert jnp.all((out.rate >= 0) & (out.rate <= 0.5))
  assert jnp.all((out.window >= 0) & (out.window <= 1))
  total = lambda gates: sum(jnp.sum(g) for g in jax.tree.leaves(gates(x)))
  slope = jax.grad(total)(gates)
  assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(slope))


def test_keep_and_do_not_write_are_reached_exactly():
  open_, closed = with_logits(MEMORY, 7.0), with_logits(MEMORY, -7.0)
  x = jnp.zeros((1, 1, 8))
  np.testing.assert_array_equal(open_(x).log_decay, 0.0)
  np.testing.assert_array_equal(closed(x).rate, 0.0)
  # Just inside, both are small but not zero: three decades are in reach.
  open_, closed = with_logits(MEMORY, 6.5), with_logits(MEMORY, -6.5)
  assert 0 < 1 - jnp.exp(open_(x).log_decay[0, 0, 0, 0]) < 1e-3
  assert 0 < closed(x).rate[0, 0, 0] < 1e-3


def test_a_closed_gate_can_open_again():
  x = jnp.zeros((1, 1, 8))
  for z, value in (
    (8.0, lambda gates: jnp.sum(gates(x).log_decay)),
    (-8.0, lambda gates: jnp.sum(gates(x).rate)),
  ):
    gates = with_logits(MEMORY, z)
    slope = jax.grad(value)(gates)
    steepest = max(
      float(jnp.max(slope.decay.bias[...])),
      float(jnp.max(slope.rate.bias[...])),
    )
    assert steepest > 1e-5


def test_log_decay_loses_no_bits_near_one():
  z = 5.0
  exact = math.log((1 + EDGE) / (1 + math.exp(-z)))
  got = with_logits(MEMORY, z)(jnp.zeros((1, 1, 8))).log_decay
  np.testing.assert_allclose(got, exact, rtol=1e-5)


def test_gates_are_float32_for_bfloat16():
  gates = MemoryGates(8, 2, MEMORY)
  out = gates(jnp.ones((1, 2, 8), jnp.bfloat16))
  assert {gate.dtype for gate in jax.tree.leaves(out)} == {jnp.dtype("float32")}


def test_a_memory_has_only_the_gates_it_uses():
  plain = am.Memory(
    optimizer=am.GradientDescent(), retention=am.NoRetention(), window=1
  )
  gates = MemoryGates(8, 2, plain)
  assert list(nnx.to_pure_dict(nnx.state(gates))) == ["rate"]
  out = gates(jnp.ones((1, 2, 8)))
  assert out.log_decay.shape == (1, 2, 2, 0)
  np.testing.assert_array_equal(out.window, 1.0)
  channel = dataclasses.replace(plain, retention=am.ChannelRetention(4))
  out = MemoryGates(8, 2, channel)(jnp.ones((1, 2, 8)))
  assert out.log_decay.shape == (1, 2, 2, 4)


def test_a_window_does_not_mean_a_larger_step():
  gd = am.Memory(optimizer=am.GradientDescent(), window=1)
  wide = dataclasses.replace(gd, window=16)
  x = jnp.zeros((1, 1, 8))
  out = MemoryGates(8, 1, wide)(x)
  summed = default_rate(wide, 8) * jnp.sum(out.window)
  np.testing.assert_allclose(summed, default_rate(gd, 8), rtol=1e-6)


def test_rates_by_position_are_those_of_test_time_training():
  one = dataclasses.replace(
    MEMORY,
    network=am.MLP(depth=1),
    optimizer=am.GradientDescent(),
    window=1,
    rate_by_position=True,
  )
  assert default_rate(one, 8) == 1 / 8
  assert default_rate(dataclasses.replace(one, network=am.MLP()), 8) == 0.1 / 8


def test_thresholds_are_as_long_as_an_error_before_training():
  memory = dataclasses.replace(
    MEMORY,
    objective=am.SwitchedHuber(),
    optimizer=am.GradientDescent(),
    window=1,
  )
  gates = MemoryGates(32, 2, memory)
  assert sorted(nnx.to_pure_dict(nnx.state(gates))) == [
    *("decay", "rate", "threshold")
  ]
  out = gates(jnp.ones((1, 3, 32)))
  np.testing.assert_allclose(out.threshold, np.full((1, 3, 2), 4.0), rtol=1e-6)
  assert out.matrix_rate is None


def test_a_step_per_chunk_has_rates_by_matrix():
  memory = dataclasses.replace(
    MEMORY,
    network=am.GatedMLP(),
    optimizer=am.ChunkMuon(),
    window=1,
    read="start",
  )
  gates = MemoryGates(32, 2, memory)
  assert sorted(nnx.to_pure_dict(nnx.state(gates))) == [
    *("decay", "matrix_rate", "momentum")
  ]
  out = gates(jnp.ones((1, 3, 32)))
  np.testing.assert_allclose(
    out.matrix_rate, np.full((1, 3, 2, 3), 1e-3), rtol=1e-4
  )
  np.testing.assert_array_equal(out.rate, 1.0)
  assert out.threshold is None


def test_logit_inverts_the_sigmoid():
  for share in (1e-3, 0.5, 0.999):
    assert 1 / (1 + math.exp(-logit(share))) == pytest.approx(share)
