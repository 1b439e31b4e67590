"""The learning rate's course, and who is decayed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import models
from atlas_jax.training.config import TrainConfig
from atlas_jax.training.optimizer import decay_mask, make_optimizer, schedule
from atlas_jax.training.paths import path_name
from atlas_jax.training.program import split_model


def rate(config: TrainConfig, step: int) -> float:
  """The learning rate of a step, counted from 1."""
  with jax.numpy_dtype_promotion("standard"):
    return float(schedule(config)(jnp.int32(step - 1)))


def test_schedule_warms_up_then_falls_to_the_floor():
  config = TrainConfig(steps=110, warmup=10, learning_rate=2.0, floor=0.25)
  assert rate(config, 1) == pytest.approx(0.2)
  assert rate(config, 10) == pytest.approx(2.0)
  assert rate(config, 60) == pytest.approx((2.0 + 0.5) / 2)
  assert rate(config, 110) == pytest.approx(0.5)
  assert rate(config, 1000) == pytest.approx(0.5)


def test_decay_steps_makes_the_rate_independent_of_steps():
  short = TrainConfig(steps=50, warmup=5, decay_steps=80)
  long = TrainConfig(steps=500, warmup=5, decay_steps=80)
  for step in (1, 5, 30, 80, 120):
    assert rate(short, step) == rate(long, step)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 100), (5, 5)])
def test_short_runs_have_a_finite_positive_rate(steps, warmup):
  config = TrainConfig(steps=steps, warmup=warmup, learning_rate=1.0)
  for step in range(1, steps + 2):
    assert 0 < rate(config, step) <= 1.0


@pytest.mark.parametrize("mixer", models.MIXERS)
def test_only_matrices_decay_and_no_gate_or_memory(mixer):
  config = models.ModelConfig(mixer=mixer, dim=32, layers=2, heads=2)
  _, params = split_model(models.abstract(config, 257))
  mask = decay_mask(params)
  decayed = {
    path_name(path)
    for path, leaf in jax.tree_util.tree_flatten_with_path(mask)[0]
    if leaf
  }
  kernels = {
    f"blocks/mixer/{name}/kernel"
    for name in ("query", "key", "value", "output", "output_gate")
  }
  kernels |= {
    f"blocks/mixer/{name}_convolution/kernel"
    for name in ("query", "key", "value")
  }
  kernels |= {f"blocks/mlp/{name}/kernel" for name in ("gate", "up", "down")}
  assert decayed == kernels | {"embedding"}


def test_low_rank_maps_of_rwkv7_are_not_decayed():
  config = models.ModelConfig(mixer="rwkv7", dim=32, layers=2, heads=2)
  _, params = split_model(models.abstract(config, 257))
  mask = decay_mask(params)["blocks"]["mixer"]
  assert mask["query"]["kernel"]
  for branch in (mask["decay"], mask["rate"], mask["gate"]):
    assert not any(jax.tree.leaves(branch))


def test_a_memory_beside_attention_decays_as_one_alone():
  config = models.ModelConfig(mixer="mag", dim=32, layers=2, heads=2)
  _, params = split_model(models.abstract(config, 257))
  mask = decay_mask(params)["blocks"]["mixer"]
  memory = mask["memory"]
  assert memory["query"]["kernel"]
  assert memory["output"]["kernel"]
  assert mask["attention"]["query"]["kernel"]
  assert not mask["attention"]["persistent"]
  for branch in (memory["memory"], memory["gates"], memory["norm"]):
    assert not any(jax.tree.leaves(branch))


def test_weight_decay_shrinks_only_what_decays():
  config = TrainConfig(warmup=0, learning_rate=0.5, weight_decay=0.1)
  optimizer = make_optimizer(config)
  params = {"out": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
  zero = jax.tree.map(jnp.zeros_like, params)
  with jax.numpy_dtype_promotion("standard"):
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    first = float(schedule(config)(0))
  np.testing.assert_allclose(updates["out"]["kernel"], -first * 0.1, rtol=1e-6)
  np.testing.assert_array_equal(updates["out"]["bias"], 0.0)


def test_gradients_are_clipped_by_their_global_norm():
  # AdamW's update does not see the scale of a gradient, its moments do.
  optimizer = make_optimizer(TrainConfig(clip=1.0, beta1=0.0))
  params = {"a": jnp.zeros(2), "b": jnp.zeros(())}
  grads = {"a": jnp.array([30.0, 0.0]), "b": jnp.array(40.0)}
  with jax.numpy_dtype_promotion("standard"):
    _, state = optimizer.update(grads, optimizer.init(params), params)
  mean = state[1][0].mu
  np.testing.assert_allclose(mean["a"], [0.6, 0.0], rtol=1e-6)
  np.testing.assert_allclose(mean["b"], 0.8, rtol=1e-6)
