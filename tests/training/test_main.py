"""The main that trains: what its flags become, and how it ends."""

import types

import pytest
from absl import flags as absl_flags

from atlas_jax.errors import UserError
from experiments import train as main


@pytest.fixture
def called(monkeypatch):
  """Runs the main with flags; returns what `train` was called with."""
  seen = {}

  def call(*arguments, status="finished"):
    def train(config, workdir, **kwargs):
      seen.update(config=config, workdir=workdir, **kwargs)
      return types.SimpleNamespace(status=status)

    monkeypatch.setattr(main, "train", train)
    absl_flags.FLAGS.unparse_flags()
    try:
      absl_flags.FLAGS(["train", *arguments])
      main.main()
    finally:
      for name in absl_flags.FLAGS:
        absl_flags.FLAGS[name].unparse()
      absl_flags.FLAGS.mark_as_parsed()
    return seen

  return call


def test_flags_lie_over_the_preset(called):
  seen = called(
    "--config=demo",
    "--workdir=DIR",
    "--init_from=OTHER",
    "--train.steps=7",
    "--model.dim=64",
    "--mesh.fsdp=2",
  )
  assert seen["config"].train.steps == 7
  assert seen["config"].model.dim == 64
  assert seen["config"].mesh.fsdp == 2
  assert (seen["workdir"], seen["init_from"]) == ("DIR", "OTHER")


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_an_end_or_a_signal_is_success(called, status):
  called("--config=demo", "--workdir=DIR", status=status)


def test_a_loss_that_is_no_number_is_failure(called):
  with pytest.raises(SystemExit) as caught:
    called("--config=demo", "--workdir=DIR", status="non-finite")
  assert caught.value.code == 1


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--config=demo"], "no folder given: add --workdir=DIR"),
    (["--workdir=DIR"], "no preset given"),
    (["--config=dmo", "--workdir=DIR"], "demo"),
    (["--config=demo", "--workdir=DIR", "--train.steps=0"], "train.steps must"),
    (["--config=demo", "--workdir=DIR", "--train.batch=x"], "train.batch"),
  ],
)
def test_bad_flags_are_one_line(called, arguments, message):
  with pytest.raises(UserError, match=message) as caught:
    called(*arguments)
  assert "\n" not in str(caught.value)
