"""The LSTM and the GRU against their equations, in float64 and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.errors import UserError
from atlas_jax.layers.recurrent_cell_mixer import (
  RecurrentCellMixer,
  RecurrentCellState,
)
from tests.layers.helpers import assert_close, jit, made, randomised

DIM, LENGTH = 6, 11
every_cell = pytest.mark.parametrize("cell", ["lstm", "gru"])


def mixer_of(cell, dtype=jnp.float32, **changes):
  make = lambda rngs: RecurrentCellMixer(
    DIM, 1, cell, dtype=dtype, param_dtype=dtype, rngs=rngs, **changes
  )
  return randomised(made(make))


def inputs(dtype=np.float32):
  random = np.random.default_rng(2)
  return random.standard_normal((2, LENGTH, DIM)).astype(dtype)


def sigmoid(z):
  return 1.0 / (1.0 + np.exp(-z))


def lstm(weights, x, h, c):
  z = x @ weights["dense_i"]["kernel"] + h @ weights["dense_h"]["kernel"]
  i, f, g, o = np.split(z + weights["dense_h"]["bias"], 4, axis=-1)
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
  return sigmoid(o) * np.tanh(c), c


def gru(weights, x, h, _):
  z = x @ weights["dense_i"]["kernel"] + weights["dense_i"]["bias"]
  from_x = np.split(z, 3, axis=-1)
  from_h = np.split(h @ weights["dense_h"]["kernel"], 3, axis=-1)
  r, z = (sigmoid(from_x[n] + from_h[n]) for n in range(2))
  n = np.tanh(from_x[2] + r * from_h[2])
  return (1 - z) * n + z * h, None


@every_cell
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_documents_and_padding_as_in_numpy(cell, implementation):
  mixer, x = mixer_of(cell, implementation=implementation), inputs()
  ids = np.array([[1, 1, 1, 1, 0, 2, 2, 2, 2, 2, 0], [4] * LENGTH])
  out = jit(lambda mixer, x: mixer(x, segment_ids=jnp.asarray(ids)))(
    mixer, jnp.where((ids > 0)[..., None], x, jnp.nan)
  )
  weights = jax.tree.map(
    lambda leaf: np.asarray(leaf, np.float64),
    nnx.to_pure_dict(nnx.state(mixer)),
  )
  one = {"lstm": lstm, "gru": gru}[cell]
  expected, hidden = np.zeros(x.shape), np.zeros((2, DIM))
  for row in range(2):
    h = c = np.zeros(DIM)
    for t in range(LENGTH):
      if ids[row, t] == 0:
        continue
      if t and ids[row, t] != ids[row, t - 1]:
        h = c = np.zeros(DIM)
      h, c = one(weights["cell"], x[row, t], h, c)
      expected[row, t] = h @ weights["output"]["kernel"]
    hidden[row] = h
  assert_close(out.y, expected, 1e-5)
  assert_close(out.state.hidden, hidden, 1e-5)
  assert np.all(np.asarray(out.y)[ids == 0] == 0)


@every_cell
def test_float64_is_exact_in_values_and_gradients(cell):
  with jax.enable_x64(True):
    x = jnp.asarray(inputs(np.float64))
    state = mixer_of(cell, jnp.float64).init_state(2)
    state = jax.tree.map(lambda leaf: leaf + 0.3, state)

    def slopes(mixer, x, state):
      def total(mixer, x, state):
        out = mixer(x, state=state)
        return jnp.sum(jnp.sin(out.y)), (out.y, out.state)

      grad = jax.grad(total, argnums=(0, 1, 2), has_aux=True)
      (by_mixer, *rest), out = grad(mixer, x, state)
      return nnx.to_pure_dict(nnx.state(by_mixer)), rest, out

    found, expected = (
      jit(slopes)(
        mixer_of(cell, jnp.float64, implementation=implementation), x, state
      )
      for implementation in ("xla", "reference")
    )
    assert found[2][0].dtype == jnp.float64
    assert_close(found, expected, 1e-12)


@every_cell
def test_narrow_types_keep_a_float32_state(cell):
  mixer = mixer_of(cell, jnp.bfloat16)
  out = mixer(jnp.asarray(inputs(), jnp.bfloat16))
  assert out.y.dtype == jnp.bfloat16
  kinds = {leaf.dtype for leaf in jax.tree.leaves(out.state)}
  assert kinds == {jnp.dtype("float32")}
  assert isinstance(out.state, RecurrentCellState)


def test_recurrent_weights_start_with_orthonormal_rows():
  mixer = made(lambda rngs: RecurrentCellMixer(DIM, scale=0.5, rngs=rngs))
  kernel = np.asarray(mixer.cell.dense_h.kernel[...])
  np.testing.assert_allclose(kernel @ kernel.T, 0.25 * np.eye(DIM), atol=1e-6)


def test_what_does_not_exist_is_refused():
  with pytest.raises(UserError, match="no cell 'rnn': use one of lstm, gru"):
    mixer_of("rnn")
  with pytest.raises(UserError, match="implementation 'cuda'"):
    mixer_of("gru", implementation="cuda")
