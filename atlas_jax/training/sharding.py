"""Which axis of which array lies along which axis of the device mesh.

The whole policy is the two tables below; no module knows of a mesh. The batch
is split over both mesh axes. A parameter is split over `fsdp` along one of its
axes and replicated over `data`; the optimizer's moments follow their parameter.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from atlas_jax.errors import UserError
from atlas_jax.training.paths import is_stacked, path_name

Axes = tuple[str | None, ...]

# Ordered: the first pattern found in a parameter's path names its logical
# axes. The axis of layers of stacked parameters is not listed; it stays whole,
# since the scan over layers slices it. () leaves every axis whole.
PARAMETER_AXES: tuple[tuple[str, Axes], ...] = (
  (r"(^|/)embedding$", ("vocab", "model")),
  (r"^head/kernel$", ("model", "vocab")),
  (
    r"(?<!convolutions)(?<!by_name)/(query|key|value|output_gate)/kernel$",
    ("model", "heads"),
  ),
  (r"/streams/kernel$", ("model", "heads")),
  (r"/output/kernel$", ("heads", "model")),
  (
    r"/gates/(decay|momentum|rate|window|token|threshold|matrix_rate)/kernel$",
    ("model", "heads", "gates"),
  ),
  (r"/start/(in|out|gate|matrix|hidden_\d+)$", ("heads", "memory", "features")),
  (r"/cell/dense_[hi]/kernel$", ("model", "hidden")),
  (r"/filter/(hidden/\d+|out)/kernel$", ("hidden", "model")),
  (r"mixer/.*/down$", ("model", "hidden")),
  (r"mixer/.*/up$", ("hidden", "model")),
  (r"mlp/(gate|up)/kernel$", ("model", "hidden")),
  (r"mlp/down/kernel$", ("hidden", "model")),
  # Vectors, convolutions, coefficients and key maps are small.
  (r"", ()),
)

# Where a logical axis lies. Axes that are absent stay whole.
MESH_AXES: Mapping[str, str] = {"model": "fsdp", "memory": "fsdp"}

BATCH = PartitionSpec(("data", "fsdp"))
REPLICATED = PartitionSpec()


def make_mesh(
  data: int, fsdp: int, devices: Sequence[Any] | None = None
) -> Mesh:
  """Arranges devices (None: all) as a mesh of axes `data` and `fsdp`.

  Raises:
    UserError: There are not data * fsdp devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  if data * fsdp != len(devices):
    raise UserError(
      f"a mesh of {data} x {fsdp} needs {data * fsdp} devices, "
      f"there are {len(devices)}: change mesh.data and mesh.fsdp"
    )
  return jax.make_mesh(
    (data, fsdp),
    ("data", "fsdp"),
    axis_types=(AxisType.Auto,) * 2,
    devices=devices,
  )


def parameter_spec(
  name: str,
  shape: tuple[int, ...],
  mesh: Mesh,
  *,
  table: Sequence[tuple[str, Axes]] = PARAMETER_AXES,
  mesh_axes: Mapping[str, str] = MESH_AXES,
) -> PartitionSpec:
  """Looks one parameter up in the tables.

  An axis whose length the mesh axis does not divide stays whole, with a line
  in the log: the result is right, only less memory is saved.

  Args:
    name: The parameter's path, as of `path_name`.
    shape: Its shape, with the axis of layers where it is stacked.
    mesh: The mesh.
    table: Patterns and logical axes, in order; () leaves every axis whole.
    mesh_axes: Mesh axis by logical axis.

  Raises:
    ValueError: No row fits the path, or its number of axes is not the shape's.
  """
  axes = next((axes for row, axes in table if re.search(row, name)), None)
  if axes is None:
    raise ValueError(f"no row of the sharding table fits parameter {name}")
  own = shape[1:] if is_stacked(name) else shape
  if axes and len(axes) != len(own):
    raise ValueError(
      f"parameter {name} has axes of lengths {own}, "
      f"the sharding table names {axes}"
    )
  entries: list[str | None] = []
  for length, axis in zip(own, axes or (None,) * len(own), strict=True):
    along = mesh_axes.get(axis) if axis else None
    if along in entries:
      along = None
    if along and length % mesh.shape[along]:
      logging.info(
        "%s: axis %s of length %d stays whole on %d devices of mesh axis %s",
        *(name, axis, length, mesh.shape[along], along),
      )
      along = None
    entries.append(along)
  return PartitionSpec(*[None] * (len(shape) - len(own)), *entries)


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
  """Returns a NamedSharding for each of a tree of (abstract) parameters."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: NamedSharding(
      mesh, parameter_spec(path_name(path), leaf.shape, mesh)
    ),
    params,
  )


def optimizer_shardings(
  optimizer: optax.GradientTransformation, opt_state: Any, shardings: Any
) -> Any:
  """Returns shardings for an (abstract) optimizer state.

  Args:
    optimizer: The optimizer that made the state.
    opt_state: The state, or its shapes.
    shardings: The parameters' shardings; what is kept per parameter lies like
      its parameter, everything else is replicated.
  """
  mesh = jax.tree.leaves(shardings)[0].mesh
  return optax.tree_map_params(
    optimizer,
    lambda _, sharding: sharding,
    opt_state,
    shardings,
    transform_non_params=lambda _: NamedSharding(mesh, REPLICATED),
  )


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
  """Puts this process's rows of a batch onto its devices.

  Args:
    batch: Arrays [rows of this process, ...]; the processes' rows, in the
      order of the processes, are the batch.
    mesh: The mesh; its devices must divide the rows of the batch.
  """
  sharding = NamedSharding(mesh, BATCH)
  return {
    name: jax.make_array_from_process_local_data(sharding, rows)
    for name, rows in batch.items()
  }
