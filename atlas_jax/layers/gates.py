"""Gates of a memory from the layer's input, per head.

All gates are functions of x_t alone, affine in it up to one squashing, and
computed in float32 whatever the type of activations. Before training they do
not depend on x: their matrices start at zero and their biases at the values
asked for.

A memory that is to hold a fact among thousands of tokens must be able to keep
all of it and to write nothing, exactly. A sigmoid gets there only at infinity:
one that starts at 0.9975 keeps 2e-9 of a fact after 8,000 tokens. The decay and
the rate therefore use a sigmoid stretched by `EDGE` beyond the end that has to
be reached, and clipped there. The slope at the clip is that of the sigmoid
without the clip, so that a closed gate can open again.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.memory.objectives import Objective

# How far the stretched sigmoid overshoots. Also the order of the smallest
# values that a gate can hold steadily besides exactly 0: three decades.
EDGE = 1e-3

# Window weights before training: the current token's, and every older one's.
WINDOW_LOGITS = (2.0, 0.0)

# A token's own weight in the windows of others before training.
TOKEN_LOGIT = 2.0

# Rates by matrix before training (as LaCT's; the step's length is not theirs).
MATRIX_RATE = 1e-3

# Steps before training, as a share of the largest. TTT's is sigmoid(0), as its
# authors start it.
RATE_START = 0.1
TTT_RATE_START = 0.5

# Largest step times width and curvature, through a layer norm.
NORMED_RATE = 0.2

# Largest error of a channel before training, for the curvature of a power.
CHANNEL_ERROR = 4.0

# Thresholds before training, in units of sqrt(V): about as long as an error of
# a memory that knows nothing.
THRESHOLD = 1.0


class MemoryGates(nnx.Module):
  """The gates of every token and head.

  - decay: `alpha = min(1, (1 + EDGE) sigmoid(z))`, exactly 1 for z >= 6.9;
    given as its log, computed as `log_sigmoid`, never above 0;
  - momentum: `theta = sigmoid(z)`, given as its log;
  - rate: `eta = rate_max max(0, (1 + EDGE) sigmoid(z) - EDGE)`, exactly 0 for
    z <= -6.9;
  - window: `gamma = sigmoid(z)`, one for each of the `memory.window` latest
    tokens;
  - threshold, of an objective that has one: `sqrt(V) softplus(z)`;
  - rate by matrix, for a memory that steps once a chunk: `softplus(z)` for each
    of its matrices, in place of the rate, which is then 1;
  - token, if asked for: `sigmoid(z)`, a factor on the weight that this token
    has in its own and in all later windows, see `token_weight`.

  A memory without momentum has no momentum gate, one without retention no
  decay. With a window of 1 the rate already weighs the only gradient, and
  gamma is 1; only Muon, whose rate stands outside, keeps it.

  Args:
    dim: Width of x.
    heads: Number of memories.
    memory: The memory, which says what gates there are.
    decay_start: alpha before training, below 1.
    momentum_start: theta before training.
    rate_max: Largest eta; None: `default_rate(memory, dim // heads)`.
    rate_start: eta before training, as a share of `rate_max`; None: 0.1, or 0.5
      for a rate that goes by position.
    token_gate: Whether there is a gate of the token looked at, besides those
      of the token that looks.
    param_dtype: Type of the parameters.

  Raises:
    UserError: A starting value out of range, or a token gate for a memory
      without window weights.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    memory: am.Memory,
    *,
    decay_start: float = 0.99,
    momentum_start: float = 0.9,
    rate_max: float | None = None,
    rate_start: float | None = None,
    token_gate: bool = False,
    param_dtype: DTypeLike = jnp.float32,
  ):
    if rate_start is None:
      by_position = memory.rate_by_position
      rate_start = TTT_RATE_START if by_position else RATE_START
    starts = {
      "decay_start": decay_start,
      "momentum_start": momentum_start,
      "rate_start": rate_start,
    }
    for name, start in starts.items():
      if not 0 < start < 1:
        raise UserError(f"{name} {start}: use a number between 0 and 1")
    if rate_max is not None and not 0 < rate_max < math.inf:
      raise UserError(f"rate_max {rate_max}: use a positive number")
    self.memory = memory
    self.heads = heads
    width = dim // heads
    if rate_max is None:
      rate_max = default_rate(memory, width)
    self.rate_max = rate_max

    def affine(outputs: int, *starts: float) -> _Affine:
      return _Affine(dim, heads, outputs, starts, param_dtype)

    groups = memory.retention.groups
    if groups:
      self.decay = affine(groups, logit(decay_start / (1 + EDGE)))
    if memory.has_momentum:
      self.momentum = affine(1, logit(momentum_start))
    if memory.steps_once:
      matrices = len(memory.entries(width, width))
      self.matrix_rate = affine(matrices, inverse_softplus(MATRIX_RATE))
    else:
      self.rate = affine(1, logit((rate_start + EDGE) / (1 + EDGE)))
    if memory.objective.gated:
      self.threshold = affine(1, inverse_softplus(THRESHOLD))
      self.threshold_unit = math.sqrt(width)
    muon = memory.orthogonalises and not memory.steps_once
    self.weighs_window = memory.window > 1 or muon
    if self.weighs_window:
      self.window = affine(memory.window, *WINDOW_LOGITS)
    self.weighs_tokens = token_gate
    if token_gate:
      if memory.window == 1:
        raise UserError(
          "a token gate needs a window of 2 or more tokens: in a window of 1 "
          "the rate does the same"
        )
      self.token = affine(1, TOKEN_LOGIT)

  def token_weight(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H"]:
    """Weight of each token in every window it falls into, at least float32.

    Only with `token_gate`. A gate gamma of token t for token i is to be
    multiplied by the weight of i, so that both can keep i from being written.
    """
    return jax.nn.sigmoid(self.token(x.astype(am.state_dtype(x.dtype))))[..., 0]

  def __call__(self, x: Float[Array, "B T D"]) -> am.Gates:
    """Computes the gates of all tokens, at least float32.

    Args:
      x: The layer's input, of any float type; finite.

    Returns:
      Gates [B, T, H, ...].
    """
    x = x.astype(am.state_dtype(x.dtype))
    leading = (*x.shape[:2], self.heads)
    groups = self.memory.retention.groups
    log_decay = jnp.zeros((*leading, 0), x.dtype)
    if groups:
      stretched = jax.nn.log_sigmoid(self.decay(x)) + math.log1p(EDGE)
      log_decay = clip_through(stretched, highest=0.0)
    log_momentum = jnp.zeros(leading, x.dtype)
    if self.memory.has_momentum:
      log_momentum = jax.nn.log_sigmoid(self.momentum(x))[..., 0]
    rate, matrix_rate, threshold = jnp.ones(leading, x.dtype), None, None
    if self.memory.steps_once:
      matrix_rate = jax.nn.softplus(self.matrix_rate(x))
    else:
      stretched = (1 + EDGE) * jax.nn.sigmoid(self.rate(x))[..., 0] - EDGE
      rate = self.rate_max * clip_through(stretched, lowest=0.0)
    if self.memory.objective.gated:
      softplus = jax.nn.softplus(self.threshold(x))[..., 0]
      threshold = self.threshold_unit * softplus
    window = jnp.ones((*leading, self.memory.window), x.dtype)
    if self.weighs_window:
      window = jax.nn.sigmoid(self.window(x))
    return am.Gates(
      log_decay=log_decay,
      log_momentum=log_momentum,
      rate=rate,
      window=window,
      threshold=threshold,
      matrix_rate=matrix_rate,
    )


def default_rate(memory: am.Memory, width: int) -> float:
  """The largest step per token that suits a memory of keys of this width.

  Muon's step has length 1 whatever the gradient, and a block's tokens add
  their rates up: 0.1 a token. All others add up the window's gradients, which
  before training weigh `0.88 + 0.5 (window - 1)` together; the rate is divided
  by that, so that a window does not mean a larger step. One then lets a deep
  memory write a fact in one go; the bound limits what is too much.

  A layer norm inside divides by the spread of what the memory puts out, which
  is small before training: a step of 1 / spread at its input moves the output
  by 1 / spread^2, of the order of the width. There the rate is 0.2 over the
  width and over the objective's curvature, which for Moneta and Yaad is of the
  order of 20: a chunk of 64 tokens then starts within the bound's budget, whose
  divisor is below 2, where a rate of 1 would leave all sizes to the budget.

  Where the rate goes by position it is that of TTT (arXiv 2407.04620): 1 for
  one matrix and 0.1 for more, over the width, for keys of length sqrt(width).
  """
  if memory.rate_by_position:
    base = 1.0 if len(memory.entries(width, width)) == 1 else 0.1
    return base / width
  if memory.orthogonalises:
    return 0.1
  largest = 1.0
  network = memory.network
  if not isinstance(network, am.Matrix) and network.layer_norm:
    largest = NORMED_RATE / (width * _curvature(memory.objective, width))
  if memory.window == 1:
    return largest
  now, older = (1 / (1 + math.exp(-z)) for z in WINDOW_LOGITS)
  return largest / (now + older * (memory.window - 1))


def _curvature(objective: Objective, width: int) -> float:
  """Order of the objective's curvature at the errors before training."""
  match objective:
    case am.L2():
      return 2 * objective.factor
    case am.Huber():
      return 2.0
    case am.Lp():
      p = objective.power
      return p * (p - 1) * CHANNEL_ERROR ** (p - 2)
    case am.SwitchedHuber():
      return max(1.0, objective.sharpness * THRESHOLD * math.sqrt(width))
    case _:
      return 1.0


def logit(share: float) -> float:
  """The z with `sigmoid(z) = share`."""
  return math.log(share) - math.log1p(-share)


def inverse_softplus(y: float) -> float:
  """The z with `softplus(z) = y`."""
  return y + math.log(-math.expm1(-y))


def clip_through(
  x: Array, lowest: float = -math.inf, highest: float = math.inf
) -> Array:
  """Clips x exactly, with the slope of no clip."""
  return x + jax.lax.stop_gradient(jnp.clip(x, lowest, highest) - x)


class _Affine(nnx.Module):
  """`x kernel + bias` for every head, at the highest precision.

  The last of `starts` is the bias of all outputs from its index on.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    outputs: int,
    starts: tuple[float, ...],
    param_dtype: DTypeLike,
  ):
    bias = [starts[min(i, len(starts) - 1)] for i in range(outputs)]
    self.kernel = nnx.Param(jnp.zeros((dim, heads, outputs), param_dtype))
    self.bias = nnx.Param(
      jnp.broadcast_to(jnp.asarray(bias, param_dtype), (heads, outputs))
    )

  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H n"]:
    kernel = self.kernel[...].astype(x.dtype)
    z = jnp.einsum("btd,dhn->bthn", x, kernel, precision="highest")
    return z + self.bias[...].astype(x.dtype)[None, None]
