"""A tiny model and tiny data for the tests of training, and a main for them.

The model is a causal language model of the interface that training expects;
the data are windows drawn at random, so that nothing is read from a disk. As a
program it trains in a process of its own, for tests that kill it.
"""

import dataclasses
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from atlas_jax import config as configs
from atlas_jax.data import pipeline
from atlas_jax.data.tokenizers import ByteTokenizer
from atlas_jax.errors import UserError
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.heldout import with_bytes
from atlas_jax.training.loop import train
from atlas_jax.training.task import Task

WINDOW = 16
TOKENIZER = ByteTokenizer()
SMALL = {
  "data.window": WINDOW,
  "train.steps": 12,
  "train.batch": 8,
  "train.warmup": 4,
  # The program then does not depend on the number of steps.
  "train.decay_steps": 12,
  "train.learning_rate": 0.01,
  "train.log_every": 1,
  "train.eval_every": 4,
  "train.checkpoint_every": 4,
  "mesh.data": -1,
}


class Hidden(NamedTuple):
  """What the blocks return."""

  hidden: jax.Array
  metrics: dict[str, jax.Array]


class Model(nnx.Module):
  """Embedding, stacked causal blocks, tied head."""

  def __init__(self, dim: int = 16, layers: int = 2, *, rngs: nnx.Rngs):
    keys = [rngs.params() for _ in range(3)]
    normal = jax.random.normal
    vocab = TOKENIZER.vocab_size
    self.embed = nnx.Dict(
      embedding=nnx.Param(0.5 * normal(keys[0], (vocab, dim)))
    )
    self.blocks = nnx.Dict(
      mixer=nnx.Param(0.2 * normal(keys[1], (layers, dim, dim))),
      out=nnx.Param(0.2 * normal(keys[2], (layers, dim, dim))),
      scale=nnx.Param(jnp.ones((layers, dim))),
    )

  @property
  def vocab(self):
    """The number of tokens."""
    return TOKENIZER.vocab_size

  def logits(self, hidden):
    """Scores the next token."""
    return hidden @ self.embed.embedding[...].T

  def hidden(self, tokens, *, segment_ids, aligned):
    """Mixes each position with the mean of those before it."""
    assert aligned
    assert segment_ids is not None
    table = self.embed.embedding[...]
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2))
    causal = causal / causal.sum(-1, keepdims=True)

    def block(x, weights):
      mixer, out, scale = weights
      mean = jnp.einsum("ts,bsd->btd", causal, x)
      y = jnp.tanh((x + mean) @ mixer) @ out
      return x + y * scale[None, None], None

    weights = (
      self.blocks.mixer[...],
      self.blocks.out[...],
      self.blocks.scale[...],
    )
    x, _ = jax.lax.scan(block, table[tokens], weights)
    return Hidden(x, {"hidden_norm": jnp.sqrt((x**2).mean())})


@dataclasses.dataclass(frozen=True)
class Build:
  """Makes the model; equal values make equal models."""

  seed: int = 0
  dim: int = 16

  def __call__(self) -> Model:
    """Makes it."""
    return Model(self.dim, rngs=nnx.Rngs(self.seed))


