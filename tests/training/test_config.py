"""Settings that cannot be trained with are refused in one line."""

import dataclasses

import pytest
import standin

from atlas_jax.errors import UserError
from atlas_jax.training.config import MeshConfig, TrainConfig


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("steps", 0),
    ("batch", 0),
    ("accumulate", 0),
    ("log_every", 0),
    ("keep", 0),
    ("warmup", -1),
    ("eval_every", -1),
    ("checkpoint_every", -1),
    ("decay_steps", -1),
    ("seed", -1),
    ("seed", 2**32),
    ("learning_rate", 0.0),
    ("learning_rate", float("inf")),
    ("weight_decay", -0.1),
    ("clip", -1.0),
    ("floor", 1.5),
    ("beta1", 1.0),
    ("beta2", -0.1),
    ("epsilon", 0.0),
  ],
)
def test_refuses_a_value_out_of_range(field, value):
  with pytest.raises(UserError, match=f"^train.{field} [^\n]*$"):
    TrainConfig(**{field: value})


def test_every_field_is_documented():
  for cls in (TrainConfig, MeshConfig):
    for spec in dataclasses.fields(cls):
      assert spec.metadata["doc"].endswith("."), spec.name


@pytest.mark.parametrize(
  ("data", "fsdp", "devices", "shape"),
  [
    (-1, 1, 8, (8, 1)),
    (-1, 4, 8, (2, 4)),
    (2, -1, 8, (2, 4)),
    (1, 1, 1, (1, 1)),
    (4, 2, 8, (4, 2)),
  ],
)
def test_minus_one_takes_the_remaining_devices(data, fsdp, devices, shape):
  assert MeshConfig(data, fsdp).shape(devices) == shape


@pytest.mark.parametrize(
  ("data", "fsdp"), [(-1, -1), (0, 1), (-2, 1), (-1, 3), (3, -1), (2, 2)]
)
def test_refuses_a_mesh_that_is_not_the_devices(data, fsdp):
  with pytest.raises(UserError, match=r"mesh\.data"):
    MeshConfig(data, fsdp).shape(8)


def test_refuses_a_batch_that_microbatches_cannot_share():
  with pytest.raises(UserError, match=r"train\.accumulate=3"):
    standin.small_config(train__batch=8, train__accumulate=3)


def test_refuses_a_batch_that_devices_cannot_share():
  config = standin.small_config(train__batch=8, train__accumulate=2)
  config.validate(4)
  with pytest.raises(UserError, match=r"multiple of 16"):
    config.validate(8)


def test_refuses_a_model_that_cannot_be_built():
  with pytest.raises(UserError, match=r"model\.heads=3"):
    standin.small_config(model__heads=3).validate()
