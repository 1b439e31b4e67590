"""Evaluates a run's model on its held-out text, or on any other."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from atlas_jax import config as configs
from atlas_jax.data import windows
from atlas_jax.errors import UserError
from atlas_jax.evaluation.documents import Documents
from atlas_jax.evaluation.language_modelling import evaluate
from atlas_jax.evaluation.report import Report
from atlas_jax.training.restore import Trained

OPTIONS = ("data.path", "data.field", "data.cache")
"""Settings of an `ExperimentConfig` that an evaluation may change."""


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """How much is read, and how."""

  context: int = configs.field(
    0,
    "Tokens after which the memory starts afresh inside of a document, too; "
    "the run's data.window gives what training measures. 0: a document is "
    "read with one memory, however long it is.",
  )
  tokens: int = configs.field(
    0,
    "Tokens to read, of documents in an order that depends on their names "
    "only; 0: all.",
  )
  batch: int = configs.field(8, "Documents that are read beside each other.")


def evaluate_run(
  run: Trained,
  config: EvaluationConfig | None = None,
  changes: Mapping[str, Any] | None = None,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
  """Measures a trained model; writes nothing but the cache of tokens.

  Args:
    run: From `atlas_jax.training.restore.load`.
    config: How to read; None: the defaults.
    changes: Values by dotted name of `OPTIONS`. All text at `data.path` is
      read; without it, what the run held out of its own text.
    progress: Told how many tokens are done, and of how many.

  Raises:
    UserError: The text cannot be read, or the run's own is not what it was.
  """
  config = config or EvaluationConfig()
  changes = dict(changes or {})
  other = "data.path" in changes
  if not other and not run.record["text"]:
    raise UserError(
      "this model has no text of its own: name one by --data.path"
    )
  if other:
    changes |= {"data.valid_path": "", "data.valid_fraction": 1.0}
  changed = configs.replace(run.config, changes)
  data = changed.data
  prepared = windows.prepare(
    data,
    run.tokenizer,
    chunk=changed.chunk,
    cache=data.cache or run.home / "cache",
  )
  if not other and prepared.key != run.record["text"]:
    raise UserError(
      "the text of this run is no longer what it was trained on, so that what "
      "it has not seen is not known: bring it back, or name a text by "
      "--data.path"
    )
  result = evaluate(
    run.model,
    run.tokenizer,
    Documents(prepared, prepared.valid),
    window=data.window,
    context=config.context,
    tokens=config.tokens,
    batch=config.batch,
    progress=progress,
  )
  return Report(
    result=result,
    step=run.step,
    window=data.window,
    context=config.context,
    limit=config.tokens,
    text=data.path if other else "",
    fingerprint=prepared.key,
    run=run.record,
  )
