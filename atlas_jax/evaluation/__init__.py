"""How good a trained model is."""

from atlas_jax.evaluation.documents import Documents
from atlas_jax.evaluation.language_modelling import Result, evaluate
from atlas_jax.evaluation.positions import Bucket
from atlas_jax.evaluation.report import Report
from atlas_jax.evaluation.run import EvaluationConfig, evaluate_run

__all__ = [
  "Bucket",
  "Documents",
  "EvaluationConfig",
  "Report",
  "Result",
  "evaluate",
  "evaluate_run",
]
