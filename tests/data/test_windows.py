"""Splits, the cache of windows, kills, races, and what a user can get wrong."""

import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from atlas_jax.data import (
  ByteTokenizer,
  DataConfig,
  open_windows,
  pipeline,
  prepare,
  tokenizers,
  window_bytes,
)
from atlas_jax.data import windows as windows_module
from atlas_jax.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def config(text_folder):
  return DataConfig(path=str(text_folder), window=32, valid_fraction=0.3)


def documents(windows) -> dict[str, list[str]]:
  rows = map(
    json.loads, (windows.folder / "documents.jsonl").read_text().splitlines()
  )
  found = {"train": [], "valid": []}
  for row in rows:
    found[row["split"]].append(row["id"])
  return found


def all_bytes(split, tokenizer):
  return window_bytes(split, tokenizer, range(split.windows))


def test_split_by_document_loses_nothing(
  config, tokenizer, text_folder, tmp_path
):
  windows = prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  found = documents(windows)
  names = [path.name for path in sorted(text_folder.iterdir())]
  assert sorted(found["train"] + found["valid"]) == names
  assert 4 <= len(found["valid"]) <= 20
  for split in (windows.train, windows.valid):
    texts = [(text_folder / name).read_bytes() for name in found[split.name]]
    assert all_bytes(split, tokenizer) == texts
    assert split.documents == len(texts)
    assert split.tokens == split.bytes == sum(map(len, texts))
    places = split.windows * split.window
    assert split.padding == pytest.approx(1 - split.tokens / places)
    assert split.padding < 0.2
  assert windows.chunk == 8
  assert windows.tokenizer == tokenizer.fingerprint


def test_adding_documents_moves_none(config, tokenizer, text_folder, tmp_path):
  before = documents(prepare(config, tokenizer, chunk=8, cache=tmp_path))
  for i in range(20):
    (text_folder / f"new_{i}.txt").write_text("more text")
  after = documents(prepare(config, tokenizer, chunk=8, cache=tmp_path))
  assert set(before["valid"]) < set(after["valid"])
  assert set(before["train"]) < set(after["train"])


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_all_on_one_side(config, tokenizer, tmp_path, fraction):
  config = dataclasses.replace(config, valid_fraction=fraction)
  windows = prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  sides = [windows.train, windows.valid]
  empty, full = sides if fraction else sides[::-1]
  assert full.documents == 40
  assert empty.windows == empty.documents == empty.tokens == 0
  assert empty.padding == 0.0


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_side_is_left_empty(config, tokenizer, tmp_path, fraction):
  config = dataclasses.replace(config, valid_fraction=fraction)
  windows = prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  counts = [windows.train.documents, windows.valid.documents]
  assert sorted(counts) == [1, 39]
  assert counts[0] == (39 if fraction < 0.5 else 1)


def test_single_document_is_cut_near_its_end(tokenizer, tmp_path):
  text = "漢字 é 🙂 plain\n" * 40
  path = tmp_path / "a.txt"
  path.write_text(text, encoding="utf-8")
  raw = text.encode()
  for fraction in np.linspace(0.05, 0.4, 12).tolist():
    config = DataConfig(path=str(path), window=16, valid_fraction=fraction)
    windows = prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
    (head,) = all_bytes(windows.train, tokenizer)
    (tail,) = all_bytes(windows.valid, tokenizer)
    assert head + tail == raw
    assert head.decode() + tail.decode() == text
    assert len(tail) == pytest.approx(fraction * len(raw), abs=4)
    assert windows.valid.bytes == len(tail)
    assert windows.train.bytes == len(head)


def test_separate_held_out_text(config, tokenizer, tmp_path):
  held_out = tmp_path / "held.jsonl"
  held_out.write_text('{"text": "held out"}\n{"text": "and more"}\n')
  config = dataclasses.replace(config, valid_path=str(held_out))
  windows = prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  assert windows.train.documents == 40
  assert all_bytes(windows.valid, tokenizer) == [b"held out", b"and more"]


