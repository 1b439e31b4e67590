"""Checkpoints: the training state, with what is needed to go on from it.

One checkpoint is a folder named by its step. It holds the TrainState as arrays
and, in its metadata, JSON: the run's record (configuration, identity) and the
position in the data. Orbax writes it under a temporary name in the background
and renames it when it is whole, so that a name which is a number is a whole
checkpoint, whenever the process was killed.
"""

import contextlib
import gc
import logging
import os
import pathlib
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from atlas_jax import paths
from atlas_jax.errors import UserError
from atlas_jax.training.integrity import checksums, digest
from atlas_jax.training.step import TrainState

_STATE = "state"
# Their exported types are not those that the exported functions ask for.
_keep: Any = ocp.training.preservation_policies
_save: Any = ocp.training.save_decision_policies


class Checkpoints:
  """The checkpoints of one run; use it as a context manager.

  Args:
    folder: Where they are; made if need be.
    keep: How many of the latest stay.

  Raises:
    UserError: The folder cannot be used.
  """

  def __init__(self, folder: str | os.PathLike[str], keep: int):
    self.folder = pathlib.Path(folder)
    self._quiet = contextlib.ExitStack()
    with _writing(self.folder):
      self._orbax = ocp.training.Checkpointer(
        os.fspath(self.folder),
        preservation_policy=_keep.LatestN(keep),
        save_decision_policy=_save.FixedIntervalPolicy(1),
        # What a killed process left unfinished.
        cleanup_tmp_directories=True,
      )

  def __enter__(self) -> "Checkpoints":
    # Saving goes on in threads: their failures are told by the next call.
    self._quiet.enter_context(_quiet_logs())
    return self

  def __exit__(self, kind: Any, *_: Any) -> None:
    with self._quiet:
      if kind is None:
        with _writing(self.folder):
          self._orbax.close()
      else:
        # The error under way is the one to be told.
        with contextlib.suppress(UserError), _writing(self.folder):
          self._orbax.close()

  @property
  def latest(self) -> int | None:
    """The step of the latest whole checkpoint."""
    latest = self._orbax.latest
    return None if latest is None else latest.step

  def save(
    self, step: int, state: TrainState, metadata: Mapping[str, Any]
  ) -> None:
    """Begins to write a checkpoint; returns when the state may be donated.

    Args:
      step: The step, which names the folder; already saved: nothing is done.
      state: The state, whose arrays are copied before this returns.
      metadata: JSON values; `checksums` of the state and a `digest` of the
        metadata are added to them.

    Raises:
      UserError: This or the previous checkpoint could not be written.
    """
    if any(saved.step == step for saved in self._orbax.checkpoints):
      return
    metadata = {**metadata, "checksums": checksums(state)}
    metadata["digest"] = digest(metadata)
    with _writing(self.folder):
      self._orbax.save_checkpointables_async(
        step, {_STATE: state}, custom_metadata=metadata
      )

  def metadata(self, step: int) -> dict[str, Any]:
    """Returns the JSON values that were saved with a step."""
    return read_metadata(self.folder / str(step))

  def restore(self, step: int, abstract: TrainState) -> TrainState:
    """Reads a state.

    Args:
      step: One of the saved steps.
      abstract: Shapes, dtypes and shardings wanted; the shardings need not be
        those that were saved.

    Raises:
      UserError: The checkpoint is damaged or has other shapes.
    """
    return read_state(self.folder / str(step), abstract)


def latest_checkpoint(path: str | os.PathLike[str]) -> pathlib.Path:
  """Finds the latest checkpoint of a run.

  Args:
    path: A run's folder, or one checkpoint of it.

  Raises:
    UserError: There is none.
  """
  path = paths.expand(path).absolute()
  if path.name.isdecimal() and (path / _STATE).is_dir():
    return path
  folder = path / "checkpoints"
  steps = (
    [int(x.name) for x in folder.iterdir() if x.name.isdecimal()]
    if folder.is_dir()
    else []
  )
  if not steps:
    raise UserError(
      f"{path} holds no checkpoint: give the --workdir of a run that has "
      "saved one"
    )
  return folder / str(max(steps))


