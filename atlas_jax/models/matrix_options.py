"""Options of matrix memories, flat so that each is one flag."""

import dataclasses

from atlas_jax.config import field


@dataclasses.dataclass(frozen=True)
class MatrixOptions:
  """Changes to the matrix memory that `ModelConfig.mixer` names.

  Every field is None by default: the mixer's own value. An option that the
  mixer has no use for is an error.
  """

  heads: int | None = field(
    None,
    "Memories side by side, each with queries and keys of its own; longhorn "
    "has 1, the others model.heads.",
  )
  normalised: bool | None = field(
    None, "Divide by the sum of weights, with features elu(x) + 1."
  )
  gated: bool | None = field(
    None, "Multiply read-outs by SiLU of a projection of the input."
  )
  expand: int | None = field(
    None, "Width of all values together, as a multiple of the model's."
  )
  expand_key: float | None = field(
    None, "Width of all keys together, as a multiple of the model's."
  )
  expand_value: float | None = field(
    None, "Width of all values together, as a multiple of the model's."
  )
  state_width: int | None = field(None, "Width of keys and queries per head.")
  head_width: int | None = field(
    None,
    "Width of values per head, which sets their number; 0: model.heads.",
  )
  gate_rank: int | None = field(None, "Inner width of a low-rank gate.")
  decay_rank: int | None = field(
    None, "Inner width of the low-rank decay (rwkv7); 0: by the model's width."
  )
  rate_rank: int | None = field(
    None, "Inner width of the low-rank rate (rwkv7); 0: by the model's width."
  )
  rope_base: float | None = field(
    None, "Base of the rotary position embedding; 0: none."
  )
