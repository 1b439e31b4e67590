"""The training loop: from a configuration to a trained, resumable run."""

import collections
import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from atlas_jax.errors import UserError
from atlas_jax.models.config import ModelConfig
from atlas_jax.models.matching import reference
from atlas_jax.models.size import size
from atlas_jax.training import checkpoint, identity, progress, writers
from atlas_jax.training.config import ExperimentConfig
from atlas_jax.training.heldout import evaluate, with_bytes
from atlas_jax.training.nonfinite import explain
from atlas_jax.training.program import Program, make_program
from atlas_jax.training.sharding import make_mesh
from atlas_jax.training.signals import StopRequest
from atlas_jax.training.step import Report, TrainState
from atlas_jax.training.task import Task, make_task
from atlas_jax.training.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Summary:
  """How a call of `train` ended.

  Attributes:
    status: "finished": all steps are done; "stopped": a signal asked;
      "non-finite": a step had a loss or gradient that was no number.
    reason: A sentence about it.
    step: Steps done, by this call and those before it.
    train: The last step's metrics; empty if this call took no step.
    heldout: Held-out metrics by step, of all calls.
    parameters: Numbers in the model.
    seconds: Wall time of this call's loop.
  """

  status: Literal["finished", "stopped", "non-finite"]
  reason: str
  step: int
  train: Mapping[str, float]
  heldout: Mapping[int, Mapping[str, float]]
  parameters: int
  seconds: float


def train(
  config: ExperimentConfig,
  workdir: str | os.PathLike[str],
  *,
  init_from: str | os.PathLike[str] | None = None,
  task: Task | None = None,
  reporter: progress.Reporter | None = None,
) -> Summary:
  """Trains, or goes on training, the run of a folder.

  With the same machine, versions, devices and settings, a run that was
  interrupted in any way and called again gives the bits of one that was not.
  Every process of a `jax.distributed` run calls this; process 0 writes.

  Args:
    config: The whole experiment.
    workdir: The run's folder, new or one that this configuration made. A
      folder with checkpoints goes on from the latest.
    init_from: A run's folder, or one checkpoint of it, whose weights a new
      run starts with (its optimizer and data start anew).
    task: The model, text and tokenizer; None: those that `config` names.
    reporter: Is told of progress; None: nobody is.

  Returns:
    How it ended. A signal and a non-finite loss are returned, not raised; in
    both cases the last good state was saved.

  Raises:
    UserError: Something that the user must change.
  """
  home = Workdir(workdir)
  primary = jax.process_index() == 0
  reporter = reporter or progress.Silent()
  config.validate(jax.device_count())
  with contextlib.ExitStack() as stack:
    stack.callback(reporter.close)
    if primary:
      stack.enter_context(home.claimed())
    changed = home.check(config)
    task = task or make_task(config, home.path)
    mesh = make_mesh(*config.mesh.shape(jax.device_count()))
    program = make_program(task.build, config.train, mesh)
    reporter.note(_parameters(config.model, task, program.parameters))
    known = home.read()
    record = identity.describe(
      config, task, program.parameters, init_from, known
    )
    saved = stack.enter_context(
      checkpoint.Checkpoints(home.checkpoints, config.train.keep)
    )
    batches = task.batches()
    stack.callback(batches.close)
    step = saved.latest
    if step is not None and step > config.train.steps:
      raise UserError(
        f"the run in {home.path} has {step} steps already, more than "
        f"train.steps={config.train.steps}: ask for more, or give another "
        "--workdir"
      )
    if step is not None:
      # The record in the folder may have been replaced; this one cannot.
      state = _resume(saved, step, program, batches, config, home)
      reporter.note(f"going on from step {step} of {home.path}")
    else:
      if known is not None:
        reporter.note(f"no checkpoint in {home.path} yet: starting anew")
      # As recorded, also where this call came after a kill and has no flag.
      state = _start(program, task, record["init_from"])
    if changed and step is not None:
      shown = {k: list(v) for k, v in changed.items()}
      record["history"].append({"step": step, "changes": shown})
      for name, (before, now) in changed.items():
        reporter.note(f"from step {step} on: {name}={now} (was {before})")
    if primary:
      # First the record: it says whose all other files are.
      home.write(record)
      home.rewind(-1 if step is None else step)
      task.tokenizer.save(home.tokenizer)
    _barrier("prepared")
    loop = _Loop(
      config=config,
      task=task,
      program=program,
      saved=saved,
      batches=batches,
      record=record,
      reporter=reporter,
      measured=home.heldout(),
      writer=_writer(config, home, step or 0) if primary else None,
      timing=writers.JsonLines(home.timing) if primary else None,
    )
    stack.callback(loop.close)
    return loop.run(state)


