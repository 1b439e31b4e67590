"""Mixers around matrix memories with decay: their equations, their contract."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.errors import UserError
from atlas_jax.layers.gla_mixer import GLAMixer
from atlas_jax.layers.linear_attention_mixer import LinearAttentionMixer
from atlas_jax.layers.mamba2_mixer import Mamba2Mixer
from atlas_jax.layers.retnet_mixer import RetNetMixer, log_retention
from atlas_jax.recurrences import channel_decay, scalar_decay
from tests.layers.helpers import assert_close, finite, made, randomised
from tests.models.mixers import call, inputs, packed, slopes, step

DIM, HEADS, LENGTH, BATCH = 16, 2, 77, 2

MIXERS = {
  "linear_attention": LinearAttentionMixer,
  "normalised": functools.partial(LinearAttentionMixer, normalised=True),
  "retnet": RetNetMixer,
  "gla": functools.partial(GLAMixer, gate_rank=3),
  "mamba2": functools.partial(Mamba2Mixer, head_width=8, state_width=4),
}
every_mixer = pytest.mark.parametrize("name", MIXERS)
# What the contract over every name (tests/models) does not have.
not_by_name = pytest.mark.parametrize("name", ["normalised"])


@pytest.fixture
def x64():
  """Lets a test use float64; rounding no longer hides a mistake."""
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


@functools.cache
def mixer_of(name, **changes):
  return randomised(
    made(lambda rngs: MIXERS[name](DIM, HEADS, rngs=rngs, **changes)), 0.2
  )


def silu(x):
  return x / (1 + np.exp(-x))


def normal(x, norm):
  mean = np.mean(x**2, axis=-1, keepdims=True)
  return x / np.sqrt(mean + norm.epsilon) * np.asarray(norm.scale[...])


def kernel(layer):
  return np.asarray(layer.kernel[...], np.float64)


def linear_attention(mixer, x):
  """One row [T, D] by the equations, as a loop over tokens."""
  width = DIM // HEADS
  memory = np.zeros((HEADS, width, width))
  outputs = []
  for token in x:
    q, k, v = (
      (token @ kernel(layer)).reshape(HEADS, width)
      for layer in (mixer.query, mixer.key, mixer.value)
    )
    memory += v[:, :, None] * k[:, None]
    y = np.einsum("hvk,hk->hv", memory, q) / np.sqrt(width)
    outputs.append(normal(y, mixer.norm).ravel() @ kernel(mixer.output))
  return np.stack(outputs)


def normalised(mixer, x):
  """The original linear attention, all pairs at once."""
  width = DIM // HEADS
  q, k, v = (
    (x @ kernel(layer)).reshape(-1, HEADS, width)
    for layer in (mixer.query, mixer.key, mixer.value)
  )
  q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
  scores = np.tril(np.einsum("thk,nhk->htn", q, k))
  y = np.einsum("htn,nhv->thv", scores, v)
  y = y / np.sum(scores, axis=-1).T[..., None]
  return y.reshape(len(x), DIM) @ kernel(mixer.output)


def retnet(mixer, x):
  """Retention in its parallel form, rotations as complex numbers."""
  width, half = DIM // HEADS, DIM // HEADS // 2
  q, k = (
    (x @ kernel(layer)).reshape(-1, HEADS, width)
    for layer in (mixer.query, mixer.key)
  )
  v = (x @ kernel(mixer.value)).reshape(-1, HEADS, 2 * width)
  time = np.arange(len(x))
  speed = 10000.0 ** (-np.arange(half) / half)
  turn = np.exp(1j * time[:, None] * speed)[:, None]
  q, k = ((a[..., :half] + 1j * a[..., half:]) * turn for a in (q, k))
  age = time[:, None] - time
  outputs = []
  for head in range(HEADS):
    decay = np.where(age >= 0, (1 - 2.0 ** (-5 - head)) ** np.abs(age), 0)
    scores = (q[:, head] @ k[:, head].conj().T).real * decay
    outputs.append(scores @ v[:, head] / np.sqrt(width))
  y = normal(np.stack(outputs, axis=1), mixer.norm).reshape(len(x), -1)
  y = y * silu(x @ kernel(mixer.output_gate))
  return y @ kernel(mixer.output)


def gla(mixer, x):
  """Gated linear attention, as a loop over tokens."""
  gates = mixer.gates
  memory = np.zeros((HEADS, DIM // HEADS, DIM // HEADS // 2))
  outputs = []
  for token in x:
    z = token @ np.asarray(gates.down[...]) @ kernel(gates)
    z = z + np.asarray(gates.bias[...])
    decay = (1 / (1 + np.exp(-z))) ** (1 / 16)
    q, k, v, a = (
      array.reshape(HEADS, -1)
      for array in (
        token @ kernel(mixer.query),
        token @ kernel(mixer.key),
        token @ kernel(mixer.value),
        decay,
      )
    )
    memory = memory * a[:, None] + v[:, :, None] * k[:, None]
    y = np.einsum("hvk,hk->hv", memory, q) / np.sqrt(q.shape[-1])
    y = normal(y, mixer.norm).ravel() * silu(token @ kernel(mixer.output_gate))
    outputs.append(y @ kernel(mixer.output))
  return np.stack(outputs)


def mamba2(mixer, x):
  """Mamba-2, as a loop over tokens."""

  def convolved(name):
    projected = x @ kernel(getattr(mixer, name))
    taps = np.asarray(mixer.convolutions[name].kernel[...])
    past = np.concatenate([np.zeros((3, projected.shape[1])), projected])
    y = sum(taps[j] * past[3 - j : 3 - j + len(x)] for j in range(4))
    return silu(y + np.asarray(mixer.convolution_bias[name][...]))

  heads = 2 * DIM // 8
  C, B = convolved("query"), convolved("key")
  values = convolved("value").reshape(len(x), heads, 8)
  step = mixer.gates.step
  steps = np.log1p(np.exp(x @ kernel(step) + np.asarray(step.bias[...])))
  rate = np.exp(np.asarray(mixer.gates.log_rate[...]))
  skip = np.asarray(mixer.skip[...])
  memory = np.zeros((heads, 8, 4))
  outputs = []
  for t in range(len(x)):
    kept = np.exp(-steps[t] * rate)[:, None, None] * memory
    memory = kept + steps[t][:, None, None] * values[t][:, :, None] * B[t]
    y = memory @ C[t] + skip[:, None] * values[t]
    gated = y.ravel() * silu(x[t] @ kernel(mixer.output_gate))
    outputs.append(normal(gated, mixer.norm) @ kernel(mixer.output))
  return np.stack(outputs)


EQUATIONS = {
  "linear_attention": linear_attention,
  "normalised": normalised,
  "retnet": retnet,
  "gla": gla,
  "mamba2": mamba2,
}


@every_mixer
def test_the_layer_is_its_equations(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  y = call(mixer, x).y
  for row in range(BATCH):
    expected = EQUATIONS[name](mixer, np.asarray(x[row], np.float64))
    assert_close(y[row], expected, 1e-4 if name == "mamba2" else 1e-5)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name == "normalised" else pytest.mark.full)
    for name in MIXERS
  ],
)
@pytest.mark.usefixtures("x64")
def test_the_fast_form_is_the_definition(name):
  wide = {"dtype": "float64", "param_dtype": "float64"}
  mixer, x = mixer_of(name, **wide), inputs(LENGTH).astype(jnp.float64)
  slow = mixer_of(name, implementation="reference", **wide)
  before = call(mixer, x[:, :5]).state
  actual, out = slopes(mixer, x, before)
  expected, definition = slopes(slow, x, before)
  assert_close(
    jax.tree.leaves((actual, out)),
    jax.tree.leaves((expected, definition)),
    1e-8,
  )


@not_by_name
def test_any_split_and_any_number_of_steps_is_one_call(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  whole = call(mixer, x)
  parts, state = [], mixer.init_state(BATCH)
  for piece in (x[:, :31], x[:, 31:75]):
    out = call(mixer, piece, state)
    parts.append(out.y)
    state = out.state
  for t in (75, 76):
    y, state = step(mixer, x[:, t], state)
    parts.append(y[:, None])
  assert_close(
    (jnp.concatenate(parts, axis=1), state), (whole.y, whole.state), 1e-5
  )


@not_by_name
def test_padding_and_documents_are_invisible(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  whole = call(mixer, x)
  mask = np.zeros((BATCH, LENGTH), bool)
  mask[0, 30:70], mask[1, ::2] = True, True
  text = jnp.full_like(x, jnp.nan)
  for row in range(BATCH):
    text = text.at[row, mask[row]].set(x[row, : mask[row].sum()])
  out = call(mixer, text, mask=jnp.asarray(mask))
  assert jnp.all(out.y[~mask] == 0)
  for row in range(BATCH):
    assert_close(out.y[row, mask[row]], whole.y[row, : mask[row].sum()], 1e-5)

  # Prefixes of the same text as documents of one row.
  lengths = {1: 17, 2: 40, 3: 12}
  ids = np.repeat([0, 1, 2, 0, 3], [3, 17, 40, 5, 12])[None]
  row = jnp.full_like(x[:1], jnp.nan)
  for document, length in lengths.items():
    row = row.at[0, ids[0] == document].set(x[0, :length])
  last = call(mixer, x[:1, :12]).state
  for aligned in (False, True):
    out = packed(mixer, row, jnp.asarray(ids), max_segments=3, aligned=aligned)
    assert jnp.all(out.y[ids == 0] == 0)
    for document, length in lengths.items():
      here = ids[0] == document
      assert_close(out.y[0, here], whole.y[0, :length], 1e-5)
    if aligned:
      assert out.state is None
    else:
      assert_close(out.state, last, 1e-5)


@not_by_name
def test_hostile_inputs_stay_finite_and_nothing_looks_ahead(name):
  mixer, x = mixer_of(name), inputs(LENGTH)
  for hostile in (1e4 * x, jnp.zeros_like(x), 1e4 * x[:, :1] + 0 * x):
    assert finite(slopes(mixer, hostile, mixer.init_state(BATCH)))
  # A layer that overflowed would give zeros.
  assert jnp.all(jnp.any(call(mixer, 1e4 * x).y != 0, axis=-1))
  y = call(mixer, x).y
  other = call(mixer, x.at[1, 40].add(1.0)).y
  assert jnp.array_equal(other[0], y[0])
  assert jnp.array_equal(other[1, :40], y[1, :40])
  assert jnp.any(other[1, 40] != y[1, 40])


@not_by_name
def test_bfloat16_stays_near_float32(name):
  # Stated tolerance: 5 % of the root mean square, on average over outputs.
  x = inputs(LENGTH)
  exact = call(mixer_of(name), x).y
  out = call(mixer_of(name, dtype="bfloat16"), x.astype(jnp.bfloat16))
  assert out.y.dtype == jnp.bfloat16
  assert out.state.memory.dtype == jnp.float32
  error = jnp.sqrt(jnp.mean((out.y.astype(jnp.float32) - exact) ** 2))
  assert 0 < error < 0.05 * jnp.sqrt(jnp.mean(exact**2))


def test_retnet_is_gla_with_constant_gates():
  random = np.random.default_rng(3)
  q, k, v = (
    jnp.asarray(random.standard_normal((BATCH, 40, HEADS, 4)), jnp.float32)
    for _ in range(3)
  )
  decay = jnp.broadcast_to(
    log_retention(HEADS, jnp.float32), (BATCH, 40, HEADS)
  )
  every = jnp.broadcast_to(decay[..., None], k.shape)
  assert_close(
    channel_decay(q, k, v, every), scalar_decay(q, k, v, decay), 1e-5
  )
  np.testing.assert_allclose(
    np.exp(log_retention(3, jnp.float32)), [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128]
  )


def test_mamba2_is_a_recorded_layer():
  """Against another implementation, see `reference/README.md`."""
  file = pathlib.Path(__file__).parent / "reference" / "mamba2_layer.npz"
  with np.load(file) as stored:
    arrays = {name: jnp.asarray(array) for name, array in stored.items()}
  mixer = made(
    lambda rngs: Mamba2Mixer(
      8, 2, head_width=0, state_width=4, norm_epsilon=1e-5, rngs=rngs
    )
  )
  borders = np.cumsum([16, 16, 4, 4])
  z, x, B, C, step = jnp.split(arrays["in_proj_weight"], borders)
  projections = {"output_gate": z, "value": x, "key": B, "query": C}
  for name, weight in projections.items():
    getattr(mixer, name).kernel[...] = weight.T
  names = ("value", "key", "query")
  kernels = jnp.split(arrays["conv1d_weight"][:, 0], [16, 20])
  biases = jnp.split(arrays["conv1d_bias"], [16, 20])
  for name, taps, bias in zip(names, kernels, biases, strict=True):
    # Ours begins with the current token.
    mixer.convolutions[name].kernel[...] = taps.T[::-1]
    mixer.convolution_bias[name][...] = bias
  mixer.gates.step.kernel[...] = step.T
  mixer.gates.step.bias[...] = arrays["dt_bias"]
  mixer.gates.log_rate[...] = arrays["A_log"]
  mixer.skip[...] = arrays["D"]
  mixer.norm.scale[...] = arrays["norm_weight"]
  mixer.output.kernel[...] = arrays["out_proj_weight"].T
  assert_close(call(mixer, arrays["x"]).y, arrays["y"], 1e-5)


def test_mamba2_starts_with_short_steps():
  mixer = made(
    lambda rngs: Mamba2Mixer(64, 1, head_width=1, state_width=4, rngs=rngs)
  )
  steps = jax.nn.softplus(mixer.gates.step.bias[...])
  rates = jnp.exp(mixer.gates.log_rate[...])
  for values, least, most in ((steps, 1e-3, 0.1), (rates, 1.0, 16.0)):
    assert jnp.all((values > 0.99 * least) & (values < 1.01 * most))
    assert jnp.min(values) < 1.5 * least
    assert jnp.max(values) > most / 1.5
  metrics = call(mixer, jnp.zeros((1, 4, 64))).metrics
  np.testing.assert_allclose(metrics["gate_rate"], jnp.mean(steps), rtol=1e-5)


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("linear_attention", {"heads": 3}, "3 heads do not divide"),
    ("retnet", {"expand_value": 0.3}, "channels of values"),
    ("retnet", {"heads": 16}, "an even width"),
    ("gla", {"heads": 16}, "channels of keys"),
    ("gla", {"gate_rank": 0}, "gate_rank 0"),
    ("mamba2", {"head_width": 64}, "heads of width 64"),
    ("mamba2", {"state_width": 0}, "state_width 0"),
    ("gla", {"implementation": "fast"}, "implementation 'fast'"),
  ],
)
def test_what_does_not_fit_is_refused(name, options, message):
  options = {"heads": HEADS, **options}
  with pytest.raises(UserError, match=message):
    made(lambda rngs: MIXERS[name](DIM, rngs=rngs, **options))
