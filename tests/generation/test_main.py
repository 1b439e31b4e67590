"""The main that continues a text, as a user calls it."""

import pytest

from tests.generation.helpers import make_run, run_main


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run whose weights are those before its first step."""
  return make_run(tmp_path_factory.mktemp("run"), step=0)


def test_it_prints_the_continuation_and_warns_of_random_weights(workdir):
  done = run_main(
    "generate",
    f"--workdir={workdir}",
    "--prompt_file=-",
    "--max_tokens=12",
    "--temperature=0.9",
    "--top_k=40",
    "--top_p=0.9",
    "--seed=3",
    "--stop=never",
    stdin="ünd".encode(),
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith(b"\n")
  assert len(done.stdout) > 2
  assert b"weights of this model are random" in done.stderr


def test_bytes_that_are_not_utf_8_are_one_line(workdir):
  done = run_main("generate", f"--workdir={workdir}", "--prompt=\udcff")
  assert done.returncode == 2
  assert done.stdout == b""
  assert done.stderr.startswith(b"error: the prompt is not UTF-8 text")
  assert done.stderr.count(b"\n") == 1
