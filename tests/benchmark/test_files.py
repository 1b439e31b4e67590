"""Where reports go, and the main's words about wrong flags."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from atlas_jax import environment
from atlas_jax.benchmark import files
from atlas_jax.benchmark.tables import table
from atlas_jax.errors import UserError

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_both_files_are_written(tmp_path):
  page, figures = files.write(
    os.fspath(tmp_path / "new"), "page", "suite", "# Title\n", {"a": [1.5]}
  )
  assert page.read_text() == "# Title\n"
  assert page.name == "page.md"
  assert json.loads(figures.read_text()) == {"a": [1.5]}
  assert figures.parent.name == "results"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
  file = tmp_path / "file"
  file.write_text("")
  for attempt in (
    lambda: files.check(os.fspath(file)),
    lambda: files.write(os.fspath(file), "p", "s", "", {}),
  ):
    with pytest.raises(UserError, match="--out") as error:
      attempt()
    assert "\n" not in str(error.value)


def test_check_leaves_nothing_behind(tmp_path):
  files.check(os.fspath(tmp_path))
  assert [p.name for p in tmp_path.rglob("*")] == ["results"]


def test_table():
  assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_environment_is_told_in_one_line():
  found = json.loads(json.dumps(environment.describe()))
  line = environment.sentence(found)
  assert "\n" not in line
  assert found["packages"]["jax"] in line


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--suite=speed"], "unknown suite 'speed': use memory, bounds or mixers"),
    (["--suite=memory", "--lengths=64,x"], "give whole numbers"),
    (["--suite=memory", "--lengths=65"], "multiple of the chunk 64"),
  ],
)
def test_wrong_flags_end_in_one_line(arguments, words):
  done = subprocess.run(
    [sys.executable, "-m", "experiments.benchmark", *arguments],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert words in done.stderr
  assert done.stderr.count("\n") == 1
