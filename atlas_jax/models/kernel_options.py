"""Options of exponential-kernel memories, flat so that each is one flag."""

import dataclasses

from atlas_jax.config import field


@dataclasses.dataclass(frozen=True)
class KernelOptions:
  """Changes to the exponential-kernel memory that `ModelConfig.mixer` names.

  Every field is None by default: the mixer's own value. An option that the
  mixer has no use for is an error.
  """

  lam: float | None = field(
    None,
    "Share of the deep part beside softmax attention (deep_transformer); 0 is "
    "attention alone, 1 the memory alone.",
  )
  learn_lam: bool | None = field(None, "Learn that share, from lam.")
  gated: bool | None = field(
    None, "Let tokens decay and be written in part (deep_transformer)."
  )
  normalised: bool | None = field(
    None, "Divide by the sum of the kernel's values."
  )
  temperature: float | None = field(
    None,
    "Bound of the factor on the product of query and key of length 1; 0: "
    "none (deep_transformer).",
  )
  expansion: float | None = field(
    None, "Hidden width of the memory, as a multiple of the head width."
  )
  window: int | None = field(
    None, "Tokens whose objective is summed at each step (dot, swdt)."
  )
  chunk: int | None = field(
    None, "Tokens after which slopes are taken at new weights; 0: never."
  )
