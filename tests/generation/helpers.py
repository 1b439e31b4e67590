"""A tiny model, a tokenizer of letters, and a run's folder made of them."""

import functools
import os
import pathlib
import string
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlas_jax import config as configs
from atlas_jax import models
from atlas_jax.data.tokenizers import ByteTokenizer, Tokenizer
from atlas_jax.generation import Generator
from atlas_jax.training import checkpoint
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.program import split_model
from atlas_jax.training.step import TrainState
from atlas_jax.training.workdir import Workdir

LETTERS = string.ascii_letters + string.digits + " ."

# Chunks of 4 and a window of 5, which reaches over them.
CONFIG = models.ModelConfig(
  dim=16,
  layers=2,
  heads=2,
  mlp_hidden=24,
  vocab_multiple=8,
  # Tied, the likeliest token after each is often the token itself.
  tie_embeddings=False,
  memory=models.MemoryOptions(
    key_width=4, expansion=1.0, chunk=4, window=5, muon_every=2
  ),
)


class LetterTokenizer(Tokenizer):
  """One token for each of some characters, so that text is tokens."""

  def __init__(self):
    pieces = [letter.encode() for letter in LETTERS]
    super().__init__(
      [*pieces, b""],
      end_of_text=len(pieces),
      content=b"letters",
      keeps_text=False,
    )

  @property
  def file_name(self) -> str:
    """See `Tokenizer`."""
    return "tokenizer.letters"

  def encode(self, text: str) -> list[int]:
    """See `Tokenizer`."""
    return [LETTERS.index(letter) for letter in text]


def random_model(
  vocab: int, config: models.ModelConfig = CONFIG
) -> models.LanguageModel:
  """A model whose every parameter is somewhere in general."""
  random = np.random.default_rng(1)
  graph, params = split_model(models.build(config, vocab))
  params = jax.tree.map(
    lambda p: p + jnp.asarray(0.2 * random.standard_normal(p.shape), p.dtype),
    params,
  )
  return nnx.merge(graph, params)


@functools.cache
def letter_model() -> models.LanguageModel:
  """A model of letters."""
  return random_model(LetterTokenizer().vocab_size)


@functools.cache
def generator() -> Generator:
  """A generator of letters; prompts longer than 8 are read in segments."""
  return Generator(letter_model(), LetterTokenizer(), buckets=(4, 8))


def make_run(
  folder: pathlib.Path, step: int = 3, text: str = "", **changes: object
) -> pathlib.Path:
  """Writes what training would leave: a byte model at a step.

  Args:
    folder: The run's folder, made.
    step: Of its checkpoint.
    text: Fingerprint of the training text.
    **changes: To the configuration, with `__` for dots.
  """
  named = {key.replace("__", "."): value for key, value in changes.items()}
  config = configs.replace(
    ExperimentConfig(model=CONFIG), {"data.window": 16, **named}
  )
  tokenizer = ByteTokenizer()
  _, params = split_model(random_model(tokenizer.vocab_size))
  state = TrainState(jnp.int32(step), jnp.array(False), params, {})
  record = {
    "config": configs.to_dict(config),
    "tokenizer": tokenizer.fingerprint,
    "vocab": tokenizer.vocab_size,
    "text": text,
    "init_from": None,
  }
  home = Workdir(folder)
  tokenizer.save(home.tokenizer)
  home.write(record)
  with checkpoint.Checkpoints(home.checkpoints, 1) as saved:
    saved.save(step, state, {"record": record, "position": {}})
  return folder


def run_main(
  name: str, *arguments: object, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
  """Runs a main of `experiments` in a process of its own."""
  settings = {
    "JAX_PLATFORMS": "cpu",
    # With as many devices, what this process compiled is found again.
    "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
    "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
  }
  return subprocess.run(
    [sys.executable, "-m", f"experiments.{name}", *map(os.fsencode, arguments)],
    input=stdin,
    capture_output=True,
    cwd=pathlib.Path(__file__).resolve().parents[2],
    env={**os.environ, **settings},
    check=False,
  )
