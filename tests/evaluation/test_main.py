"""The main that evaluates a run, as a user calls it."""

import json
import shutil

import pytest

from tests.evaluation.helpers import TEXTS, write_texts
from tests.generation.helpers import make_run, run_main


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("run"))


def test_it_prints_and_writes_what_it_measured(workdir, tmp_path):
  text = write_texts(tmp_path / "text")
  done = run_main(
    "evaluate",
    f"--workdir={workdir}",
    f"--data.path={text}",
    "--context=16",
    "--batch=2",
  )
  assert done.returncode == 0, done.stderr
  assert b"bits per byte" in done.stdout
  (path,) = (workdir / "evaluation").glob("step-3-context-16-*.json")
  assert f"{path}\n".encode() in done.stdout
  assert str(path.with_suffix(".png")).encode() in done.stdout
  assert path.with_suffix(".png").exists()
  result = json.loads(path.read_text())["result"]
  assert {x["id"] for x in result["documents"]} == set(TEXTS)


def test_a_truncated_checkpoint_is_one_line(workdir, tmp_path):
  broken = tmp_path / "run"
  shutil.copytree(workdir, broken, ignore=shutil.ignore_patterns("evaluation"))
  for path in (broken / "checkpoints" / "3").rglob("*"):
    if path.is_file() and path.stat().st_size > 1000:
      path.write_bytes(path.read_bytes()[:100])
  done = run_main("evaluate", f"--workdir={broken}")
  assert done.returncode == 2
  assert done.stderr.startswith(b"error: checkpoint ")
  assert b"truncated or damaged" in done.stderr
  assert done.stderr.count(b"\n") == 1
  assert not (broken / "evaluation").exists()
