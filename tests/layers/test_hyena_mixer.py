"""Hyena: the long convolution against its sum, lengths, room and filters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.errors import UserError
from atlas_jax.layers.hyena_filter import HyenaFilter
from atlas_jax.layers.hyena_mixer import HyenaMixer
from atlas_jax.layers.long_convolution import long_convolution
from tests.layers.helpers import assert_close, jit, made, randomised

DIM, LENGTH, LONGEST = 4, 21, 24


def mixer_of(dtype=jnp.float32, **changes):
  options = {"max_length": LONGEST, "filter_features": 5, "filter_width": 6}
  make = lambda rngs: HyenaMixer(
    DIM, dtype=dtype, param_dtype=dtype, rngs=rngs, **(options | changes)
  )
  return randomised(made(make))


def inputs(length=LENGTH, dtype=np.float32):
  random = np.random.default_rng(2)
  return jnp.asarray(random.standard_normal((2, length, DIM)), dtype)


@jit
def call(mixer, x, state=None):
  return mixer(x, state=state)


def summed(u, kernel, start):
  """The long convolution by its sum."""
  y = np.zeros(u.shape)
  for row, t in np.ndindex(u.shape[:2]):
    for j in range(start[row, t], t + 1):
      if t - j < len(kernel):
        y[row, t] += kernel[t - j] * u[row, j]
  return y


@pytest.mark.parametrize("cuts", [(), (1, 5, 16, 17, 31), (32,), (8, 40, 69)])
@pytest.mark.parametrize("taps", [20, 250])
def test_the_long_convolution_is_its_sum(cuts, taps):
  random = np.random.default_rng(3)
  u = random.standard_normal((2, 70, 3))
  kernel = random.standard_normal((taps, 3))
  start = np.zeros((2, 70), np.int32)
  for cut in cuts:
    start[1, cut:] = cut
  weight = random.standard_normal(u.shape)
  with jax.enable_x64(True):
    given = jnp.asarray(start) if cuts else None

    def total(u, kernel):
      y = long_convolution(u, kernel, given)
      return jnp.sum(y * weight), y

    grads, y = jit(jax.grad(total, argnums=(0, 1), has_aux=True))(
      jnp.asarray(u), jnp.asarray(kernel)
    )
    assert_close(y, summed(u, kernel, start), 1e-12)
    # Linear in both: slopes are values at unit vectors.
    for place in ((0, 0, 0), (1, 4, 1), (1, 33, 2)):
      one = np.zeros(u.shape)
      one[place] = 1.0
      slope = np.sum(summed(one, kernel, start) * weight)
      np.testing.assert_allclose(grads[0][place], slope, rtol=1e-9, atol=1e-9)
    for place in ((0, 0), (13, 1), (19, 2)):
      one = np.zeros(kernel.shape)
      one[place] = 1.0
      slope = np.sum(summed(u, one, start) * weight)
      np.testing.assert_allclose(grads[1][place], slope, rtol=1e-9, atol=1e-9)


def test_float64_is_exact_in_values_and_gradients():
  ids = jnp.asarray([[1] * 9 + [2] * 12, [1] * 4 + [0] * 3 + [2] * 14])

  def slopes(mixer, x, state):
    def total(mixer, x, tail):
      out = mixer(x, state=state._replace(tail=tail), segment_ids=ids)
      return jnp.sum(jnp.sin(out.y)), (out.y, out.state)

    grad = jax.grad(total, argnums=(0, 1, 2), has_aux=True)
    (by_mixer, *rest), out = grad(mixer, x, state.tail)
    return nnx.to_pure_dict(nnx.state(by_mixer)), rest, out

  with jax.enable_x64(True):
    x = inputs(dtype=np.float64)
    state = mixer_of(jnp.float64)(x[:, :3]).state
    found, expected = (
      jit(slopes)(
        mixer_of(jnp.float64, implementation=implementation), x, state
      )
      for implementation in ("xla", "reference")
    )
    assert found[2][0].dtype == jnp.float64
    assert_close(found, expected, 1e-10)


def test_a_text_beyond_the_longest_is_never_a_wrong_number():
  mixer, x = mixer_of(), inputs()
  with pytest.raises(UserError, match="more than the 24 tokens"):
    mixer(inputs(LONGEST + 1))
  with pytest.raises(UserError, match="more than the 24 tokens"):
    jit(lambda mixer, x: mixer(x))(mixer, inputs(LONGEST + 1))
  state = call(mixer, x).state
  with pytest.raises(UserError, match="more than the 24 tokens"):
    mixer(x[:, :4], state=state)
  y = call(mixer, x[:, :4], state).y
  assert jnp.all(jnp.isfinite(y[:, :3]))
  assert jnp.all(jnp.isnan(y[:, 3]))
  # Documents that fit may be longer together.
  ids = jnp.asarray([[1] * 15 + [2] * 15] * 2)
  y = jit(lambda mixer, x: mixer(x, segment_ids=ids).y)(mixer, inputs(30))
  assert_close(y[:, 15:], call(mixer, inputs(30)[:, 15:]).y, 1e-5)


def test_steps_need_room_and_keep_their_filters():
  mixer, x = mixer_of(), inputs()
  whole = call(mixer, x)
  state = call(mixer, x[:, :15]).state
  with pytest.raises(UserError, match="resize"):
    mixer.step(x[:, 15], state)
  step = jit(lambda mixer, x, state: mixer.step(x, state))
  lost, _ = step(mixer, x[:, 15], state)
  assert jnp.all(jnp.isnan(lost))
  state = mixer.prepare(mixer.resize(state, 17))
  for t in range(15, LENGTH):
    if t == 17:
      state = mixer.resize(state, LENGTH)
    y, state = step(mixer, x[:, t], state)
    assert_close(y, whole.y[:, t], 1e-5)
  assert mixer.capacity(state) == LENGTH
  assert_close(mixer.unprepare(state), whole.state, 1e-5)


def test_filters_are_stretched_over_the_longest_text():
  make = lambda length: made(
    lambda rngs: HyenaFilter(length, DIM, features=5, width=6, rngs=rngs)
  )
  short, long = make(5), make(9)
  nnx.update(long, nnx.state(short))
  assert short(8).shape == (5, DIM)
  assert_close(short(3), short(5)[:3], 1e-6)
  # The window of the last channel: 1 % at 0.3 of the longest distance.
  for filters in (short, long):
    filters.out.kernel = nnx.Param(jnp.zeros((6, DIM)))
    filters.hidden[2].kernel = nnx.Param(jnp.zeros((6, 6)))
    filters.bias[2] = nnx.Param(jnp.full((6,), jnp.pi / 2))
    filters.out.kernel = nnx.Param(jnp.full((6, DIM), 1 / 6))
  at = jnp.arange(5) / 4
  assert_close(short(5)[:, -1], 0.01 ** (at / 0.3), 1e-5)
  assert_close(short(5)[:, 0], 0.01 ** (at / 1.5), 1e-5)
  assert_close(long(9)[::2], short(5), 1e-5)


def test_sizes_that_cannot_be_are_refused():
  with pytest.raises(UserError, match="filters of length 0"):
    mixer_of(max_length=0)
  with pytest.raises(UserError, match="4 features of a distance"):
    mixer_of(filter_features=4)
