"""Attention and a memory in one layer: by hand, and token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from atlas_jax.layers import MemoryMixer
from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.layers.delta_mixer import GatedDeltaNetMixer
from atlas_jax.layers.gla_mixer import GLAMixer
from atlas_jax.layers.memory_as_context import MemoryAsContext
from atlas_jax.layers.memory_as_gate import MemoryAsGate
from atlas_jax.layers.memory_as_layer import MemoryAsLayer
from atlas_jax.layers.mesa_mixer import MesaMixer
from atlas_jax.layers.recurrent_cell_mixer import RecurrentCellMixer
from atlas_jax.layers.segment_attention import SegmentAttention
from tests.layers.helpers import assert_close, jit, made, randomised

DIM, HEADS, LENGTH, SEGMENT = 8, 2, 11, 4
MEMORY = am.Memory(
  am.Identity(),
  am.MLP(expansion=1.0),
  optimizer=am.Momentum(),
  window=1,
  chunk=2,
)
deep = functools.partial(MemoryMixer, memory=MEMORY)


def inputs(dtype=np.float32, length=LENGTH):
  random = np.random.default_rng(2)
  return jnp.asarray(random.standard_normal((2, length, DIM)), dtype)


@functools.cache
def context(memory=deep, segment=SEGMENT, dtype="float32", **changes):
  types = {"dtype": dtype, "param_dtype": dtype}

  def make(rngs):
    parts = types | changes | {"rngs": rngs}
    attention = SegmentAttention(DIM, HEADS, persistent=2, kv_heads=1, **parts)
    return MemoryAsContext(
      attention,
      memory(DIM, HEADS, **parts),
      segment=segment,
      **parts,
    )

  return randomised(made(make))


@functools.cache
def pair(kind):
  """A windowed hybrid around the same small parts."""

  def make(rngs):
    attention = AttentionMixer(DIM, HEADS, window=3, persistent=2, rngs=rngs)
    memory = deep(DIM, HEADS, rngs=rngs)
    if kind is MemoryAsGate:
      return MemoryAsGate(attention, memory, rngs=rngs)
    return MemoryAsLayer(attention, memory)

  return randomised(made(make))


@jit
def call(mixer, x, state=None):
  return mixer(x, state=state)


def rms_norm(x, scale):
  x = np.asarray(x, np.float64)
  mean = np.mean(x**2, axis=-1, keepdims=True)
  return np.asarray(scale) * x / np.sqrt(mean + 1e-6)


def test_a_gate_is_a_product_of_both_branches():
  mixer, x = pair(MemoryAsGate), inputs()
  y = rms_norm(call(mixer.attention, x).y, mixer.product.branch_norm.scale[...])
  m = rms_norm(call(mixer.memory, x).y, mixer.product.gate_norm.scale[...])
  expected = (y * m / (1 + np.exp(-m))) @ np.asarray(
    mixer.product.output.kernel[...], np.float64
  )
  out = call(mixer, x)
  assert_close(out.y, expected, 1e-5)
  assert {"inner_loss", "gate_rate"} <= set(out.metrics)


def test_a_layer_is_attention_over_the_memory():
  mixer, x = pair(MemoryAsLayer), inputs()
  m = rms_norm(call(mixer.memory, x).y, mixer.norm.scale[...])
  expected = call(mixer.attention, jnp.asarray(m, jnp.float32)).y
  assert_close(call(mixer, x).y, expected, 1e-5)


@pytest.mark.parametrize("kind", [MemoryAsGate, MemoryAsLayer])
def test_hybrids_hand_on_both_states(kind):
  mixer, x = pair(kind), inputs()
  whole = call(mixer, x)
  state = call(mixer, x[:, :5]).state
  assert mixer.counts(state)[MEMORY.chunk].tolist() == [1, 1]
  out = call(mixer, x[:, 5:], state)
  assert_close(out.y, whole.y[:, 5:], 1e-5)
  assert_close(out.state, whole.state, 1e-5)
  assert mixer.capacity(state) is None
  step = jit(lambda mixer, x, state: mixer.step(x, mixer.prepare(state)))
  y, after = step(mixer, x[:, 5], state)
  assert_close(y, whole.y[:, 5], 1e-5)
  assert jax.tree.structure(mixer.unprepare(after)) == jax.tree.structure(state)


def test_parts_of_different_widths_are_refused():
  attention = AttentionMixer(4, 2, window=3, rngs=nnx.Rngs(0))
  memory = RecurrentCellMixer(8, rngs=nnx.Rngs(0))
  with pytest.raises(UserError, match="width 4 and a memory of width 8"):
    MemoryAsLayer(attention, memory)


@jit
def slopes(mixer, x, tokens):
  """Values and gradients after some tokens have gone before."""
  state = mixer(tokens).state

  def total(mixer, x, memory):
    out = mixer(x, state=state._replace(memory=memory))
    return jnp.sum(jnp.sin(out.y)), (out.y, out.state)

  floats = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
  assert any(floats(leaf) for leaf in jax.tree.leaves(state.memory))
  grad = jax.grad(total, argnums=(0, 1, 2), has_aux=True, allow_int=True)
  (by_mixer, by_x, by_memory), out = grad(mixer, x, state.memory)
  by_memory = [leaf for leaf in jax.tree.leaves(by_memory) if floats(leaf)]
  return nnx.to_pure_dict(nnx.state(by_mixer)), by_x, by_memory, out


@pytest.mark.full
@pytest.mark.parametrize("memory", [deep, GLAMixer, GatedDeltaNetMixer])
def test_a_context_in_float64_is_its_definition(memory):
  with jax.enable_x64(True):
    x = inputs(np.float64)
    # Half a segment before: the call ends one and leaves part of another.
    before = x[:, ::-1][:, :2]
    found, expected = (
      slopes(context(memory, dtype="float64", implementation=name), x, before)
      for name in ("xla", "reference")
    )
    assert found[1].dtype == jnp.float64
    assert_close(found, expected, 1e-8)


def test_a_context_is_attention_to_what_is_known_of_the_past():
  """Segment by segment, query by query, after Titans (arXiv 2501.00663)."""
  mixer, x, width = context(), inputs(), DIM // HEADS
  attention, recall = mixer.attention, mixer.recall
  heads = lambda y: y.reshape(*y.shape[:-1], -1, width)
  kernel = lambda layer: np.asarray(layer.kernel[...], np.float64)
  silu = lambda y: y / (1 + np.exp(-y))

  def turned(y, place):
    half, angle = width // 2, place * 10000.0 ** -np.arange(0, 1, 2 / width)
    pair = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * angle)
    return np.concatenate([pair.real, pair.imag], axis=-1)

  def asked(token, weights):
    """What the memory at the segment's start answers to a token."""
    q = heads(silu(token @ kernel(recall.query)))
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    z = np.einsum("hnk,hk->hn", weights["in"], q)
    z = z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2
    y = q + np.einsum("hvn,hn->hv", weights["out"], z)
    return rms_norm(y, recall.norm.scale[...]).ravel()

  def row_of(text, before):
    outputs = []
    for start in range(0, len(text), SEGMENT):
      tokens = text[start : start + SEGMENT]
      weights = jax.tree.map(
        lambda w: np.asarray(w[0], np.float64), before.memory.weights
      )
      retrieved = [asked(token, weights) for token in tokens]
      ys = []
      for i, token in enumerate(tokens):
        seen = [(row, None) for row in np.asarray(attention.persistent[...])]
        seen += [(retrieved[j], j) for j in range(i + 1)]
        seen += [(tokens[j], j) for j in range(i + 1)]
        query = turned(heads(token @ kernel(attention.query)), i)
        keys = [
          key if place is None else turned(key, place)
          for key, place in (
            (heads(y @ kernel(attention.key)), place) for y, place in seen
          )
        ]
        keys = np.repeat(np.stack(keys), HEADS, axis=1)
        values = np.stack([heads(y @ kernel(attention.value)) for y, _ in seen])
        scores = np.einsum("hk,shk->hs", query, keys) / np.sqrt(width)
        share = np.exp(scores - scores.max(axis=-1, keepdims=True))
        share = share / share.sum(axis=-1, keepdims=True)
        read = np.einsum("hs,shk->hk", share, np.repeat(values, HEADS, axis=1))
        ys.append(read.ravel() @ kernel(attention.output))
      # Written token by token; the running state is read.
      y = np.stack(ys)
      out = call(mixer.memory, jnp.asarray(y, jnp.float32)[None], before)
      before = out.state
      product = mixer.product
      gate = silu(rms_norm(out.y[0], product.gate_norm.scale[...]))
      gated = rms_norm(y, product.branch_norm.scale[...]) * gate
      outputs.append(gated @ kernel(product.output))
    return np.concatenate(outputs)

  y = call(mixer, x).y
  for row in range(2):
    text = np.asarray(x[row], np.float64)
    expected = row_of(text, mixer.memory.init_state(1))
    assert_close(y[row], expected, 1e-5)


