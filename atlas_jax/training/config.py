"""The configuration of a whole experiment and of its training."""

import dataclasses
import math

from atlas_jax.config import field
from atlas_jax.data.config import DataConfig
from atlas_jax.errors import UserError
from atlas_jax.models.build import chunk_of, longest_of
from atlas_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """How long, how fast and how carefully to train.

  A resumed run may change `steps`, `log_every`, `eval_every`,
  `checkpoint_every`, `keep` and `tensorboard`; every other field is part of
  the run's identity (see `atlas_jax.training.identity`).

  Raises:
    UserError: A value cannot be trained with.
  """

  steps: int = field(1000, "Optimizer steps in the whole run.")
  batch: int = field(32, "Windows of text per optimizer step, on all devices.")
  accumulate: int = field(
    1, "Microbatches per step; more need less memory, with equal results."
  )
  learning_rate: float = field(1e-3, "Peak learning rate.")
  warmup: int = field(
    100, "Steps of linear warm-up, at most those of the whole schedule."
  )
  floor: float = field(
    0.1, "Last learning rate of the cosine, as a share of the peak."
  )
  decay_steps: int = field(
    0,
    "Step at which the cosine ends; 0: at train.steps, so that resuming with "
    "more steps stretches the cosine.",
  )
  beta1: float = field(0.9, "AdamW's decay of the mean gradient.")
  beta2: float = field(0.95, "AdamW's decay of the mean squared gradient.")
  epsilon: float = field(1e-8, "AdamW's term against division by zero.")
  weight_decay: float = field(
    0.1, "Decoupled weight decay of matrices; vectors and gates have none."
  )
  clip: float = field(1.0, "Largest global norm of a gradient; 0: no limit.")
  seed: int = field(0, "Seed of the initial weights and the order of the data.")
  log_every: int = field(10, "Steps between two lines of training metrics.")
  eval_every: int = field(
    200, "Steps between held-out losses; 0: only before and after training."
  )
  checkpoint_every: int = field(
    200, "Steps between two checkpoints; 0: only at the end."
  )
  keep: int = field(2, "How many of the latest checkpoints stay on disk.")
  tensorboard: bool = field(
    False, "Also write TensorBoard events (needs the extra `tb`)."
  )

  def __post_init__(self):
    for name in ("steps", "batch", "accumulate", "log_every", "keep"):
      if getattr(self, name) < 1:
        raise UserError(f"train.{name} must be at least 1")
    if self.batch > 2**20:
      raise UserError(f"train.batch must be at most {2**20}")
    for name in ("warmup", "decay_steps", "eval_every", "checkpoint_every"):
      if getattr(self, name) < 0:
        raise UserError(f"train.{name} must be 0 or more")
    if not 0 <= self.seed < 2**32:
      raise UserError("train.seed must lie between 0 and 4294967295")
    if not 0 < self.learning_rate <= 1e6:
      raise UserError("train.learning_rate must lie above 0, up to 1e6")
    for name in ("weight_decay", "clip"):
      if not 0 <= getattr(self, name) < float("inf"):
        raise UserError(f"train.{name} must be finite and 0 or more")
    if not 0 <= self.floor <= 1:
      raise UserError("train.floor is a share: give a number from 0 to 1")
    for name in ("beta1", "beta2"):
      if not 0 <= getattr(self, name) < 1:
        raise UserError(f"train.{name} must be at least 0 and below 1")
    if not 0 < self.epsilon < 1:
      raise UserError("train.epsilon must be above 0 and below 1")
    if self.batch % self.accumulate:
      raise UserError(
        f"train.batch={self.batch} does not divide into "
        f"train.accumulate={self.accumulate} equal microbatches"
      )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How the devices are arranged; -1 in one axis: all that remain."""

  data: int = field(-1, "Devices along which only the batch is split.")
  fsdp: int = field(
    1, "Devices along which the batch and the parameters are split."
  )

  def shape(self, devices: int) -> tuple[int, int]:
    """Returns (data, fsdp) for a number of devices.

    Raises:
      UserError: The axes do not multiply to `devices`.
    """
    data, fsdp = self.data, self.fsdp
    if data == fsdp == -1:
      raise UserError("only one of mesh.data and mesh.fsdp may be -1")
    if min(data, fsdp) < -1 or 0 in (data, fsdp):
      raise UserError("mesh.data and mesh.fsdp must be positive, or -1")
    if data == -1 and devices % fsdp == 0:
      data = devices // fsdp
    elif fsdp == -1 and devices % data == 0:
      fsdp = devices // data
    if data * fsdp != devices:
      raise UserError(
        f"mesh.data={self.data} and mesh.fsdp={self.fsdp} do not fit "
        f"{devices} device(s): their product must be that number"
      )
    return data, fsdp


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
  """Everything that decides a run: model, text, training, devices."""

  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

  @property
  def chunk(self) -> int:
    """The multiple at which documents start inside a window."""
    return math.lcm(chunk_of(self.model), self.data.align)

  def validate(self, devices: int | None = None) -> None:
    """Checks the parts, each valid by itself, against each other.

    Args:
      devices: How many devices will train; None leaves the mesh unchecked.

    Raises:
      UserError: One line that names the first field that does not fit.
    """
    self.model.validate()
    longest = longest_of(self.model)
    if longest is not None and self.data.window > longest:
      raise UserError(
        f"data.window={self.data.window} is more than model.hyena.max_length="
        f"{longest}: make that as large, or windows smaller"
      )
    if devices is not None:
      data, fsdp = self.mesh.shape(devices)
      micro = self.train.batch // self.train.accumulate
      if micro % (data * fsdp):
        raise UserError(
          f"train.batch={self.train.batch} over "
          f"train.accumulate={self.train.accumulate} gives microbatches of "
          f"{micro}, which {data * fsdp} devices cannot share equally: make "
          f"train.batch a multiple of {self.train.accumulate * data * fsdp}"
        )
