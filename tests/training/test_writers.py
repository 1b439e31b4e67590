"""Metrics on disk, and what a person sees."""

import io
import json
import sys

import pytest

from atlas_jax.errors import UserError
from atlas_jax.training import progress, writers

TRAIN = {"train/loss": 2.5, "train/grad_norm": 0.125}
HELD = {"heldout/loss": 2.25, "heldout/bits_per_byte": 3.5}


def test_json_lines_append_and_round_trip(tmp_path):
  path = tmp_path / "m.jsonl"
  for step in (1, 2):
    writer = writers.JsonLines(path)
    writer.write(step, {"x": 0.1, "y": float("nan"), "z": float("-inf")})
    writer.flush()
    writer.close()
  assert writers.read_json_lines(path) == [
    {"step": step, "x": 0.1, "y": "nan", "z": "-inf"} for step in (1, 2)
  ]
  for line in path.read_text().splitlines():
    json.loads(line, parse_constant=pytest.fail)


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
  writer = writers.JsonLines(tmp_path / "m.jsonl")
  writer.write(1, {"x": 1.0})
  assert writers.read_json_lines(tmp_path / "m.jsonl") == [
    {"step": 1, "x": 1.0}
  ]
  writer.close()


@pytest.mark.parametrize("bad", [b'{"step": 2', b"\xff\xfe", b"[]", b"{}", b""])
def test_only_a_last_line_may_be_damaged(tmp_path, bad):
  path = tmp_path / "m.jsonl"
  good = b'{"step": 1, "x": 1.0}\n'
  path.write_bytes(good + bad)
  assert writers.read_json_lines(path) == [{"step": 1, "x": 1.0}]
  path.write_bytes(good + bad + b"\n" + good)
  with pytest.raises(UserError, match=r"^line 2 of .*m\.jsonl is damaged"):
    writers.read_json_lines(path)


def test_a_reader_that_goes_away_does_not_end_the_training():
  class Closed(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

  lines = progress.Lines(Closed())
  lines.start(0, 10, 100)
  lines.metrics(1, TRAIN)
  lines.note("nobody reads this")
  lines.close()


def test_unwritable_metrics_are_one_line(tmp_path):
  with pytest.raises(UserError, match=r"^cannot write .*m\.jsonl"):
    writers.JsonLines(tmp_path / "absent" / "m.jsonl")


def test_tensorboard_writes_events(tmp_path):
  pytest.importorskip("tensorboardX", reason="pip install 'atlas-jax[tb]'")
  writer = writers.TensorBoard(tmp_path, after=0)
  writer.write(1, TRAIN)
  writer.close()
  (events,) = tmp_path.glob("events*")
  assert b"train/loss" in events.read_bytes()


def test_tensorboard_without_its_library_is_one_line(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  with pytest.raises(UserError, match=r"pip install 'atlas-jax\[tb\]'"):
    writers.TensorBoard(tmp_path, after=0)


def test_lines_have_loss_pace_and_time_left(monkeypatch):
  clock = iter([10.0, 12.0, 14.0])
  monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
  stream = io.StringIO()
  lines = progress.for_stream(stream)
  lines.start(0, 100, 500)
  for step in (1, 2, 3):
    lines.advance(step)
  lines.metrics(3, TRAIN)
  lines.note("a note")
  lines.close()
  assert stream.getvalue().splitlines() == [
    "step 3/100  loss 2.5000  gradient 0.125  250 tokens/s  3m14s left",
    "a note",
  ]


def test_terminal_gets_a_bar_with_the_same_figures(monkeypatch):
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")
  stream = Terminal()
  bar = progress.for_stream(stream)
  assert isinstance(bar, progress.Bar)
  bar.start(5, 100, 500)
  bar.advance(6)
  bar.advance(7)
  bar.metrics(7, TRAIN)
  bar.metrics(7, HELD)
  bar.close()
  text = stream.getvalue()
  assert "held-out loss 2.2500  3.5000 bits/byte" in text
  assert "7/100" in text
  assert "tokens/s" in text


@pytest.mark.parametrize(
  ("seconds", "text"),
  [(0.2, "0s"), (59.6, "1m00s"), (65, "1m05s"), (3725, "1h02m")],
)
def test_durations(seconds, text):
  assert progress.duration(seconds) == text