def test_the_memory_is_asked_as_it_was_when_the_segment_began():
  mixer, x = context(), inputs()
  start = mixer.init_state(2)
  inside, border = (call(mixer, x[:, :n], start).state for n in (3, SEGMENT))
  assert_close(inside.memory, start.memory, 0)
  assert inside.count.tolist() == [3, 3]
  assert_close(inside.pending, x[:, :3], 1e-6)
  assert border.count.tolist() == [0, 0]
  assert jnp.all(border.pending == 0)
  moved = jax.tree.map(
    lambda a, b: jnp.any(a != b), border.memory.memory, start.memory.memory
  )
  assert all(jax.tree.leaves(moved.weights))
  # The next segment sees what went before through the memory alone.
  again = border._replace(memory=start.memory)
  first = call(mixer, x[:, :3], start).y
  assert_close(call(mixer, x[:, :3], again).y, first, 0)
  assert not jnp.allclose(call(mixer, x[:, :3], border).y, first)


def test_documents_of_a_row_are_texts_by_themselves():
  mixer, x = context(), inputs()
  whole = call(mixer, x)
  ids = np.array([[1] * 5 + [0] * 3 + [2] * 9])
  row = np.full((1, ids.size, DIM), np.nan, np.float32)
  row[0, :5], row[0, 8:] = x[0, :5], x[1, :9]
  row, ids = jnp.asarray(row), jnp.asarray(ids)
  packed = jit(
    lambda mixer, x, **changes: mixer(x, segment_ids=ids, **changes).y,
    static_argnames=("aligned", "max_segments"),
  )
  for options in ({"aligned": True}, {"max_segments": 2}):
    y = packed(mixer, row, **options)
    assert_close(y[0, :5], whole.y[0, :5], 1e-5)
    assert_close(y[0, 8:], whole.y[1, :9], 1e-5)
    assert jnp.all(y[0, 5:8] == 0)
  assert jnp.all(jnp.isnan(packed(mixer, row, max_segments=1)[ids > 0]))


