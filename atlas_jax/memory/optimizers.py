"""Inner optimizers: how gradients of the window become a step of the weights.

An optimizer is data here; `chunk.py` turns it into matrices over a chunk.
Without momentum (`GradientDescent`) the step is the window's gradient itself;
`Momentum` is Titans' rule (arXiv 2501.00663, Eq. 13-14) over the window;
`Muon` orthogonalises the momentum (arXiv 2505.23735, Eq. 32-33); `ChunkMuon`
does so once for a whole chunk (arXiv 2505.23884).
"""

import dataclasses

from atlas_jax.errors import UserError
from atlas_jax.memory import checks

# Keller Jordan's quintic Newton-Schulz coefficients.
JORDAN = ((3.4445, -4.7750, 2.0315),)

# Those of LaCT, one triple per iteration.
LACT = (
  (4.0848, -6.8946, 2.9270),
  (3.9505, -6.3029, 2.6377),
  (3.7418, -5.5913, 2.3037),
  (2.8769, -3.1427, 1.2046),
  (2.8366, -3.0525, 1.2012),
)


@dataclasses.dataclass(frozen=True)
class GradientDescent:
  """`W_t = alpha_t W_{t-1} - eta_t sum_i gamma_i g_i` (OmegaNet)."""


@dataclasses.dataclass(frozen=True)
class Momentum:
  """`S_t = theta_t S + eta_t sum_i gamma_i g_i`, `W_t = alpha_t W - S_t`."""


@dataclasses.dataclass(frozen=True)
class Muon:
  """`S_t = theta_t S + sum_i gamma_i g_i`, step `eta NewtonSchulz(S_t)`.

  Attributes:
    every: tokens between two orthogonalised steps; momentum and decay move
      every token. 1 is the paper, the chunk length is the fast mode. Must
      divide the chunk.
    steps: Newton-Schulz iterations.
    coefficients: (a, b, c) triples, one per iteration; the last repeats.
    epsilon: momenta shorter than this are not stretched to full length.
    dtype: operand type of the Newton-Schulz products ("float32", "bfloat16" or
      "float64"); None takes the state's. Accumulation and norm stay in the
      state's type.
  """

  every: int = 16
  steps: int = 5
  coefficients: tuple[tuple[float, float, float], ...] = JORDAN
  epsilon: float = 1e-3
  dtype: str | None = None

  def __post_init__(self):
    checks.count("muon every", self.every, " tokens")
    _check_iteration(self)


@dataclasses.dataclass(frozen=True)
class ChunkMuon:
  """`S <- m S + sum_i eta_i g_i` over a chunk, `W <- W - NewtonSchulz(S)`.

  LaCT's update (arXiv 2505.23884): one step per chunk, its momentum factor m
  being the mean of the chunk's thetas. The rates weigh the tokens against each
  other, one for each of the memory's matrices; the step's length is one.
  Reading is at the weights of the chunk's start.

  Attributes:
    steps, coefficients, epsilon, dtype: as in `Muon`.
  """

  steps: int = 5
  coefficients: tuple[tuple[float, float, float], ...] = LACT
  epsilon: float = 1e-4
  dtype: str | None = None

  def __post_init__(self):
    _check_iteration(self)


def _check_iteration(muon: Muon | ChunkMuon) -> None:
  checks.count("muon steps", muon.steps)
  checks.positive("muon epsilon", muon.epsilon)
  if muon.dtype not in (None, "bfloat16", "float32", "float64"):
    raise UserError(
      f"muon dtype {muon.dtype!r}: use bfloat16, float32, float64 or None"
    )
  if not muon.coefficients or any(len(c) != 3 for c in muon.coefficients):
    raise UserError("muon coefficients: give one or more (a, b, c) triples")


Optimizer = GradientDescent | Momentum | Muon | ChunkMuon