@pytest.mark.parametrize("kind", ["sentencepiece_file", "byte_level_file"])
def test_other_tokenizers_keep_the_bytes(
  config, request, text_folder, tmp_path, kind
):
  tokenizer = tokenizers.load(str(request.getfixturevalue(kind)))
  windows = prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  names = documents(windows)["train"]
  texts = [(text_folder / name).read_bytes() for name in names]
  assert all_bytes(windows.train, tokenizer) == texts
  assert windows.train.bytes == sum(map(len, texts))
  assert windows.train.tokens < windows.train.bytes


def test_text_changed_by_the_tokenizer_is_warned_of(
  config, plain_sentencepiece_file, tmp_path, caplog
):
  tokenizer = tokenizers.load(str(plain_sentencepiece_file))
  windows = prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  assert "does not keep 40 of 40 documents unchanged" in caplog.text
  decoded = all_bytes(windows.train, tokenizer)
  assert windows.train.bytes == sum(map(len, decoded))


def test_windows_are_found_made(config, tokenizer, tmp_path, monkeypatch):
  made = prepare(config, tokenizer, chunk=8, cache=tmp_path)
  monkeypatch.setattr(windows_module, "_build", None)
  assert prepare(config, tokenizer, chunk=8, cache=tmp_path) == made
  assert open_windows(made.folder) == made


def test_key_holds_all_that_matters(
  config, tokenizer, text_folder, sentencepiece_file, tmp_path
):
  def key(tokenizer=tokenizer, chunk=8, **changes):
    changed = dataclasses.replace(config, **changes)
    return prepare(changed, tokenizer, chunk=chunk, cache=tmp_path / "c").key

  keys = [
    key(),
    key(chunk=16),
    key(window=64),
    key(valid_fraction=0.2),
    key(valid_path=str(text_folder / "document_01.txt")),
    key(tokenizer=tokenizers.load(str(sentencepiece_file))),
  ]
  with (text_folder / "document_00.txt").open("a") as stream:
    stream.write("x")
  keys.append(key())
  assert len(set(keys)) == len(keys)
  # These change nothing in the windows.
  assert key(shuffle=False, eval_windows=3, field="body") == keys[-1]


def test_failure_leaves_nothing(config, tokenizer, tmp_path, monkeypatch):
  def fail(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(windows_module, "_publish", fail)
  with pytest.raises(KeyboardInterrupt):
    prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  assert list((tmp_path / "cache").iterdir()) == []


_KILLED = """
  import sys, time
  from atlas_jax import data
  from atlas_jax.data import windows
  def wait(*_):
    print("built", flush=True)
    time.sleep(60)
  windows._publish = wait
  config = data.DataConfig(path=sys.argv[1], window=32, valid_fraction=0.3)
  data.prepare(config, data.ByteTokenizer(), chunk=8, cache=sys.argv[2])
"""


def test_kill_before_the_rename(config, tokenizer, tmp_path):
  cache = tmp_path / "cache"
  child = subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(_KILLED), config.path, str(cache)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
  )
  with child:
    assert child.stdout.readline() == b"built\n"
    child.send_signal(signal.SIGKILL)
  (left,) = cache.iterdir()
  assert left.name.startswith(".windows-")
  made = prepare(config, tokenizer, chunk=8, cache=cache)
  assert made.train.windows > 0
  # The rest of the killed run stays until it is surely abandoned.
  assert left.exists()
  old = time.time() - 2 * windows_module._ABANDONED_AFTER
  for path in (*left.iterdir(), left):
    os.utime(path, (old, old))
  other = dataclasses.replace(config, window=64)
  prepare(other, tokenizer, chunk=8, cache=cache)
  assert not left.exists()
  assert made.folder.exists()


def _prepare_at_once(barrier, results, config, cache):
  publish = windows_module._publish

  def publish_together(*args):
    barrier.wait(30)
    publish(*args)

  windows_module._publish = publish_together
  results.put(prepare(config, ByteTokenizer(), chunk=8, cache=cache))


