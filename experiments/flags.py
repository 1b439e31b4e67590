"""One absl flag for each field of a configuration, and how a main starts.

The fields of frozen dataclasses become flags with dotted names, unset unless
given, so that a preset is changed only where the command line says so:

  python -m experiments.train --config=demo --model.dim=256 --train.steps=100

A main defines its flags at import and hands its function to `run`:

  flags.define_presets(PRESETS)
  flags.define_fields(ExperimentConfig)

  def main() -> None:
    config = flags.resolve(PRESETS)

  if __name__ == "__main__":
    flags.run(main)

Whatever is wrong with the command line or with what the user asks for ends in
one line on stderr and exit code 2.
"""

import errno
import io
import os
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import jax
from absl import app, flags, logging

from atlas_jax import config as config_lib
from atlas_jax.errors import UserError

Config = TypeVar("Config")

# Arguments of a preset that name mixers, and the fields they are.
_MIXERS = {
  "mixer": "model.mixer",
  "pattern": "model.pattern",
  "memory": "model.hybrid.memory",
}

EXIT_USER_ERROR = 2
_EXIT_INTERRUPTED = 130


def define_presets(
  presets: Iterable[str], flag_values: flags.FlagValues = flags.FLAGS
) -> None:
  """Defines `--config`, the name of the preset to start from."""
  doc = f"Preset to start from: {', '.join(presets)}."
  _define("config", doc, flag_values)


def define_fields(
  cls: Any,
  only: Iterable[str] = (),
  flag_values: flags.FlagValues = flags.FLAGS,
) -> None:
  """Defines one flag for each leaf of a configuration class.

  Args:
    cls: The dataclass; a leaf `model.dim` becomes `--model.dim`.
    only: Dotted names of the leaves or branches wanted; all if empty.
    flag_values: Where the flags are defined.
  """
  wanted = tuple(only)
  for name, leaf in config_lib.leaves(cls).items():
    if wanted and not any(f"{name}.".startswith(f"{w}.") for w in wanted):
      continue
    values = config_lib.describe(leaf.type)
    doc = f"{leaf.doc} ({values}; default {_show(leaf.default)})"
    boolean = bool in (leaf.type, *typing.get_args(leaf.type))
    _define(name, doc, flag_values, boolean)


def overrides(
  cls: Any, flag_values: flags.FlagValues = flags.FLAGS
) -> dict[str, Any]:
  """Returns the leaves given on the command line, by dotted name.

  Raises:
    UserError: A value cannot be read as the type of its field.
  """
  return {
    name: config_lib.coerce(flag_values[name].value, leaf.type, f"--{name}")
    for name, leaf in config_lib.leaves(cls).items()
    if name in flag_values and flag_values[name].present
  }


def resolve(
  presets: Mapping[str, Callable[..., Config]],
  flag_values: flags.FlagValues = flags.FLAGS,
) -> Config:
  """Returns the preset named by `--config` with the given flags laid over it.

  A preset whose mixers are changed is asked for anew, with the new names: what
  it says of the memory depends on them.

  Raises:
    UserError: No preset or an unknown one is named, or a value is wrong.
  """
  name = flag_values["config"].value
  if name is None:
    raise UserError(f"no preset given; add --config=<{'|'.join(presets)}>")
  preset = presets.get(name)
  if preset is None:
    nearest = config_lib.suggestion(name, presets)
    known = ", ".join(presets)
    raise UserError(
      f"unknown preset {name!r}{nearest or f'; there are {known}'}"
    )
  base = preset()
  given = overrides(type(base), flag_values)
  mixers = {
    argument: given[field]
    for argument, field in _MIXERS.items()
    if field in given
  }
  if mixers:
    base = preset(**mixers)
  return config_lib.replace(base, given)


def run(main: Callable[[], Any]) -> None:
  """Parses the command line, runs `main` and ends the program.

  A wrong command line or a `UserError` prints `error: …`, one line, and exits
  with code 2; Ctrl-C exits with 130; a reader of our output that closes its
  end, as `| head` does, ends the program silently.
  """
  app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


def stdin() -> typing.BinaryIO:
  """Standard input as bytes, empty where it is closed."""
  return io.BytesIO() if sys.stdin is None else sys.stdin.buffer


def _define(
  name: str, doc: str, flag_values: flags.FlagValues, boolean: bool = False
) -> None:
  """Defines a flag, unset by default, whose value stays a string."""
  parser, serializer = flags.ArgumentParser(), flags.ArgumentSerializer()
  flag = flags.Flag(parser, serializer, name, None, doc, boolean=boolean)
  # absl's --help shows the flags of the main module, which it knows by
  # argv[0].
  flags.DEFINE_flag(flag, flag_values, module_name=sys.argv[0])


def _show(value: Any) -> str:
  if isinstance(value, tuple):
    return ",".join(map(_show, value))
  return repr(value) if isinstance(value, str) else str(value).lower()


def _parse(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except SystemExit:  # absl has printed the help, and calls that a failure.
    sys.exit(0)
  except flags.UnrecognizedFlagError as error:
    name = error.flagname
    nearest = config_lib.suggestion(name, flags.FLAGS, "--")
    _fail(f"unknown flag --{name}{nearest or '; --help lists the flags'}")
  except flags.Error as error:
    _fail(str(error).removeprefix("ERROR:: "))


def _guarded(main: Callable[[], Any], argv: list[str]) -> Any:
  # absl raises the default to INFO, at which libraries tell of every file.
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  try:
    if len(argv) > 1:
      _fail(f"unexpected argument {argv[1]!r}; write --name=value")
    if sys.stdout is None:  # closed, as by `>&-`
      sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
      # A terminal of few letters shows a ? for the others.
      sys.stdout.reconfigure(errors="replace")
    result = main()
    sys.stdout.flush()
    return result
  except UserError as error:
    _fail(str(error))
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(_EXIT_INTERRUPTED)
  except BrokenPipeError:
    _drop_output()
    sys.exit(0)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    _fail(
      f"out of memory: {error}; take a smaller model, batch, window or length"
    )
  except OSError as error:
    if error.errno != errno.ENOSPC:
      raise
    _drop_output()
    _fail("cannot write the output: no space left on the device")


def _drop_output() -> None:
  """Python flushes stdout once more at exit, and would fail once more."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fail(message: str) -> NoReturn:
  print(f"error: {' '.join(message.split())}", file=sys.stderr)
  sys.exit(EXIT_USER_ERROR)