def _parameters(model: ModelConfig, task: Task, parameters: int) -> str:
  """How many parameters there are, and how many in what they are matched to."""
  text = f"{parameters:,} parameters"
  if not model.match:
    return text
  other = size(reference(model), task.tokenizer.vocab_size).parameters
  return f"{text} ({model.match} of the same sizes: {other:,})"


class _NonFinite(Exception):
  """A step whose loss, gradient or update was no number."""


class _Loop:
  """The loop itself; see `train`."""

  def __init__(
    self,
    *,
    config: ExperimentConfig,
    task: Task,
    program: Program,
    saved: checkpoint.Checkpoints,
    batches: Any,
    record: Mapping[str, Any],
    reporter: progress.Reporter,
    measured: dict[int, dict[str, float]],
    writer: writers.MetricWriter | None,
    timing: writers.MetricWriter | None,
  ):
    self._config = config.train
    self._task = task
    self._program = program
    self._saved = saved
    self._batches = batches
    self._record = record
    self._reporter = reporter
    self._measured = measured
    self._writer = writer or writers.Several()
    self._timing = timing or writers.Several()
    self._tokens = config.train.batch * config.data.window
    self._pending: tuple[int, Report] | None = None
    self._last: dict[str, float] = {}
    # Where the data stood after each of the last steps.
    self._positions: collections.deque[tuple[int, Any]] = collections.deque(
      maxlen=3
    )
    self._pace = (0, 0.0)

  def run(self, state: TrainState) -> Summary:
    """Trains from `state` to the end, a signal or a non-finite step."""
    began = time.monotonic()
    status, reason = "finished", "all steps are done"
    step = int(state.step)
    self._positions.append((step, self._batches.get_state()))
    self._reporter.start(step, self._config.steps, self._tokens)
    with StopRequest() as stop:
      try:
        if step == 0:
          self._evaluate(step, state)
        asked = stop.after(step)
        while step < self._config.steps and not asked:
          batch = self._next()
          step += 1
          with jax.transfer_guard("disallow"):
            state, report = self._program.train_step(state, batch)
          # Only now, with this step on its way, wait for the one before.
          self._settle()
          self._pending = (step, report)
          self._positions.append((step, self._batches.get_state()))
          asked = stop.after(step)
          self._measure_and_save(step, state, asked)
        if asked and step < self._config.steps:
          status, reason = (
            "stopped",
            f"{stop.name} received; the same command goes on from here",
          )
        self._finish(step, state)
      except _NonFinite as error:
        status, reason = "non-finite", str(error)
        state = state._replace(
          halted=jax.device_put(np.array(False), state.halted.sharding)
        )
        step = int(state.step)
        self._batches.set_state(dict(self._positions)[step])
        self._save(step, state)
    self._reporter.note(f"{status} after step {step}: {reason}")
    return Summary(
      status=status,
      reason=reason,
      step=step,
      train=self._last,
      heldout=self._measured,
      parameters=self._program.parameters,
      seconds=time.monotonic() - began,
    )

  def close(self) -> None:
    """Lets go of the files."""
    self._writer.close()
    self._timing.close()

  def _next(self) -> dict[str, jax.Array]:
    batch = with_bytes(next(self._batches), self._task.tokenizer.byte_length)
    return self._program.place(batch)

  def _measure_and_save(
    self, step: int, state: TrainState, asked: bool
  ) -> None:
    """Does what is due after a step: held-out loss, then a checkpoint.

    In this order, so that a checkpoint's metrics are complete.
    """
    if _due(step, self._config.eval_every):
      self._settle()
      self._evaluate(step, state)
    if asked or _due(step, self._config.checkpoint_every):
      self._settle()
      self._save(step, state)

  def _finish(self, step: int, state: TrainState) -> None:
    self._settle()
    if step >= self._config.steps:
      self._evaluate(step, state)
    self._save(step, state)

  def _settle(self) -> None:
    """Reads the metrics of the step whose results are still outstanding.

    Raises:
      _NonFinite: They are not finite.
    """
    if self._pending is None:
      return
    (step, report), self._pending = self._pending, None
    fetched, finite = jax.device_get((report.metrics, report.finite))
    self._last = {name: float(fetched[name]) for name in sorted(fetched)}
    self._reporter.advance(step)
    if not finite:
      self._write("train", step, self._last)
      reason = explain(self._last, jax.device_get(report.nonfinite))
      raise _NonFinite(f"step {step} had {reason}")
    if self._pace[1] == 0.0:
      self._pace = (step, time.monotonic())
    if step % self._config.log_every == 0 or step == self._config.steps:
      self._write("train", step, self._last)
      self._write_pace(step)

  def _write(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
    named = {f"{part}/{name}": value for name, value in metrics.items()}
    self._writer.write(step, named)
    self._reporter.metrics(step, named)

  def _write_pace(self, step: int) -> None:
    before, then = self._pace
    now = time.monotonic()
    if step > before:
      rate = (step - before) * self._tokens / (now - then)
      self._timing.write(step, {"tokens_per_second": rate})
    self._pace = (step, now)

  def _evaluate(self, step: int, state: TrainState) -> None:
    if step in self._measured or not self._task.heldout:
      return
    metrics = evaluate(self._program, state.params, self._task.heldout)
    self._measured[step] = metrics
    self._write("heldout", step, metrics)
    self._pace = (step, time.monotonic() if step else 0.0)

  def _save(self, step: int, state: TrainState) -> None:
    self._writer.flush()
    self._timing.flush()
    position = self._batches.get_state()
    self._saved.save(
      step, state, {"record": self._record, "position": position}
    )
    self._pace = (step, time.monotonic() if self._pace[1] else 0.0)


def _due(step: int, every: int) -> bool:
  return bool(every) and step % every == 0


def _start(program: Program, task: Task, init_from: str | None) -> TrainState:
  """Makes the first state, with the weights of a checkpoint if asked."""
  if init_from is None:
    return program.init()
  source = checkpoint.latest_checkpoint(init_from)
  record = checkpoint.read_metadata(source)["record"]
  if record["tokenizer"] != task.tokenizer.fingerprint:
    raise UserError(
      f"{source} was trained with another tokenizer, so its weights mean "
      "other tokens: give --data.tokenizer as there"
    )
  params = checkpoint.read_params(source, program.abstract.params)
  return program.init()._replace(params=params)


def _resume(
  saved: checkpoint.Checkpoints,
  step: int,
  program: Program,
  batches: Any,
  config: ExperimentConfig,
  home: Workdir,
) -> TrainState:
  """Reads a step's state and puts the data where it stood."""
  metadata = saved.metadata(step)
  changed = identity.changes(metadata["record"]["config"], config)
  identity.refuse_other_run(changed, str(home.path))
  batches.set_state(metadata["position"])
  return saved.restore(step, program.abstract)


def _writer(
  config: ExperimentConfig, home: Workdir, step: int
) -> writers.MetricWriter:
  chosen: list[writers.MetricWriter] = [writers.JsonLines(home.metrics)]
  if config.train.tensorboard:
    chosen.append(writers.TensorBoard(home.path / "tensorboard", after=step))
  return writers.Several(chosen)


def _barrier(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)
