"""The main that continues a text, with a pretrained model."""

import json

import pytest

from tests.generation.helpers import run_main

pytest.importorskip("tokenizers", reason="pip install 'atlas-jax[gguf]'")


def test_it_continues_a_text_with_a_pretrained_model(tiny_file):
  done = run_main(
    "generate",
    f"--hf={tiny_file}",
    "--prompt=the 12 in",
    "--max_tokens=12",
    "--temperature=0.9",
    "--seed=3",
  )
  assert done.returncode == 0, done.stderr
  assert len(done.stdout) > 2
  assert done.stderr == b""


def test_a_run_and_a_pretrained_model_at_once_are_refused(tiny_file):
  done = run_main(
    "generate", f"--hf={tiny_file}", "--workdir=runs/mine", "--prompt=a"
  )
  assert done.returncode == 2
  assert done.stderr.startswith(b"error: give one model, by --workdir=DIR")
  assert done.stderr.count(b"\n") == 1


def test_a_pretrained_model_is_evaluated_like_a_run(tiny_file, tmp_path):
  text = tmp_path / "text"
  text.mkdir()
  for name in "ab":
    (text / name).with_suffix(".txt").write_text(f"the 12 in {name} then " * 9)
  done = run_main(
    "evaluate",
    f"--hf={tiny_file}",
    f"--output={tmp_path / 'out'}",
    f"--data.path={text}",
  )
  assert done.returncode == 0, done.stderr
  (path,) = (tmp_path / "out" / "evaluation").glob("*.json")
  report = json.loads(path.read_text())
  assert report["run"]["init_from"] == str(tiny_file)
  ids = {document["id"] for document in report["result"]["documents"]}
  assert ids == {"a.txt", "b.txt"}


def test_evaluation_says_which_flags_belong_together(tiny_file):
  done = run_main("evaluate", f"--hf={tiny_file}")
  assert done.returncode == 2
  assert done.stderr.startswith(b"error: give one model, by --workdir=DIR")
  assert done.stderr.count(b"\n") == 1