def test_two_processes_at_once(config, tokenizer, tmp_path):
  context = multiprocessing.get_context("spawn")
  barrier, results = context.Barrier(2), context.Queue()
  cache = tmp_path / "cache"
  children = [
    context.Process(
      target=_prepare_at_once, args=(barrier, results, config, cache)
    )
    for _ in range(2)
  ]
  for child in children:
    child.start()
  one, two = results.get(timeout=60), results.get(timeout=60)
  for child in children:
    child.join()
    assert child.exitcode == 0
  assert one == two == open_windows(one.folder)
  assert list(cache.iterdir()) == [one.folder]
  assert sorted(path.name for path in one.folder.iterdir()) == [
    "documents.jsonl",
    "manifest.json",
    "train.array_record",
    "valid.array_record",
  ]
  assert sum(map(len, all_bytes(one.train, tokenizer))) == one.train.bytes


def test_damaged_records_are_told_in_one_line(config, tokenizer, tmp_path):
  windows = prepare(config, tokenizer, chunk=8, cache=tmp_path)
  path = windows.train.path
  data = bytearray(path.read_bytes())
  data[len(data) // 3 : len(data) // 3 + 200] = bytes(200)
  path.write_bytes(data)
  batches = pipeline.train_dataset(windows.train, batch=1, seed=0)
  for read in (
    lambda: all_bytes(windows.train, tokenizer),
    lambda: [batches[i] for i in range(windows.train.windows)],
  ):
    with pytest.raises(UserError, match=r"are damaged .* delete the folder"):
      read()


def test_damaged_cache_is_refused(config, tokenizer, tmp_path):
  made = prepare(config, tokenizer, chunk=8, cache=tmp_path)
  size = made.train.path.stat().st_size
  os.truncate(made.train.path, size - 1)
  with pytest.raises(UserError, match=r"wrong size.*delete the folder"):
    prepare(config, tokenizer, chunk=8, cache=tmp_path)
  (made.folder / "manifest.json").write_text("{")
  with pytest.raises(UserError, match="delete the folder"):
    open_windows(made.folder)
  (made.folder / "manifest.json").write_text('{"version": 0}')
  with pytest.raises(UserError, match="version 0"):
    open_windows(made.folder)


def test_disk_full(config, tokenizer, tmp_path, monkeypatch):
  class FullWriter:
    def __init__(self, *_):
      pass

    def write(self, _):
      raise RuntimeError("write() failed: No space left on device; writing x")

  module = windows_module.array_record_module
  monkeypatch.setattr(module, "ArrayRecordWriter", FullWriter)
  with pytest.raises(UserError, match=r"No space left.*free some space"):
    prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_cannot_be_made(config, tokenizer, tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(UserError, match="cannot write tokenised windows"):
    prepare(config, tokenizer, chunk=8, cache=tmp_path / "file" / "cache")


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "the text is empty"),
    ("x", "only 1 tokens, too few to hold some out"),
    ("too short", "has 7 tokens, fewer than one window of 32"),
  ],
)
def test_too_little_text(tokenizer, tmp_path, text, message):
  path = tmp_path / "a.txt"
  path.write_text(text)
  config = DataConfig(path=str(path), window=32)
  with pytest.raises(UserError, match=message):
    prepare(config, tokenizer, chunk=8, cache=tmp_path / "cache")
  assert list((tmp_path / "cache").iterdir()) == []


def test_window_that_is_no_multiple(config, tokenizer, tmp_path):
  with pytest.raises(UserError, match="window=32 is not a multiple"):
    prepare(config, tokenizer, chunk=24, cache=tmp_path / "cache")


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("valid_fraction", -0.1),
    ("valid_fraction", 1.5),
    ("valid_fraction", float("nan")),
    ("window", 1),
    ("eval_windows", -1),
    ("read_threads", 0),
  ],
)
def test_field_out_of_range(name, value):
  with pytest.raises(UserError, match=f"data.{name} is {value}"):
    DataConfig(**{name: value})


def test_real_books(data_root, tokenizer, tmp_path):
  path = data_root / "books" / "books_valid.jsonl.xz"
  config = DataConfig(path=str(path), window=1024, valid_fraction=0.3)
  windows = prepare(config, tokenizer, chunk=64, cache=tmp_path)
  assert windows.train.documents + windows.valid.documents == 8
  assert windows.train.bytes + windows.valid.bytes == 3_597_453
  assert windows.train.padding < 0.01
