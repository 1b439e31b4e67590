"""A tiny model and tiny data for the tests of training, and a main for them.

The model is a causal language model of the interface that training expects;
the data are windows drawn at random, so that nothing is read from a disk. As a
program it trains a run in its first argument, for tests that kill it.
"""

import dataclasses
import json
import os
import signal
import sys
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlas_jax import config as configs
from atlas_jax.data.tokenizers import ByteTokenizer
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


def make(config: ExperimentConfig) -> Task:
  """The task of the tiny model on the tiny data."""
  held = grain.MapDataset.range(1000, 1016).map(_Windows()).batch(8)
  return Task(
    build=Build(config.train.seed),
    batches=lambda: iter(batches(config).to_iter_dataset()),
    heldout=[with_bytes(x, TOKENIZER.byte_length) for x in held],
    tokenizer=TOKENIZER,
    fingerprint="tiny",
  )


def _kill_at_rename(name: str, step: int) -> None:
  """Kills this process as it is about to give a checkpoint its name."""
  rename = os.rename

  def dying(source, *args, **kwargs):
    if os.path.basename(source).startswith(f"{step}.{name}"):
      os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, *args, **kwargs)

  os.rename = dying


class Watched:
  """An iterator that sends its process signals at given positions."""

  def __init__(
    self,
    iterator: grain.DatasetIterator,
    kill_after: int | None = None,
    signal_after: int | None = None,
  ):
    self._signals = {kill_after: signal.SIGKILL, signal_after: signal.SIGTERM}
    self._iterator = iterator
    self.get_state = iterator.get_state
    self.set_state = iterator.set_state
    self.close = iterator.close

  def __next__(self):
    number = self._signals.get(self.get_state()["next_index"])
    if number is not None:
      os.kill(os.getpid(), number)
    return next(self._iterator)


def main(workdir: str, options: dict[str, Any]) -> None:
  """Trains; `options` says what befalls the process, and changes settings.

  Args:
    workdir: The run's folder.
    options: `kill_after`: SIGKILL once a batch was asked for after that step;
      `kill_saving`: SIGKILL in the middle of saving that step; `signal_after`:
      SIGTERM at that step; everything else: fields by dotted name.
  """
  kill_after = options.pop("kill_after", None)
  kill_saving = options.pop("kill_saving", None)
  signal_after = options.pop("signal_after", None)
  config = configs.replace(ExperimentConfig(), {**SMALL, **options})
  task = make(config)
  if kill_saving is not None:
    _kill_at_rename("orbax-checkpoint-tmp", kill_saving)

  iterate = task.batches
  task = dataclasses.replace(
    task, batches=lambda: Watched(iterate(), kill_after, signal_after)
  )
  summary = train(config, workdir, task=task)
  print(summary.status, summary.step)


if __name__ == "__main__":
  main(sys.argv[1], json.loads(sys.argv[2]))