def read_metadata(checkpoint: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON values saved with a checkpoint.

  Raises:
    UserError: The checkpoint is damaged.
  """
  with _reading(checkpoint):
    metadata = ocp.checkpointables_metadata(
      os.fspath(checkpoint)
    ).custom_metadata
    if not isinstance(metadata, dict) or "digest" not in metadata:
      raise ValueError("its metadata are missing")
    if metadata.pop("digest") != digest(metadata):
      raise ValueError("its metadata have changed since they were written")
  return metadata


def read_state(checkpoint: pathlib.Path, abstract: TrainState) -> TrainState:
  """Reads a whole state; see `Checkpoints.restore`."""
  with _reading(checkpoint):
    saved = read_metadata(checkpoint)["checksums"]
    state = ocp.load_checkpointables(os.fspath(checkpoint), {_STATE: abstract})[
      _STATE
    ]
    _verify(state, saved)
  return state


def read_params(checkpoint: pathlib.Path, abstract: Any) -> Any:
  """Reads only the parameters of a checkpoint.

  Args:
    checkpoint: Its folder.
    abstract: Shapes, dtypes and shardings of the parameters, nested dicts.

  Raises:
    UserError: The checkpoint is damaged, or a parameter is not the same.
  """
  with _reading(checkpoint):
    sums = read_metadata(checkpoint)["checksums"]
    saved = ocp.checkpointables_metadata(os.fspath(checkpoint)).metadata[
      _STATE
    ]["params"]
  _compare(checkpoint, _shapes(saved), _shapes(abstract))
  with (
    _reading(checkpoint),
    ocp.Context(
      pytree_options=ocp.options.PyTreeOptions(
        loading=ocp.options.PyTreeOptions.Loading(partial_load=True)
      )
    ),
  ):
    target = {_STATE: {"params": abstract}}
    state = ocp.load_checkpointables(os.fspath(checkpoint), target)[_STATE]
    _verify(state, sums)
  return state["params"]


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
    for path, leaf in leaves
  }


def _compare(
  checkpoint: pathlib.Path,
  saved: Mapping[str, tuple[int, ...]],
  wanted: Mapping[str, tuple[int, ...]],
) -> None:
  for name in sorted({*saved, *wanted}):
    if saved.get(name) != wanted.get(name):
      raise UserError(
        f"the weights in {checkpoint} do not fit this model: {name} has shape "
        f"{saved.get(name, 'none')} there and {wanted.get(name, 'none')} here; "
        "use the same model settings"
      )


def _verify(tree: Any, saved: Mapping[str, int]) -> None:
  """Compares a tree with the checksums that were saved with it."""
  for name, value in checksums(tree).items():
    if value != saved[name]:
      raise ValueError(f"{name} has changed since it was written")


def _reading(checkpoint: pathlib.Path) -> AbstractContextManager[None]:
  return _told_once(
    lambda reason: (
      f"checkpoint {checkpoint} cannot be read ({reason}): it is truncated or "
      "damaged; move that folder away to go on from the checkpoint before it, "
      "or start anew in another --workdir"
    )
  )


def _writing(folder: pathlib.Path) -> AbstractContextManager[None]:
  return _told_once(
    lambda reason: (
      f"cannot write a checkpoint to {folder} ({reason}): free some space "
      "there and run the same command again; earlier checkpoints are intact"
    )
  )


@contextlib.contextmanager
def _told_once(tell: Callable[[str], str]) -> Iterator[None]:
  """Turns what fails within into one UserError, and silences the rest."""
  reason = None
  with _mute():
    try:
      yield
    except UserError:
      raise
    except Exception as error:
      reason = _reason(error)
    if reason is not None:
      # What failed beside the first complains in its thread, as late as at the
      # end of the process, and once more when it is collected.
      for logger in _LOGGERS:
        logger.addFilter(_NO_ERRORS)
      time.sleep(0.2)
      gc.collect()
  if reason is not None:
    raise UserError(tell(reason))


def _reason(error: BaseException) -> str:
  """The innermost cause of an error, without what it says of its settings."""
  while error.__cause__ is not None:
    error = error.__cause__
  line = (str(error).splitlines() or [type(error).__name__])[0]
  line = re.split(r" \[\w+(?:\[\d+\])?=", line)[0]
  return line if len(line) <= 100 else line.rsplit(": ", 1)[-1][-160:]


class _NoErrors(logging.Filter):
  def filter(self, record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING or (
      f"{os.sep}orbax{os.sep}" not in record.pathname
      and record.name != "asyncio"
    )


_LOGGERS = tuple(logging.getLogger(name) for name in ("absl", "asyncio"))
_NO_ERRORS = _NoErrors()


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
  """Drops what Orbax and its event loop log of a failure.

  It comes back as an exception, once, which is enough.
  """
  quiet = _NoErrors()
  for logger in _LOGGERS:
    logger.addFilter(quiet)
  try:
    yield
  finally:
    for logger in _LOGGERS:
      logger.removeFilter(quiet)


@contextlib.contextmanager
def _mute() -> Iterator[None]:
  """Also drops warnings and what threads print of their exceptions."""
  hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
  try:
    with _quiet_logs(), warnings.catch_warnings():
      warnings.simplefilter("ignore")
      yield
  finally:
    sys.unraisablehook = hook