class _Windows(grain.transforms.Map):
  def map(self, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Bytes that repeat, so that there is something to learn.
    text = np.tile(rng.integers(97, 123, 5), WINDOW)[: WINDOW + 1]
    text = text.astype(np.int32)
    weights = np.ones(WINDOW, np.float32)
    weights[: rng.integers(0, WINDOW // 2)] = 0.0
    return {
      "tokens": text[:-1],
      "targets": text[1:],
      "segment_ids": np.ones(WINDOW, np.int32),
      "weights": weights,
    }


def small_config(**changes: Any) -> ExperimentConfig:
  """A configuration of a few steps; `train__steps=3` sets `train.steps`."""
  named = {key.replace("__", "."): value for key, value in changes.items()}
  return configs.replace(ExperimentConfig(), {**SMALL, **named})


def batches(config: ExperimentConfig) -> grain.MapDataset:
  """The training batches, by step."""
  return (
    grain.MapDataset.range(64)
    .seed(config.train.seed)
    .shuffle()
    .repeat()
    .map(_Windows())
    .batch(config.train.batch)
  )


def some_batch(rows: int = 8) -> dict[str, np.ndarray]:
  """One batch with bytes."""
  batch = batches(small_config(train__batch=rows))[0]
  return with_bytes(batch, TOKENIZER.byte_length)


class _Mine(grain.transforms.Map):
  """This process's rows of a batch."""

  def map(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    rows = len(batch["tokens"]) // jax.process_count()
    begin = rows * jax.process_index()
    return {name: part[begin : begin + rows] for name, part in batch.items()}


def make(config: ExperimentConfig) -> Task:
  """The task of the tiny model on the tiny data."""
  held = grain.MapDataset.range(1000, 1016).map(_Windows()).batch(8)
  return Task(
    build=Build(config.train.seed),
    batches=lambda: pipeline.iterate(batches(config).map(_Mine())),
    heldout=[with_bytes(x, TOKENIZER.byte_length) for x in held.map(_Mine())],
    tokenizer=TOKENIZER,
    fingerprint="tiny",
  )


class Watched:
  """An iterator at which things happen when a batch is asked for.

  Args:
    iterator: Gives the batches.
    events: What to call, by the number of batches given so far.
    pace: Seconds to wait before each batch.
  """

  def __init__(
    self,
    iterator: grain.DatasetIterator,
    events: dict[int | None, Callable[[], None]],
    pace: float = 0.0,
  ):
    self._events = events
    self._pace = pace
    self._iterator = iterator
    self.get_state = iterator.get_state
    self.set_state = iterator.set_state
    self.close = iterator.close

  def __next__(self):
    time.sleep(self._pace)
    self._events.get(self.get_state()["next_index"], lambda: None)()
    return next(self._iterator)


def _kill_at_rename(step: int) -> None:
  """Kills this process as it is about to give a checkpoint its name."""
  rename = os.rename

  def dying(source, *args, **kwargs):
    if os.path.basename(source).startswith(f"{step}.orbax-checkpoint-tmp"):
      os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, *args, **kwargs)

  os.rename = dying


def _fill_disk() -> None:
  """Lets no file of this process grow beyond a size, as a full disk would."""
  resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))


def main() -> None:
  """Trains in a process of its own, to which things happen.

  Arguments are the run's folder and a JSON object with, each optional,
  `kill_after`: the step after which the process is killed, once checkpoint 4
  is whole; `kill_saving`: the step in the middle of whose saving it is;
  `signal_after`: the step after which it gets SIGTERM; `full_after`: the step
  after which the disk is full; `process`: [index, count, port] of one process
  of several; `devices`: how many each simulates; `pace`: seconds that every
  step takes at least.
  """
  workdir, options = sys.argv[1], json.loads(sys.argv[2])
  jax.config.update("jax_num_cpu_devices", options.get("devices", 1))
  if "process" in options:
    index, count, port = options["process"]
    jax.distributed.initialize(f"localhost:{port}", count, index)
  if "kill_saving" in options:
    _kill_at_rename(options["kill_saving"])

  def kill() -> None:
    # A checkpoint is written beside the steps, and these are quick.
    while not os.path.exists(f"{workdir}/checkpoints/4"):
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

  events = {
    options.get("kill_after"): kill,
    options.get("signal_after"): lambda: os.kill(os.getpid(), signal.SIGTERM),
    options.get("full_after"): _fill_disk,
  }
  config = small_config()
  task = make(config)
  watched = dataclasses.replace(
    task,
    batches=lambda: Watched(task.batches(), events, options.get("pace", 0.0)),
  )
  summary = train(config, workdir, task=watched)
  print(summary.status, summary.step)


if __name__ == "__main__":
  # Grain reads an absl flag and fails while no main has parsed them.
  flags.FLAGS.mark_as_parsed()
  try:
    main()
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