def test_metrics_are_means_over_tokens():
  mixer, x = context(), inputs()
  mask = jnp.broadcast_to(jnp.arange(LENGTH + 7) < LENGTH, (2, LENGTH + 7))
  masked = jit(lambda mixer, x: mixer(x, mask=mask))(
    mixer, jnp.pad(x, ((0, 0), (0, 7), (0, 0)))
  )
  plain = call(mixer, x).metrics
  assert set(plain) == set(masked.metrics) >= {"inner_loss", "gate_decay"}
  assert_close(masked.metrics, plain, 1e-5)
  assert all(value.dtype == jnp.float32 for value in plain.values())


def test_what_is_no_context_is_refused():
  with pytest.raises(UserError, match="3 tokens is no multiple of the memory"):
    context(segment=3)
  for memory in (MesaMixer, RecurrentCellMixer):
    with pytest.raises(UserError, match="cannot be asked without writing"):
      context(memory)
  attention = SegmentAttention(DIM, HEADS, window=3, rngs=nnx.Rngs(0))
  memory = deep(DIM, HEADS, rngs=nnx.Rngs(0))
  with pytest.raises(UserError, match="no window"):
    MemoryAsContext(attention, memory, segment=4, rngs=nnx.Rngs(0))


def test_long_segments_attend_in_pieces():
  length = 130
  attention = context().attention
  x = jnp.concatenate([inputs(length=length)] * 2, axis=0)[:3]
  place = jnp.arange(length, dtype=jnp.int32)[None]

  def both(attention, x):
    entries = attention.entries(x, place)
    y = attention.over(x, place, entries, place[:, None] <= place[..., None])
    one = lambda t: attention.over_by_definition(
      x[:, t], jnp.full((3,), t), entries, jnp.repeat(place <= t, 3, axis=0)
    )
    return y[:, jnp.array([0, 127, 129])], [one(t) for t in (0, 127, 129)]

  y, expected = jit(both)(attention, x)
  assert_close(y, jnp.stack(expected, axis=1), 1e-5)
