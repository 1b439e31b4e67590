"""The main that continues a text, with a pretrained model."""

import pytest

from tests.generation.helpers import run_main

pytest.importorskip("tokenizers")


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
