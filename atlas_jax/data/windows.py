"""Text tokenised once into windows of fixed length, kept in a cache folder.

```
<cache>/windows-<key>/
  manifest.json          what is in it
  documents.jsonl        the documents of both splits, in the order of indices
  train.array_record     one record a window (see records.py)
  valid.array_record
```
The key is a hash of everything that decides the contents: names and contents
of the text files, tokenizer, window, chunk and split. The folder is built under
another name and renamed when complete, so that a run which is killed leaves
nothing that looks complete, and of two runs at once the first to finish wins.
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging
from array_record.python import (
  array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from atlas_jax.data import corpus as corpora
from atlas_jax.data import packing, records, sources
from atlas_jax.data.config import DataConfig
from atlas_jax.data.tokenizer import Tokenizer
from atlas_jax.errors import UserError

_VERSION = 1
_MANIFEST = "manifest.json"
_DOCUMENTS = "documents.jsonl"
_ABANDONED_AFTER = 24 * 3600.0  # seconds


@dataclasses.dataclass(frozen=True)
class Split:
  """The windows of the training or of the held-out text.

  Attributes:
    name: "train" or "valid".
    path: The ArrayRecord file.
    window: Tokens in a window, T.
    windows: Number of windows.
    documents: Number of documents.
    tokens: Input tokens in all windows, without padding.
    bytes: Bytes of text behind the documents' tokens.
    file_size: Bytes of the file.
  """

  name: str
  path: pathlib.Path
  window: int
  windows: int
  documents: int
  tokens: int
  bytes: int
  file_size: int

  @property
  def padding(self) -> float:
    """The share of the windows' places that hold no token."""
    places = self.windows * self.window
    return 1.0 - self.tokens / places if places else 0.0


@dataclasses.dataclass(frozen=True)
class Windows:
  """A cache folder of tokenised windows.

  Attributes:
    folder: Where it is.
    key: Hash of all that decides the contents.
    chunk: Documents start at multiples of this.
    tokenizer: Fingerprint of the tokenizer.
    train: The training windows.
    valid: The held-out windows.
  """

  folder: pathlib.Path
  key: str
  chunk: int
  tokenizer: str
  train: Split
  valid: Split


def prepare(
  config: DataConfig,
  tokenizer: Tokenizer,
  *,
  chunk: int,
  cache: str | os.PathLike[str],
) -> Windows:
  """Makes the windows, or finds them made.

  Args:
    config: What to read; `config.cache` is not looked at.
    tokenizer: Loaded from `config.tokenizer`, or from a saved run.
    chunk: The chunk of the model's memory: documents start at its multiples.
    cache: The folder to keep windows in.

  Returns:
    The windows. One of the splits is empty where `config.valid_fraction` is 0
    or 1.

  Raises:
    UserError: The text cannot be read or is too short, the window is no
      multiple of the chunk, or the cache cannot be written or is damaged.
  """
  packing.check_window(config.window, chunk)
  train_files = sources.find_files(config.path)
  valid_files = (
    sources.find_files(config.valid_path) if config.valid_path else []
  )
  key = _key(config, tokenizer, chunk, train_files, valid_files)
  cache = pathlib.Path(cache)
  folder = cache / f"windows-{key[:16]}"
  if folder.exists():
    return open_windows(folder)
  started = time.monotonic()
  try:
    cache.mkdir(parents=True, exist_ok=True)
    _sweep(cache)
    build = pathlib.Path(tempfile.mkdtemp(dir=cache, prefix=".windows-"))
    try:
      splits = _build(config, tokenizer, chunk, train_files, valid_files, build)
      _write_manifest(build, key, chunk, tokenizer, splits)
      _publish(build, folder)
    finally:
      shutil.rmtree(build, ignore_errors=True)
  except OSError as error:
    raise UserError(
      f"cannot write tokenised windows to {str(cache)!r}: "
      f"{error.strerror or error}; free some space or choose another folder by "
      "data.cache"
    ) from error
  windows = open_windows(folder)
  logging.info(
    "tokenised in %.1f s: %d training windows (%.2f %% padding), %d held-out "
    "windows (%.2f %%), in %s",
    time.monotonic() - started,
    windows.train.windows,
    100 * windows.train.padding,
    windows.valid.windows,
    100 * windows.valid.padding,
    folder,
  )
  return windows


def open_windows(folder: str | os.PathLike[str]) -> Windows:
  """Opens a folder that `prepare` made.

  Raises:
    UserError: The folder is damaged or of another version.
  """
  folder = pathlib.Path(folder)
  try:
    manifest = json.loads((folder / _MANIFEST).read_text())
    if manifest["version"] != _VERSION:
      raise ValueError(f"version {manifest['version']}")
    splits = [
      Split(path=folder / f"{values['name']}.array_record", **values)
      for values in manifest["splits"]
    ]
    for split in splits:
      if split.path.stat().st_size != split.file_size:
        raise ValueError(f"{split.path.name} has the wrong size")
    if not (folder / _DOCUMENTS).is_file():
      raise ValueError(f"{_DOCUMENTS} is missing")
    train, valid = splits
    return Windows(
      folder=folder,
      key=manifest["key"],
      chunk=manifest["chunk"],
      tokenizer=manifest["tokenizer"],
      train=train,
      valid=valid,
    )
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"the tokenised windows in {str(folder)!r} are damaged or of another "
      f"version ({error}); delete the folder to have them made anew"
    ) from error


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
  """Tells of damaged windows in one line.

  Raises:
    UserError: Whatever went wrong within.
  """
  try:
    yield
  except (OSError, RuntimeError, ValueError, IndexError) as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
    raise UserError(
      f"the tokenised windows in {str(path.parent)!r} are damaged ({reason}); "
      "delete the folder to have them made anew"
    ) from None


