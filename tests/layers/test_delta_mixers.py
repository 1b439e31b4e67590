"""Mixers of the delta family: their equations, in float64 their contract.

The tests of all mixers by name hold for these as well.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.errors import UserError
from atlas_jax.layers.delta_mixer import DeltaNetMixer, GatedDeltaNetMixer
from atlas_jax.layers.longhorn_mixer import LonghornMixer
from atlas_jax.layers.mesa_mixer import MesaMixer
from atlas_jax.layers.rwkv7_mixer import RWKV7Mixer
from tests.layers.helpers import assert_close, finite, made, randomised
from tests.models.mixers import call, inputs, slopes

DIM, HEADS, LENGTH, BATCH = 16, 2, 77, 2

MIXERS = {
  "deltanet": DeltaNetMixer,
  "gated_deltanet": GatedDeltaNetMixer,
  "longhorn": functools.partial(LonghornMixer, state_width=4),
  "rwkv7": functools.partial(
    RWKV7Mixer, decay_rank=3, rate_rank=4, gate_rank=5
  ),
  "mesa": MesaMixer,
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


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


def number(parameter):
  return np.asarray(parameter[...], np.float64)


def kernel(layer):
  return number(layer.kernel)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def softplus(x):
  return np.log1p(np.exp(x))


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def normal(x, norm):
  mean = np.mean(x**2, axis=-1, keepdims=True)
  return x / np.sqrt(mean + norm.epsilon) * number(norm.scale)


def convolved(x, layer, convolution, bias=0.0):
  """SiLU of the causal convolution of a projection, split in heads."""
  projected, taps = x @ kernel(layer), kernel(convolution)
  past = np.concatenate([np.zeros((3, projected.shape[1])), projected])
  y = sum(taps[j] * past[3 - j : 3 - j + len(x)] for j in range(4))
  return silu(y + bias).reshape(len(x), HEADS, -1)


def delta(mixer, x, decay):
  """The delta rule, as a loop over tokens and heads."""
  q, k, v = (
    convolved(x, getattr(mixer, name), mixer.convolutions.by_name[name])
    for name in ("query", "key", "value")
  )
  q, k, rate = unit(q), unit(k), sigmoid(x @ kernel(mixer.rate))
  memory = np.zeros((HEADS, v.shape[-1], k.shape[-1]))
  outputs = []
  for t in range(len(x)):
    y = []
    for head in range(HEADS):
      forget = np.eye(k.shape[-1]) - rate[t, head] * np.outer(
        k[t, head], k[t, head]
      )
      memory[head] = decay[t, head] * memory[head] @ forget
      memory[head] += rate[t, head] * np.outer(v[t, head], k[t, head])
      y.append(memory[head] @ q[t, head])
    outputs.append(normal(np.stack(y), mixer.norm).ravel())
  return np.stack(outputs)


def deltanet(mixer, x):
  return delta(mixer, x, np.ones((len(x), HEADS))) @ kernel(mixer.output)


def gated_deltanet(mixer, x):
  step = mixer.decay.step
  steps = softplus(x @ kernel(step) + number(step.bias))
  decay = np.exp(-np.exp(number(mixer.decay.log_rate)) * steps)
  y = delta(mixer, x, decay) * silu(x @ kernel(mixer.output_gate))
  return y @ kernel(mixer.output)


def longhorn(mixer, x):
  """Every row of every memory as the solution of its own least squares."""
  bias = number(mixer.convolution_bias)
  v = convolved(x, mixer.value, mixer.convolution, bias)
  flat = v.reshape(len(x), -1)
  q, k = (
    (flat @ kernel(layer)).reshape(len(x), HEADS, -1)
    for layer in (mixer.query, mixer.key)
  )
  rate = flat @ number(mixer.rate.down) @ kernel(mixer.rate)
  rate = sigmoid(rate + number(mixer.rate.bias)).reshape(v.shape)
  memory = np.zeros((HEADS, v.shape[-1], k.shape[-1]))
  outputs = []
  for t in range(len(x)):
    for head in range(HEADS):
      key = k[t, head]
      for row in range(v.shape[-1]):
        b = rate[t, head, row]
        left = np.eye(len(key)) + b * np.outer(key, key)
        right = memory[head, row] + b * v[t, head, row] * key
        memory[head, row] = np.linalg.solve(left, right)
    outputs.append(np.einsum("hvk,hk->hv", memory, q[t]).ravel())
  y = np.stack(outputs) + number(mixer.skip) * flat
  return (y * silu(x @ kernel(mixer.output_gate))) @ kernel(mixer.output)


def mesa(mixer, x):
  """Weighted ridge regression on all tokens so far, anew for every token."""
  q, k = (
    unit(convolved(x, getattr(mixer, name), mixer.convolutions.by_name[name]))
    for name in ("query", "key")
  )
  v = (x @ kernel(mixer.value)).reshape(len(x), HEADS, -1)
  rate, decay = (
    sigmoid(x @ kernel(gate) + number(gate.bias))
    for gate in (mixer.rate, mixer.decay)
  )
  ridge = 0.25 + softplus(number(mixer.ridge))
  outputs = []
  for t in range(len(x)):
    y = []
    for head in range(HEADS):
      weight = rate[: t + 1, head].copy()
      for n in range(t + 1):
        weight[n] *= np.prod(decay[n + 1 : t + 1, head])
      keys, values = k[: t + 1, head], v[: t + 1, head]
      gram = keys.T @ (weight[:, None] * keys) + np.diag(ridge[head])
      cross = values.T @ (weight[:, None] * keys)
      y.append(cross @ np.linalg.solve(gram, q[t, head]))
    outputs.append(normal(np.stack(y), mixer.norm).ravel())
  return np.stack(outputs) @ kernel(mixer.output)


def rwkv7(mixer, x):
  """Time mixing of RWKV-7, token by token."""

  def low_rank(layer, x, activation):
    return activation(x @ number(layer.down)) @ number(layer.up)

  width = DIM // HEADS
  memory = np.zeros((HEADS, width, width))
  last, outputs = np.zeros(DIM), []
  for token in x:
    at = {
      name: token + number(amount) * (last - token)
      for name, amount in mixer.shifts.items()
    }
    last = token
    heads = lambda y: y.reshape(HEADS, width)
    r = heads(at["query"] @ kernel(mixer.query))
    k = at["key"] @ kernel(mixer.key)
    v = heads(at["value"] @ kernel(mixer.value))
    z = low_rank(mixer.decay, at["decay"], np.tanh) + number(mixer.decay.bias)
    w = heads(np.exp(-np.exp(-0.5) * sigmoid(z)))
    z = low_rank(mixer.rate, at["rate"], lambda x: x) + number(mixer.rate.bias)
    a = sigmoid(z)
    g = low_rank(mixer.gate, at["gate"], sigmoid)
    c = unit(heads(k * number(mixer.erased)))
    k, a = heads(k * (1 + (a - 1) * number(mixer.written))), heads(a)
    y = np.zeros((HEADS, width))
    for head in range(HEADS):
      change = np.diag(w[head]) - np.outer(c[head], a[head] * c[head])
      memory[head] = memory[head] @ change + np.outer(v[head], k[head])
      y[head] = memory[head] @ r[head]
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(
      y.var(-1, keepdims=True) + mixer.norm.epsilon
    )
    y = y * number(mixer.norm.scale) + number(mixer.norm.bias)
    y = y + np.sum(r * k * number(mixer.bonus), -1, keepdims=True) * v
    outputs.append((y.ravel() * g) @ kernel(mixer.output))
  return np.stack(outputs)


EQUATIONS = {
  "deltanet": deltanet,
  "gated_deltanet": gated_deltanet,
  "longhorn": longhorn,
  "rwkv7": rwkv7,
  "mesa": mesa,
}


WIDE = {"dtype": "float64", "param_dtype": "float64"}


@every_mixer
@pytest.mark.usefixtures("x64")
def test_the_layer_is_its_equations(name):
  mixer, x = mixer_of(name, **WIDE), inputs(LENGTH).astype(jnp.float64)
  y = call(mixer, x).y
  for row in range(BATCH):
    equations = EQUATIONS[name](mixer, np.asarray(x[row]))
    assert_close(y[row], equations, 1e-8)


@every_mixer
@pytest.mark.full
@pytest.mark.usefixtures("x64")
def test_the_fast_form_is_the_definition(name):
  mixer, x = mixer_of(name, **WIDE), inputs(LENGTH).astype(jnp.float64)
  slow = mixer_of(name, implementation="reference", **WIDE)
  before = call(mixer, x[:, :5]).state
  actual, out = slopes(mixer, x, before)
  expected, definition = slopes(slow, x, before)
  assert_close(
    jax.tree.leaves((actual, out)),
    jax.tree.leaves((expected, definition)),
    1e-8,
  )
  assert not jnp.array_equal(out.y, definition.y)


@every_mixer
@pytest.mark.full
def test_open_and_shut_gates_stay_finite(name):
  graph, params = nnx.split(mixer_of(name))
  x = 1e4 * inputs(LENGTH)
  for logit in (-20.0, 20.0):
    mixer = nnx.merge(graph, params)
    gates = [
      getattr(mixer, gate)
      for gate in ("rate", "decay")
      if getattr(getattr(mixer, gate, None), "bias", None) is not None
    ]
    if name == "gated_deltanet":
      gates.append(mixer.decay.step)
    for gate in gates:
      gate.bias = nnx.Param(jnp.full_like(gate.bias[...], logit))
    assert finite(slopes(mixer, x, mixer.init_state(BATCH)))


def test_decays_and_ridges_start_as_in_their_papers():
  made_of = lambda kind, **options: made(
    lambda rngs: kind(64, 64, rngs=rngs, **options)
  )
  gated = made_of(GatedDeltaNetMixer, expand_key=1.0, expand_value=1.0)
  steps = jax.nn.softplus(gated.decay.step.bias[...])
  rates = jnp.exp(gated.decay.log_rate[...])
  assert jnp.all((steps > 0.99e-3) & (steps < 0.101))
  assert jnp.all((rates > 0) & (rates < 16.1))
  assert jnp.min(rates) < 1 < 15 < jnp.max(rates)
  ridge = made_of(MesaMixer).ridge[...]
  np.testing.assert_allclose(0.25 + jax.nn.softplus(ridge), 1.0, rtol=1e-6)
  mixer = made(lambda rngs: RWKV7Mixer(64, 2, rngs=rngs))
  # The code's 64e-5 for heads of 64, and (layer / layers)^0.7 halfway.
  assert mixer.norm.epsilon == pytest.approx(32e-5)
  np.testing.assert_allclose(mixer.norm.scale[...], 0.5**0.7, rtol=1e-6)
  out = call(mixer, inputs(4, 1).repeat(4, axis=-1))
  decay = np.exp(-np.exp(-0.5) * sigmoid(number(mixer.decay.bias)))
  np.testing.assert_allclose(out.metrics["gate_decay"], decay.mean(), rtol=1e-5)
  assert decay.min() > 0.545


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("deltanet", {"heads": 3}, "3 heads do not divide"),
    ("deltanet", {"conv_width": 0}, "conv_width 0"),
    ("deltanet", {"largest_rate": 3.0}, r"largest_rate 3\.0"),
    ("gated_deltanet", {"expand_value": 0.3}, "channels of values"),
    ("longhorn", {"state_width": 0}, "state_width 0"),
    ("longhorn", {"heads": 5}, "channels of values"),
    ("rwkv7", {"heads": 3}, "3 heads do not divide"),
    ("rwkv7", {"gate_rank": -1}, "a rank is negative"),
    ("mesa", {"decay_start": 1.0}, r"decay_start 1\.0"),
    ("mesa", {"implementation": "fast"}, "implementation 'fast'"),
  ],
)
def test_what_does_not_fit_is_refused(name, options, message):
  options = {"heads": HEADS, **options}
  with pytest.raises(UserError, match=message):
    made(lambda rngs: MIXERS[name](DIM, rngs=rngs, **options))
