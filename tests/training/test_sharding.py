"""A step on eight devices is the step on one."""

import math
import re

import chex
import jax
import numpy as np
import optax
import pytest
import standin
from jax.sharding import PartitionSpec

from atlas_jax import config as configs
from atlas_jax import models
from atlas_jax.errors import UserError
from atlas_jax.models.registry import REGISTRY
from atlas_jax.training import sharding
from atlas_jax.training.config import TrainConfig
from atlas_jax.training.optimizer import make_optimizer
from atlas_jax.training.paths import is_stacked, path_name
from atlas_jax.training.program import make_program, split_model

TABLE = (
  (r"mixer$", ("model", "other")),
  (r"embedding$", ("vocab", "model")),
  (r"scale$", ()),
)


def one_step(data, fsdp, **changes):
  config = standin.small_config(train__clip=0.0, **changes)
  mesh = sharding.make_mesh(data, fsdp, jax.devices()[: data * fsdp])
  program = make_program(standin.make(config).build, config.train, mesh)
  state = program.init()
  batch = program.place(standin.some_batch(16))
  return program.train_step(state, batch)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 4), (4, 2)])
def test_meshes_agree_with_one_device(shape, accumulate):
  changes = {"train__batch": 16, "train__accumulate": accumulate}
  alone, expected = one_step(1, 1, **changes)
  state, report = one_step(*shape, **changes)
  chex.assert_trees_all_close(
    jax.device_get(report.metrics),
    jax.device_get(expected.metrics),
    rtol=1e-5,
    atol=1e-5,
  )
  # After one step without clipping the first moment is the gradient / 10.
  chex.assert_trees_all_close(
    jax.device_get(optax.tree.get(state.opt_state, "mu")),
    jax.device_get(optax.tree.get(alone.opt_state, "mu")),
    rtol=1e-5,
    atol=1e-6,
  )
  embedding = state.params["embed"]["embedding"]
  assert embedding.sharding.spec == PartitionSpec(None, "fsdp")
  rows, width = embedding.sharding.shard_shape(embedding.shape)
  assert (rows, width * shape[1]) == embedding.shape


def test_first_weights_do_not_depend_on_the_mesh():
  config = standin.small_config()
  build = standin.make(config).build
  first = [
    make_program(
      build,
      config.train,
      sharding.make_mesh(data, fsdp, jax.devices()[: data * fsdp]),
    ).init()
    for data, fsdp in ((1, 1), (2, 4))
  ]
  chex.assert_trees_all_close(*map(jax.device_get, first), atol=1e-6)


def test_optimizer_state_lies_like_its_parameters():
  mesh = sharding.make_mesh(2, 4)
  params = {"embedding": jax.ShapeDtypeStruct((12, 8), np.float32)}
  optimizer = make_optimizer(TrainConfig())
  shapes = jax.eval_shape(optimizer.init, params)
  placed = sharding.optimizer_shardings(
    optimizer, shapes, sharding.parameter_shardings(params, mesh)
  )
  for moment in ("mu", "nu"):
    spec = optax.tree.get(placed, moment)["embedding"].spec
    assert spec == PartitionSpec(None, "fsdp")
  counts = optax.tree.get_all_with_path(placed, "count")
  assert counts
  assert all(leaf.spec == PartitionSpec() for _, leaf in counts)


def test_fsdp_divides_the_memory_of_a_state():
  config = standin.small_config()
  build = standin.make(config).build
  alone, split = (
    make_program(build, config.train, sharding.make_mesh(d, f)).abstract
    for d, f in ((8, 1), (1, 8))
  )

  def numbers_per_device(program):
    """How much of the embedding one device holds."""
    leaves = jax.tree.leaves(program.params["embed"])
    return sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)

  assert numbers_per_device(alone) == 8 * numbers_per_device(split)


@pytest.mark.parametrize(
  ("name", "shape", "spec"),
  [
    ("embed/embedding", (12, 8), PartitionSpec(None, "fsdp")),
    ("mixer", (8, 3), PartitionSpec("fsdp", None)),
    ("blocks/mixer", (2, 8, 3), PartitionSpec(None, "fsdp", None)),
    ("blocks/scale", (2, 8), PartitionSpec(None, None)),
    ("embed/embedding", (12, 6), PartitionSpec(None, None)),
  ],
)
def test_table_gives_the_axes(name, shape, spec):
  mesh = sharding.make_mesh(2, 4)
  given = sharding.parameter_spec(name, shape, mesh, table=TABLE)
  assert given == spec


def whole_and_split(config):
  """Names of parameters with several axes that lie whole, and split."""
  mesh = sharding.make_mesh(2, 4)
  _, params = split_model(models.abstract(config, 257))
  shardings = sharding.parameter_shardings(params, mesh)
  whole, split = set(), set()
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  for (path, leaf), sharding_of in zip(
    leaves, jax.tree.leaves(shardings), strict=True
  ):
    name, spec = path_name(path), sharding_of.spec
    if leaf.ndim - is_stacked(name) >= 2:
      (split if "fsdp" in spec else whole).add(name)
  return whole, split


@pytest.mark.parametrize(
  "changes",
  [
    {"mixer": "atlas"},
    {"mixer": "atlas_pp", "tie_embeddings": False},
    {"mixer": "omeganet", "memory.depth": 3, "memory.bias": True},
    {"mixer": "titans", "memory.network": "matrix"},
  ],
)
def test_every_large_parameter_of_every_model_is_split(changes):
  config = configs.replace(
    models.ModelConfig(dim=32, layers=2, heads=2), changes
  )
  whole, split = whole_and_split(config)
  assert {
    name
    for name in whole
    if not re.search(r"norm|bias|convolution|memory/features", name)
  } == set()
  assert "embedding" in split
  assert any("memory/start" in name for name in split)


@pytest.mark.parametrize("mixer", REGISTRY)
def test_little_of_any_mixer_lies_whole(mixer):
  config = models.ModelConfig(mixer=mixer, dim=64, layers=1, heads=2)
  params = split_model(models.abstract(config, 257))[1]["blocks"]["mixer"]
  sizes = {
    f"blocks/mixer/{path_name(path)}": leaf.size
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
  }
  whole, split = whole_and_split(config)
  left = sum(sizes.get(name, 0) for name in whole)
  assert left <= 0.1 * sum(sizes.values()), sorted(whole)
  assert any(name in split for name in sizes)


def test_axis_that_does_not_divide_stays_whole_and_is_logged(caplog):
  mesh = sharding.make_mesh(2, 4)
  with caplog.at_level("INFO", logger="absl"):
    sharding.parameter_spec("embedding", (12, 6), mesh, table=TABLE)
  assert "embedding: axis model of length 6 stays whole on 4" in caplog.text


def test_table_that_does_not_fit_fails_loudly():
  mesh = sharding.make_mesh(2, 4)
  with pytest.raises(ValueError, match=r"no row .* unknown"):
    sharding.parameter_spec("unknown", (2,), mesh, table=TABLE)
  with pytest.raises(ValueError, match="embedding has axes"):
    sharding.parameter_spec("embedding", (2,), mesh, table=TABLE)


def test_mesh_that_is_not_the_devices_is_refused():
  with pytest.raises(UserError, match="needs 6 devices, there are 8"):
    sharding.make_mesh(2, 3)
