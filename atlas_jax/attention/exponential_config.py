"""Memories over exponential features, as values.

The features `phi*(x) = [1, x, x^(x2) / sqrt(2!), ...]` have the inner product
`phi*(x) . phi*(y) = exp(x . y)` and no end (arXiv 2505.23735, Eq. 22-24). A
memory `M(x) = x + W1 act(W2 phi*(x))` over them is still exact at finite cost:
every write to W2 is a rank-one term `g_i phi*(k_i)^T`, so that the pairs
(k_i, g_i) and kernel values say all there is to know of it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import checks
from atlas_jax.memory.networks import ACTIVATIONS, LARGEST_EXPANSION
from atlas_jax.memory.objectives import L2, DotProduct


@dataclasses.dataclass(frozen=True)
class ExponentialMemory:
  """One memory over exponential features.

  After token t the share of token i's write is `C[t, i]`: the rate and window
  weight of every step that wrote it, times all decays since. With `p_i` the
  shares `C[t, i] exp(q . k_i)`, divided by their sum if `normalised`,

      z_t(q) = z_0(q) + sum_i p_i g_i
      W1_t = W1_0 + sum_i C[t, i] u_i h_i^T / max(1, sum_i C[t, i])
      y_t = q + W1_t act(z_t(q))

  where `u_i` is the negative slope of the objective by the prediction at k_i,
  `g_i` the one by z, and `h_i = act(z(k_i))`. Without the normaliser neither
  sum is divided, and `z_0`, `W1_0` decay as everything else does.

  Attributes:
    objective: what is minimised for every token of the window.
    linear: `M(x) = W2 phi*(x)` alone, starting at zero: `y_t = sum_i p_i u_i`.
    normalised: divide by the sum of shares, as softmax attention does.
    attends: the output is `(1 - lam) sum_i p_i v_i + lam y_t`, with `lam` an
      argument; only for deep memories.
    expansion: hidden width as a multiple of the value width.
    activation: a key of `atlas_jax.memory.networks.ACTIVATIONS`.
    window: tokens whose objective is summed at each step, the current one
      included.
    chunk: tokens that share the weights at which slopes are taken; None: those
      of the start, always, and then every slope is a matter of one token.
    error_clip: a token's write is shrunk to at most this times the square root
      of the value width, over both matrices; None never. Chunk after chunk,
      slopes at weights that earlier slopes made may grow without bound. (With
      it outputs do not. Without a normaliser the outer gradients of an L2
      memory still may: 1e21 was seen after 128 chunks, 1e3 with one.)
  """

  objective: DotProduct | L2 = DotProduct()
  linear: bool = False
  normalised: bool = True
  attends: bool = False
  expansion: float = 4.0
  activation: str = "gelu"
  window: int = 1
  chunk: int | None = None
  error_clip: float | None = None

  def __post_init__(self):
    checks.part("objective", self.objective, DotProduct | L2)
    checks.positive("expansion", self.expansion, most=LARGEST_EXPANSION)
    checks.count("window", self.window, " tokens")
    if self.chunk is not None:
      checks.count("chunk", self.chunk, " tokens, or none")
    if self.error_clip is not None:
      checks.positive("error_clip", self.error_clip)
    if self.activation not in ACTIVATIONS:
      raise UserError(
        f"activation {self.activation!r}: use one of {', '.join(ACTIVATIONS)}"
      )
    if self.attends and (self.linear or not self.normalised):
      raise UserError(
        "lam mixes attention with a deep, normalised memory: leave it at 1 "
        "for any other"
      )

  @property
  def forgets_start(self) -> bool:
    """Whether the starting weights decay like what is written."""
    return not self.normalised and not self.linear

  @property
  def refresh(self) -> int:
    """The chunk, where there is one."""
    if self.chunk is None:
      raise TypeError("this memory has no chunk")
    return self.chunk

  @property
  def columns(self) -> int:
    """Columns that a chunk writes: its tokens, and those its window reaches."""
    return self.refresh + self.window - 1

  def hidden(self, width: int) -> int:
    """Hidden width for values of this width; 0 for a linear memory."""
    return 0 if self.linear else max(1, round(self.expansion * width))

  def payload(self, width: int) -> int:
    """Numbers that every token's key brings up, for values of this width."""
    if self.linear:
      return width
    return self.hidden(width) + (width if self.attends else 0)


class Inputs(NamedTuple):
  """Vectors of every token, per head.

  Every key head serves H / N neighbouring query heads.

  Attributes:
    query, key, value: what the memory sees; K = V unless it is linear.
    score_query, score_key: the vectors whose inner product is the kernel's
      exponent, scaled and turned by position as wanted.
  """

  query: Float[Array, "B T H K"]
  key: Float[Array, "B T N K"]
  value: Float[Array, "B T N V"]
  score_query: Float[Array, "B T H K"]
  score_key: Float[Array, "B T N K"]


def init_params(
  key: Array,
  memory: ExponentialMemory,
  heads: int,
  width: int,
  dtype: DTypeLike = jnp.float32,
  *,
  key_length: float = 1.0,
) -> dict[str, Float[Array, "N ..."]]:
  """Learned starting weights: `in`, `bias` (z_0 = in x + bias) and `out` (W1).

  Normal variables of variance 1 / inputs, those of `in` divided by the length
  of keys, so that z_0 starts small and the memory near `x`; a bias of zero.
  None for a linear memory.

  Args:
    key: source of the numbers.
    memory: which memory.
    heads: number of key heads N.
    width: width of keys and values.
    dtype: type of the weights.
    key_length: length of a typical key.
  """
  if memory.linear:
    return {}
  hidden = memory.hidden(width)
  keys = jax.random.split(key)
  shape = (heads, hidden, width)
  inner = jax.random.normal(keys[0], shape, jnp.float32)
  outer = jax.random.normal(keys[1], shape, jnp.float32)
  return {
    "in": (inner * width**-0.5 / key_length).astype(dtype),
    "bias": jnp.zeros((heads, hidden), dtype),
    "out": (jnp.moveaxis(outer, 1, 2) * hidden**-0.5).astype(dtype),
  }
