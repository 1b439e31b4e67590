"""Small documents, and a run that has seen none of them."""

import functools
import pathlib

from atlas_jax import config as configs
from atlas_jax.data import DataConfig, windows
from atlas_jax.data.tokenizers import ByteTokenizer
from atlas_jax.evaluation import Documents
from tests.generation.helpers import CONFIG, random_model

WINDOW = 16
CHUNK = 4
TOKENIZER = ByteTokenizer()
# Shorter than a window, as long, of several windows, and with a rest.
TEXTS = {
  "a.txt": "short",
  "b.txt": "0123456789abcdef",
  "c.txt": "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter De",
  "d.txt": "the quick brown fox jumps over the dog",
  "e.txt": "x",
}


def write_texts(folder: pathlib.Path) -> pathlib.Path:
  """Writes the documents into a folder, which is made."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in TEXTS.items():
    (folder / name).write_text(text, encoding="utf-8")
  return folder


def prepare(path: pathlib.Path, cache: pathlib.Path, **changes: object):
  """The documents at a path as windows, all of them held out."""
  config = configs.replace(
    DataConfig(path=str(path), window=WINDOW, valid_fraction=1.0), changes
  )
  return windows.prepare(config, TOKENIZER, chunk=CHUNK, cache=cache)


def documents_of(folder: pathlib.Path) -> Documents:
  """The documents, through a cache inside of the folder."""
  found = prepare(write_texts(folder / "text"), folder / "cache")
  return Documents(found, found.valid)


@functools.cache
def byte_model():
  """A tiny model of bytes; its chunk is `CHUNK`."""
  assert CONFIG.memory.chunk == CHUNK
  return random_model(TOKENIZER.vocab_size)
