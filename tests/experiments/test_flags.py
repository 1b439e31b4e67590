"""Flags made from dataclasses, and the way a main ends."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from atlas_jax import config
from atlas_jax.errors import UserError
from experiments import flags

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Model:
  """A branch."""

  dim: int = config.field(64, "Width of the model.")
  deep: bool = config.field(True, "Whether it is deep.")
  sketch: int | None = config.field(None, "Perhaps a number.")
  residual: bool | None = config.field(None, "Yes, no or neither.")


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A root."""

  model: Model = config.field(Model(), "The model.")
  name: str = config.field("first", "A name.")


def large() -> Experiment:
  return Experiment(model=Model(dim=512, sketch=3), name="large")


PRESETS = {"small": Experiment, "large": large}


def parse(*argv: str, only=()) -> absl_flags.FlagValues:
  values = absl_flags.FlagValues()
  flags.define_presets(PRESETS, values)
  flags.define_fields(Experiment, only, values)
  values(["main", *argv])
  return values


def test_only_given_flags_override_the_preset():
  assert flags.resolve(PRESETS, parse("--config=large")) == large()
  got = flags.resolve(
    PRESETS,
    parse("--config=large", "--model.dim=8", "--nomodel.deep", "--name="),
  )
  assert got == Experiment(Model(dim=8, deep=False, sketch=3), name="")


def test_none_is_a_value_that_overrides():
  got = flags.resolve(PRESETS, parse("--config=large", "--model.sketch=none"))
  assert got.model.sketch is None


@pytest.mark.parametrize(
  ("flag", "value"),
  [
    ("--model.residual", True),
    ("--nomodel.residual", False),
    ("--model.residual=none", None),
  ],
)
def test_a_boolean_may_be_unset(flag, value):
  got = flags.resolve(PRESETS, parse("--config=small", flag))
  assert got.model.residual is value


def test_the_last_of_two_equal_flags_counts():
  values = parse("--config=large", "--model.dim=8", "--model.dim", "9")
  assert flags.resolve(PRESETS, values).model.dim == 9


def test_a_part_of_the_fields():
  values = parse("--model.dim=8", only=["model"])
  assert flags.overrides(Experiment, values) == {"model.dim": 8}
  with pytest.raises(absl_flags.UnrecognizedFlagError):
    parse("--name=a", only=["model"])


def test_help_has_the_doc_the_type_and_the_default():
  text = " ".join(parse().get_help().split())
  assert "--model.dim: Width of the model. (int; default 64)" in text
  assert "--[no]model.deep: Whether it is deep. (true or false;" in text
  assert "--name: A name. (str; default 'first')" in text
  assert "--config: Preset to start from: small, large." in text


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ([], "no preset given; add --config=<small|large>"),
    (["--config=larg"], "unknown preset 'larg'; did you mean large?"),
    (["--config=zz"], "unknown preset 'zz'; there are small, large"),
    (["--config=large", "--model.dim=x"], "--model.dim: expected int, got 'x'"),
    (["--config=large", "--model.deep=x"], "--model.deep: expected true or"),
  ],
)
def test_what_cannot_be_resolved_is_one_line(argv, words):
  with pytest.raises(UserError) as caught:
    flags.resolve(PRESETS, parse(*argv))
  assert str(caught.value).startswith(words)
  assert "\n" not in str(caught.value)


PROGRAM = '''
"""Words about the program."""
import dataclasses
from atlas_jax import config
from atlas_jax.errors import UserError
from experiments import flags

@dataclasses.dataclass(frozen=True)
class Root:
  dim: int = config.field(1, "Width.")
  action: str = config.field("", "What to do.")

PRESETS = {"one": Root}
flags.define_presets(PRESETS)
flags.define_fields(Root)

def main():
  action = flags.resolve(PRESETS).action
  if action == "refuse":
    raise UserError("cannot do this;\\n do that")
  if action == "interrupt":
    raise KeyboardInterrupt
  if action == "crash":
    raise ValueError("a bug")
  for line in range(100_000 if action == "talk" else 1):
    print(line)

flags.run(main)
'''


def program(*argv: str, **options) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-c", PROGRAM, *argv],
    cwd=_ROOT,
    text=True,
    timeout=60,
    **options,
  )


@pytest.mark.parametrize(
  ("argv", "code", "message"),
  [
    (["--config=one"], 0, ""),
    (["--dmi=3"], 2, "error: unknown flag --dmi; did you mean --dim?\n"),
    (["--zz=3"], 2, "error: unknown flag --zz; --help lists the flags\n"),
    (["--dim"], 2, "error: Missing value for flag --dim\n"),
    (["one"], 2, "error: unexpected argument 'one'; write --name=value\n"),
    (
      ["--config=one", "--action=refuse"],
      2,
      "error: cannot do this; do that\n",
    ),
    (["--config=one", "--action=interrupt"], 130, "interrupted\n"),
  ],
)
def test_a_program_ends_with_one_line(argv, code, message):
  done = program(*argv, capture_output=True)
  assert (done.returncode, done.stderr) == (code, message)


def test_a_bug_keeps_its_traceback():
  done = program("--config=one", "--action=crash", capture_output=True)
  assert done.returncode == 1
  assert "ValueError: a bug" in done.stderr
  assert "Traceback" in done.stderr


def test_help_shows_the_fields():
  done = program("--help", capture_output=True)
  assert done.returncode == 0
  assert "--dim: Width. (int; default 1)" in done.stdout
  assert done.stderr == ""


@pytest.mark.parametrize(
  ("redirection", "code", "said"),
  [
    (">&-", 0, ""),
    ("<&-", 0, ""),
    pytest.param(
      ">/dev/full",
      2,
      "error: cannot write the output: no space left",
      marks=pytest.mark.skipif(
        not os.path.exists("/dev/full"),
        reason="wants /dev/full: run it on Linux",
      ),
    ),
  ],
)
def test_closed_and_full_streams(redirection, code, said):
  command = f'exec "$0" -c "$1" --config=one {redirection}'
  done = subprocess.run(
    ["sh", "-c", command, sys.executable, PROGRAM],
    cwd=_ROOT,
    stderr=subprocess.PIPE,
    text=True,
    check=False,
  )
  assert done.returncode == code, done.stderr
  assert done.stderr.startswith(said)


def test_a_reader_that_leaves_ends_the_program_silently():
  with subprocess.Popen(
    [sys.executable, "-c", PROGRAM, "--config=one", "--action=talk"],
    cwd=_ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
