"""The mixers of before attention: an LSTM or a GRU between x and a projection.

The cells are Flax's own. One vector of width D per token is handed from token
to token, so time is sequential in training, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers.arrangement import Arrangement
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear import Linear
from atlas_jax.layers.mixer import Mixer, MixerOutput
from atlas_jax.layers.rows import choose_rows
from atlas_jax.memory import dispatch
from atlas_jax.memory.numerics import HIGHEST

CELLS = ("lstm", "gru")


class RecurrentCellState(NamedTuple):
  """What a cell hands on.

  Attributes:
    hidden: The last output, h.
    memory: The LSTM's cell c; None for a GRU.
  """

  hidden: Float[Array, "B D"]
  memory: Float[Array, "B D"] | None


class RecurrentCellMixer(Mixer):
  """A layer that mixes tokens by `nnx.OptimizedLSTMCell` or `nnx.GRUCell`.

  `lstm` (Hochreiter and Schmidhuber 1997; with forget gates, Gers et al. 2000):

    i, f, o = sigmoid(W x_t + U h_(t-1) + b),  g = tanh(W x_t + U h_(t-1) + b)
    c_t = f * c_(t-1) + i * g,  h_t = o * tanh(c_t)

  `gru` (arXiv 1406.1078, Eq. 5-8, with the reset gate on the product):

    r, z = sigmoid(W x_t + b + U h_(t-1)),  n = tanh(W x_t + b + r * U h_(t-1))
    h_t = (1 - z) * n + z * h_(t-1)

  The output is a projection of h_t. It has no metrics.

  Args:
    dim: Width of x, and of h.
    heads: Not used: a cell has none.
    cell: "lstm" or "gru".
    norm_epsilon: Not used: there is no norm.
    scale: Factor on the starting weights of x's matrices, normal with variance
      1 / D, and of h's, with orthonormal rows.
    output_scale: Further factor on those of the output projection.
    dtype: Type of the output projection. The cell is at least float32.
    param_dtype: Type of the parameters.
    implementation: "xla" (Flax's cell), "reference" (the equations, gate by
      gate), or "auto", which is "xla".
    rngs: Source of the starting weights.

  Raises:
    UserError: A cell or an implementation that does not exist.
  """

  def __init__(
    self,
    dim: int,
    heads: int = 1,
    cell: str = "lstm",
    *,
    norm_epsilon: float = 1e-6,
    scale: float = 1.0,
    output_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
    rngs: Source,
  ):
    del heads, norm_epsilon
    if cell not in CELLS:
      raise UserError(f"no cell {cell!r}: use one of {', '.join(CELLS)}")
    if dim < 1:
      raise UserError(f"a width of {dim}: use 1 or more")
    self.dim = dim
    self.implementation = dispatch.resolve(implementation)
    self.kind = cell
    self.state_dtype = am.state_dtype(jnp.dtype(dtype))
    make = nnx.OptimizedLSTMCell if cell == "lstm" else nnx.GRUCell
    self.cell = make(
      dim,
      dim,
      kernel_init=nnx.initializers.variance_scaling(
        scale**2, "fan_in", "normal"
      ),
      recurrent_kernel_init=_orthogonal(scale),
      dtype=self.state_dtype,
      param_dtype=param_dtype,
      rngs=nnx.Rngs(rngs.params()),
    )
    self.output = Linear(
      dim,
      dim,
      scale=scale * output_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def init_state(self, batch: int) -> RecurrentCellState:
    """Zeros: the state of `batch` rows before their first token."""
    zeros = jnp.zeros((batch, self.dim), self.state_dtype)
    return RecurrentCellState(zeros, zeros if self.kind == "lstm" else None)

  def mix(
    self,
    x: Float[Array, "B T D"],
    state: RecurrentCellState | None,
    arrangement: Arrangement,
  ) -> MixerOutput:
    """Mixes arranged tokens, one after the other; see `Mixer.mix`."""
    fresh = self.init_state(x.shape[0])
    cell = self._equations if self.implementation == "reference" else self._cell

    def token(state: RecurrentCellState, inputs: tuple[Array, Any, Any]):
      x, restart, valid = inputs
      before = state if restart is None else choose_rows(restart, fresh, state)
      after = cell(x, before)
      if valid is not None:
        after = choose_rows(valid, after, state)
      return after, after.hidden

    by_time = (x, arrangement.restart, arrangement.valid)
    by_time = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), by_time)
    # The products with h feed on themselves: their errors would add up.
    with jax.default_matmul_precision("highest"):
      state, hidden = jax.lax.scan(token, state or fresh, by_time)
    y = self.output(jnp.moveaxis(hidden, 0, 1)).astype(x.dtype)
    if arrangement.valid is not None:
      y = jnp.where(arrangement.valid[..., None], y, jnp.zeros((), y.dtype))
    aligned = arrangement.segment_ids is not None
    return MixerOutput(y, None if aligned else state, {})

  def _cell(
    self, x: Float[Array, "B D"], state: RecurrentCellState
  ) -> RecurrentCellState:
    """One token through Flax's cell."""
    x = x.astype(self.state_dtype)
    if isinstance(self.cell, nnx.GRUCell):
      hidden, _ = self.cell(state.hidden, x)
      return RecurrentCellState(hidden, None)
    assert state.memory is not None
    (memory, hidden), _ = self.cell((state.memory, state.hidden), x)
    return RecurrentCellState(hidden, memory)

  def _equations(
    self, x: Float[Array, "B D"], state: RecurrentCellState
  ) -> RecurrentCellState:
    """One token by the equations, each gate by itself."""
    wide = lambda leaf: leaf[...].astype(self.state_dtype)
    x, h, c = x.astype(self.state_dtype), state.hidden, state.memory
    inputs, hidden = self.cell.dense_i, self.cell.dense_h

    def gate(number: int) -> tuple[Array, Array]:
      """What x and h contribute; the bias is part of x's or of h's."""
      own = slice(number * self.dim, (number + 1) * self.dim)
      sums = []
      for dense, value in ((inputs, x), (hidden, h)):
        part = jnp.einsum(
          "bi,io->bo", value, wide(dense.kernel)[:, own], precision=HIGHEST
        )
        if dense.bias is not None:
          part = part + wide(dense.bias)[own][None]
        sums.append(part)
      return sums[0], sums[1]

    sigmoid = lambda z: 0.5 + 0.5 * jnp.tanh(0.5 * z)
    if c is not None:
      i, f, g, o = (sum(gate(number)) for number in range(4))
      c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
      return RecurrentCellState(sigmoid(o) * jnp.tanh(c), c)
    r, z = (sigmoid(sum(gate(number))) for number in range(2))
    from_x, from_h = gate(2)
    n = jnp.tanh(from_x + r * from_h)
    return RecurrentCellState((1.0 - z) * n + z * h, None)


def _orthogonal(scale: float) -> nnx.Initializer:
  """Orthonormal rows times a scale, drawn in float32 for any type."""
  draw = nnx.initializers.orthogonal(scale)
  return lambda key, shape, dtype, **_: draw(key, shape, jnp.float32).astype(
    dtype
  )