def _key(
  config: DataConfig,
  tokenizer: Tokenizer,
  chunk: int,
  train_files: list[sources.SourceFile],
  valid_files: list[sources.SourceFile],
) -> str:
  parts: list[Any] = [
    _VERSION,
    sources.fingerprint(train_files),
    sources.fingerprint(valid_files),
    # Both together decide how a file is read.
    config.field if any(f.is_json for f in train_files + valid_files) else "",
    None if valid_files else config.valid_fraction,
    tokenizer.fingerprint,
    config.window,
    chunk,
  ]
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _build(
  config: DataConfig,
  tokenizer: Tokenizer,
  chunk: int,
  train_files: list[sources.SourceFile],
  valid_files: list[sources.SourceFile],
  build: pathlib.Path,
) -> list[Split]:
  """Fills a folder with everything but the manifest."""

  def read(files, name):
    documents = sources.read_documents(files, config.field)
    return corpora.tokenise(documents, tokenizer, build / name)

  logging.info("tokenising %d files", len(train_files) + len(valid_files))
  train = read(train_files, "train.tokens")
  if valid_files:
    valid = read(valid_files, "valid.tokens")
  else:
    train, valid = corpora.split(train, config.valid_fraction, tokenizer)
  if train.ids and train.inputs.sum() < config.window:
    raise UserError(
      f"the training text has {train.inputs.sum()} tokens, fewer than one "
      f"window of {config.window}; give more text or a smaller data.window"
    )
  splits = []
  with open(build / _DOCUMENTS, "w", encoding="utf-8") as stream:
    for name, part in (("train", train), ("valid", valid)):
      splits.append(_write_split(name, part, config.window, chunk, build))
      for id_, tokens, size in zip(
        part.ids, part.inputs.tolist(), part.sizes.tolist(), strict=True
      ):
        row = {"split": name, "id": id_, "tokens": tokens, "bytes": size}
        stream.write(json.dumps(row) + "\n")
  for path in build.glob("*.tokens"):
    path.unlink()
  return splits


def _write_split(
  name: str,
  corpus: corpora.Corpus,
  window: int,
  chunk: int,
  build: pathlib.Path,
) -> Split:
  plan = packing.plan(corpus.inputs, window, chunk)
  path = build / f"{name}.array_record"
  bounds = np.searchsorted(plan.window, np.arange(plan.windows + 1))
  # group_size:1 makes every window a read of its own.
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  try:
    for begin, end in itertools.pairwise(bounds):
      writer.write(
        records.pack([_piece(corpus, plan, p) for p in range(begin, end)])
      )
    writer.close()
  except RuntimeError as error:
    full = errno.ENOSPC if "No space" in str(error) else errno.EIO
    raise OSError(full, os.strerror(full)) from error
  return Split(
    name=name,
    path=path,
    window=window,
    windows=plan.windows,
    documents=len(corpus.ids),
    tokens=plan.tokens,
    bytes=int(corpus.sizes.sum()),
    file_size=path.stat().st_size,
  )


def _piece(
  corpus: corpora.Corpus, plan: packing.Plan, index: int
) -> records.Piece:
  document = int(plan.document[index])
  start = int(plan.start[index])
  begin = int(corpus.begin[document]) + start
  # One more than the inputs: the target of the last of them.
  tokens = corpus.tokens[begin : begin + int(plan.length[index]) + 1]
  return records.Piece(document, start, int(plan.offset[index]), tokens)


def _write_manifest(
  build: pathlib.Path,
  key: str,
  chunk: int,
  tokenizer: Tokenizer,
  splits: list[Split],
) -> None:
  rows = [dataclasses.asdict(split) for split in splits]
  for row in rows:
    del row["path"]
  manifest = {
    "version": _VERSION,
    "key": key,
    "chunk": chunk,
    "tokenizer": tokenizer.fingerprint,
    "splits": rows,
  }
  (build / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _publish(build: pathlib.Path, folder: pathlib.Path) -> None:
  """Gives a complete folder its name, unless another run has done so."""
  for path in build.iterdir():
    with open(path, "rb") as stream:
      os.fsync(stream.fileno())
  try:
    os.rename(build, folder)
  except OSError as error:
    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
      raise


def _sweep(cache: pathlib.Path) -> None:
  """Deletes what killed runs left; a day without a write is proof enough."""
  for build in cache.glob(".windows-*"):
    try:
      newest = max(p.stat().st_mtime for p in (build, *build.iterdir()))
    except OSError:
      continue  # Another run has just renamed or deleted it.
    if time.time() - newest > _ABANDONED_AFTER:
      shutil.rmtree(build, ignore_errors=True)
