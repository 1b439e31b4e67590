"""A training program: the pure steps, compiled for a mesh."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from atlas_jax import models
from atlas_jax.training import sharding, step
from atlas_jax.training.config import TrainConfig
from atlas_jax.training.optimizer import make_optimizer, schedule


@dataclasses.dataclass(frozen=True)
class Program:
  """Everything that runs on the devices.

  Attributes:
    mesh: The devices.
    abstract: Shapes, dtypes and shardings of the state.
    init: Makes the first state, already sharded: () -> TrainState.
    train_step: (state, placed batch) -> (state, Report); consumes the state.
    eval_step: (params, placed batch) -> sums, see `step.eval_step`.
  """

  mesh: Mesh
  abstract: step.TrainState
  init: Callable[[], step.TrainState]
  train_step: Callable[..., tuple[step.TrainState, step.Report]]
  eval_step: Callable[..., dict[str, jax.Array]]

  def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Puts this process's rows of a batch onto the mesh."""
    return sharding.place_batch(batch, self.mesh)

  @property
  def parameters(self) -> int:
    """How many numbers the model has."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.abstract.params))


def make_program(
  build: Callable[[], nnx.Module], config: TrainConfig, mesh: Mesh
) -> Program:
  """Compiles nothing yet: returns the jitted functions of a training run.

  Args:
    build: Makes the model with its first weights. Called under a trace, so
      that no array is ever made unsharded. Of the model are used
      `hidden(tokens, segment_ids=..., aligned=True)`, `logits(hidden)` and
      `vocab`, as of `models.LanguageModel`; all its variables must be
      nnx.Param.
    config: The optimizer and the accumulation.
    mesh: The devices, as of `sharding.make_mesh`.
  """
  optimizer = make_optimizer(config)
  graph, _ = split_model(nnx.eval_shape(build))

  def init() -> step.TrainState:
    return step.new_state(split_model(build())[1], optimizer)

  def losses(params: Any, batch: step.Batch):
    model = nnx.merge(graph, params)
    out = model.hidden(
      batch["tokens"], segment_ids=batch["segment_ids"], aligned=True
    )
    return models.token_losses(model, out.hidden, batch["targets"]), out.metrics

  shapes = jax.eval_shape(init)
  replicated = NamedSharding(mesh, sharding.REPLICATED)
  rows = NamedSharding(mesh, sharding.BATCH)
  params = sharding.parameter_shardings(shapes.params, mesh)
  placed: Any = step.TrainState(
    replicated,  # pyright: ignore[reportArgumentType]
    replicated,  # pyright: ignore[reportArgumentType]
    params=params,
    opt_state=sharding.optimizer_shardings(optimizer, shapes.opt_state, params),
  )
  return Program(
    mesh=mesh,
    abstract=jax.tree.map(_with_sharding, shapes, placed),
    init=jax.jit(init, out_shardings=placed),
    train_step=jax.jit(
      partial(
        step.train_step,
        losses=losses,
        optimizer=optimizer,
        schedule=schedule(config),
        accumulate=config.accumulate,
      ),
      in_shardings=(placed, rows),
      out_shardings=(placed, replicated),
      donate_argnums=0,
    ),
    eval_step=jax.jit(
      partial(step.eval_step, losses=losses),
      in_shardings=(params, rows),
      out_shardings=replicated,
    ),
  )


def split_model(model: nnx.Module) -> tuple[Any, dict[str, Any]]:
  """Returns a model's graph definition and its parameters as plain dicts.

  `nnx.merge(graph, params)` makes the model again.

  Raises:
    ValueError: The model has variables that are not parameters; a step would
      lose what it wrote to them.
  """
  graph, params, rest = nnx.split(model, nnx.Param, ...)
  if jax.tree.leaves(rest):
    raise ValueError(
      "a model to be trained may hold only nnx.Param variables, found "
      f"{sorted(nnx.to_pure_dict(rest))}"
    )
  return graph, nnx.to_pure_dict(params)


def _with_sharding(
  leaf: jax.ShapeDtypeStruct, placed: NamedSharding
) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)
