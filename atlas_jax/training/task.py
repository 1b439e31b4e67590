"""What is trained: a model, text in batches, and the tokenizer between them."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

import grain
import jax
import numpy as np
from flax import nnx

from atlas_jax import models
from atlas_jax.data import pipeline, tokenizers, windows
from atlas_jax.errors import UserError
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.heldout import with_bytes


@dataclasses.dataclass(frozen=True)
class Task:
  """The inputs of `atlas_jax.training.loop.train`.

  Attributes:
    build: Makes the model with its first weights; see `program.make_program`.
    batches: Makes an iterator over this process's rows of the batch of each
      step, with `get_state` (JSON values), `set_state` and `close`.
    heldout: Held-out batches with `bytes`, all of one shape; may be empty.
    tokenizer: The tokens' meaning.
    fingerprint: Identifies the training text.
  """

  build: Callable[[], nnx.Module]
  batches: Callable[[], grain.DatasetIterator]
  heldout: Sequence[Mapping[str, np.ndarray]]
  tokenizer: tokenizers.Tokenizer
  fingerprint: str


def make_task(config: ExperimentConfig, folder: pathlib.Path) -> Task:
  """Reads the text and prepares the model that a configuration names.

  Args:
    config: The experiment.
    folder: The run's folder; windows are cached in it unless `data.cache`
      names another.

  Raises:
    UserError: The text or the tokenizer cannot be used, or the text is too
      short.
  """
  tokenizer = tokenizers.load(config.data.tokenizer)
  hosts = {
    "host_index": jax.process_index(),
    "host_count": jax.process_count(),
  }
  prepared = windows.prepare(
    config.data,
    tokenizer,
    chunk=config.chunk,
    cache=config.data.cache or folder / "cache",
  )
  if not prepared.train.windows:
    raise UserError(
      "there is no training text: make data.valid_fraction smaller than "
      f"{config.data.valid_fraction}"
    )
  train = pipeline.train_dataset(
    prepared.train,
    batch=config.train.batch,
    seed=config.train.seed,
    shuffle=config.data.shuffle,
    **hosts,
  )
  heldout = pipeline.valid_batches(
    prepared.valid,
    # No more rows than a microbatch of training has, which fits.
    batch=config.train.batch // config.train.accumulate,
    limit=config.data.eval_windows,
    **hosts,
  )
  return Task(
    build=functools.partial(
      models.build, config.model, tokenizer.vocab_size, config.train.seed
    ),
    batches=functools.partial(
      pipeline.iterate, train, read_threads=config.data.read_threads
    ),
    heldout=[with_bytes(batch, tokenizer.byte_length) for batch in heldout],
    tokenizer=tokenizer,
    fingerprint=prepared.key,
  )
