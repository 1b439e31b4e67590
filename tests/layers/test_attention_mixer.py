"""Attention between projections: options, state and documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import attention as aa
from atlas_jax.errors import UserError
from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.layers.reformer_mixer import ReformerMixer
from tests.layers.helpers import assert_close, finite, jit, made, randomised

DIM, HEADS, BATCH, LENGTH = 16, 4, 2, 19

# Between them every option is on and off.
KINDS = {
  "transformer": (AttentionMixer, {"kv_heads": 2, "qk_norm": True}),
  "positionless": (AttentionMixer, {"rope_base": 0.0, "softmax_scale": 0.3}),
  "swa": (AttentionMixer, {"window": 5, "persistent": 2}),
  "longformer": (AttentionMixer, {"window": 4, "global_tokens": 2}),
  "reformer": (ReformerMixer, {"buckets": 4, "rounds": 2}),
  "reformer_normed": (
    ReformerMixer,
    {"buckets": 4, "rounds": 1, "qk_norm": True, "rope_base": 0.0},
  ),
}
# The contract over every name (tests/models) has one of each kind; these have
# options that it has not. The others in `make test-full`.
_SOME = ("transformer", "positionless")
every_kind = pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in _SOME else pytest.mark.full)
    for name in KINDS
  ],
)


@functools.cache
def mixer_of(name, **changes):
  kind, options = KINDS[name]
  return randomised(
    made(lambda rngs: kind(DIM, HEADS, rngs=rngs, **{**options, **changes}))
  )


def like(mixer, name, **changes):
  """A mixer with other options and the parameters of this one."""
  graph, _ = nnx.split(mixer_of(name, **changes))
  return nnx.merge(graph, nnx.split(mixer)[1])


def inputs(length=LENGTH, batch=BATCH):
  random = np.random.default_rng(2)
  return jnp.asarray(random.standard_normal((batch, length, DIM)), jnp.float32)


@functools.partial(jit, static_argnames=("max_segments", "aligned"))
def call(mixer, x, state=None, **options):
  return mixer(x, state=state, **options)


@jit
def step(mixer, x, state, valid=None):
  return mixer.step(x, state, valid=valid)


@jit
def slopes(mixer, x):
  """Gradients by parameter and input, and the outputs."""

  def total(mixer, x):
    y = mixer(x).y
    return jnp.sum(jnp.sin(y)), y

  return jax.grad(total, argnums=(0, 1), has_aux=True)(mixer, x)


@every_kind
def test_it_is_its_definition_and_every_parameter_matters(name):
  mixer, x = mixer_of(name), inputs()
  (by_parameter, by_input), y = slopes(mixer, x)
  slow = like(mixer, name, implementation="reference")
  (expected, expected_input), definition = slopes(slow, x)
  assert_close(y, definition, 1e-5)
  assert_close(by_input, expected_input, 1e-4)
  found, expected = (
    nnx.to_pure_dict(nnx.state(tree)) for tree in (by_parameter, expected)
  )
  assert_close(found, expected, 1e-4)
  for path, leaf in jax.tree_util.tree_leaves_with_path(found):
    assert jnp.any(leaf != 0), path


@every_kind
def test_documents_padding_and_steps_are_one_long_text_each(name):
  mixer, x = mixer_of(name), inputs(batch=3)
  whole = call(mixer, x)
  # One text in two rows' parts: 7 tokens, then 12 behind another document.
  first = call(mixer, x[:, :7])
  ids = jnp.asarray([[0, 1, 1, 1, 1, 0, 1, 1, 2, 2, 2, 0, 2]] * 3)
  row = jnp.full((3, 13, DIM), jnp.nan)
  row = row.at[:, jnp.array([1, 2, 3, 4, 6, 7])].set(x[:, 7:13])
  row = row.at[:, jnp.array([8, 9, 10, 12])].set(x[:, :4])
  out = call(mixer, row, first.state, segment_ids=ids, max_segments=2)
  assert jnp.all(out.y[ids == 0] == 0)
  assert_close(out.y[:, 1:5], whole.y[:, 7:11], 1e-5)
  assert_close(out.y[:, 6:8], whole.y[:, 11:13], 1e-5)
  assert_close(out.y[:, 8:11], whole.y[:, :3], 1e-5)
  assert_close(out.y[:, 12], whole.y[:, 3], 1e-5)
  # The second document goes on, in two of three rows.
  state = mixer.resize(out.state, LENGTH)
  y, state = step(mixer, x[:, 4], state, jnp.array([True, False, True]))
  assert jnp.all(y[1] == 0)
  assert_close(y[::2], whole.y[::2, 4], 1e-5)
  y, state = step(mixer, x[:, 4], state, jnp.array([False, True, False]))
  assert_close(y[1], whole.y[1, 4], 1e-5)
  y, state = step(mixer, x[:, 5], state)
  assert_close(y, whole.y[:, 5], 1e-5)
  wanted = call(mixer, x[:, :6]).state
  assert_close(state, mixer.resize(wanted, LENGTH), 1e-5)


@every_kind
def test_aligned_documents_start_anywhere(name):
  mixer, x = mixer_of(name), inputs()
  ids = jnp.asarray([[1] * 4 + [0] * 2 + [2] * 8 + [3] * 5] * BATCH)
  out = call(mixer, x, segment_ids=ids, aligned=True)
  assert out.state is None
  assert jnp.all(out.y[ids == 0] == 0)
  for first, end in ((0, 4), (6, 14), (14, 19)):
    alone = call(mixer, x[:, first:end])
    assert_close(out.y[:, first:end], alone.y, 1e-5)


@every_kind
def test_hostile_inputs_stay_finite(name):
  mixer, x = mixer_of(name), 1e4 * inputs()
  for hostile in (x, 0 * x, jnp.broadcast_to(x[:, :1], x.shape)):
    assert finite(slopes(mixer, hostile))


@every_kind
def test_bfloat16_keeps_its_type_and_stays_near_float32(name):
  # Stated tolerance: 5 % of the root mean square, on average over outputs.
  # With one bucket: on a border rounding decides into which a vector falls.
  changes = {"buckets": 1} if name.startswith("reformer") else {}
  mixer, x = mixer_of(name, **changes), inputs().astype(jnp.bfloat16)
  exact = call(mixer, x.astype(jnp.float32)).y
  narrow = like(mixer, name, dtype=jnp.bfloat16, **changes)
  out = call(narrow, x)
  assert out.y.dtype == jnp.bfloat16
  error = jnp.sqrt(jnp.mean((out.y.astype(jnp.float32) - exact) ** 2))
  assert 0 < error < 0.05 * jnp.sqrt(jnp.mean(exact**2))
  kinds = {leaf.dtype for leaf in jax.tree.leaves(out.state)}
  assert kinds <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)}
  assert jnp.dtype(jnp.bfloat16) in kinds
  # Training works in narrow types too.
  assert finite(slopes(narrow, x))


def test_reductions_to_full_attention_and_to_a_window():
  x = inputs()
  plain = made(lambda rngs: AttentionMixer(DIM, HEADS, rngs=rngs))
  y = call(plain, x).y

  def with_options(**options):
    made_so = made(
      lambda rngs: AttentionMixer(DIM, HEADS, rngs=rngs, **options)
    )
    graph, _ = nnx.split(made_so)
    return call(nnx.merge(graph, nnx.split(plain)[1]), x).y

  assert_close(with_options(window=LENGTH), y, 1e-6)
  assert_close(with_options(kv_heads=HEADS), y, 1e-6)
  window = with_options(window=5)
  assert_close(with_options(window=5, global_tokens=0), window, 1e-6)
  assert (
    jnp.max(jnp.abs(with_options(window=5, global_tokens=1) - window)) > 0.01
  )
  assert jnp.max(jnp.abs(y - window)) > 0.01


def test_persistent_tokens_are_a_text_before_every_text():
  mixer = mixer_of("positionless", persistent=3)
  x = inputs()
  rows = jnp.broadcast_to(mixer.persistent[...][None], (BATCH, 3, DIM))
  graph, params = nnx.split(mixer_of("positionless"))
  nnx.update(params, nnx.state(mixer, lambda path, _: "persistent" not in path))
  plain = nnx.merge(graph, params)
  expected = call(plain, jnp.concatenate([rows, x], axis=1)).y[:, 3:]
  assert_close(call(mixer, x).y, expected, 1e-5)
  assert not jnp.allclose(call(plain, x).y, expected, atol=1e-2)


def test_positions_matter_only_with_the_rotary_embedding():
  x = inputs()
  turned = x.at[:, :-1].set(x[:, -2::-1])
  mixer = mixer_of("positionless")
  assert_close(call(mixer, turned).y[:, -1], call(mixer, x).y[:, -1], 1e-5)
  mixer = mixer_of("transformer")
  assert not jnp.allclose(
    call(mixer, turned).y[:, -1], call(mixer, x).y[:, -1], atol=1e-2
  )


def test_a_growing_state_says_its_room_and_refuses_more():
  mixer, x = mixer_of("transformer"), inputs()
  assert mixer.capacity(mixer.init_state(BATCH)) == 0
  state = call(mixer, x[:, :7], call(mixer, x[:, :4]).state).state
  assert mixer.capacity(state) == 11
  with pytest.raises(UserError, match=r"row 0 .* make more with `resize`"):
    mixer.step(x[:, 0], state)
  y, lost = step(mixer, x[:, 0], state, jnp.array([True, False]))
  assert jnp.all(jnp.isnan(y[0]))
  assert jnp.all(y[1] == 0)
  state = mixer.resize(state, 12)
  y, state = mixer.step(x[:, 7], state)
  assert mixer.capacity(state) == 12
  assert jnp.all(jnp.isfinite(y))
  y, _ = step(mixer, x[:, 8], mixer.resize(lost, 20))
  assert jnp.isnan(y).all(axis=1).tolist() == [True, False]
  window = mixer_of("swa")
  state = window.init_state(BATCH)
  assert window.capacity(state) is None
  assert window.resize(state, 9) is state


@pytest.mark.parametrize("name", ["transformer", "longformer"])
def test_the_definition_has_the_same_state_and_room(name):
  mixer, x = mixer_of(name), inputs()
  slow = like(mixer, name, implementation="reference")
  state = mixer.resize(call(mixer, x[:, :7]).state, 8)
  assert_close(slow.resize(call(slow, x[:, :7]).state, 8), state, 1e-5)
  expected = step(mixer, x[:, 7], state)
  assert_close(step(slow, x[:, 7], state), expected, 1e-5)
  full = step(slow, x[:, 8], expected[1])[0]
  assert bool(jnp.isnan(full).all()) == (name == "transformer")


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"kv_heads": 3}, "3 heads of keys do not divide 4 heads"),
    ({"window": -1}, "window -1, .* use 0 or more"),
    ({"global_tokens": 2}, "global tokens need a window"),
    ({"heads": 3}, "3 heads do not divide the width 16"),
    ({"heads": 16}, "even width; 0 leaves it away"),
    ({"rope_base": -1.0}, "needs a base above 0"),
    ({"implementation": "fast"}, "choose one of auto, reference, xla"),
  ],
)
def test_options_that_do_not_fit_are_refused(options, message):
  options = {"heads": HEADS, **options}
  with pytest.raises(UserError, match=message):
    AttentionMixer(DIM, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"buckets": 3}, "3 buckets: use an even number, or 1"),
    ({"buckets": 0}, "0 buckets"),
    ({"rounds": 0}, "rounds 0, .* use 1 or more rounds"),
  ],
)
def test_hashes_that_cannot_be_are_refused(options, message):
  with pytest.raises(UserError, match=message):
    ReformerMixer(DIM, HEADS, rngs=nnx.Rngs(0), **options)


def test_the_length_of_a_query_is_its_inverse_temperature():
  """One bucket, by hand: unit keys, scores that no width divides."""
  mixer, x = mixer_of("reformer", buckets=1, rope_base=0.0), inputs()
  heads = lambda linear: np.asarray(linear(x)).reshape(
    BATCH, LENGTH, HEADS, DIM // HEADS
  )
  query, value = heads(mixer.query), heads(mixer.value)
  key = query / np.linalg.norm(query, axis=-1, keepdims=True)
  scores = np.einsum("bthk,bshk->bhts", query, key)
  earlier = np.tri(LENGTH, k=-1, dtype=bool)
  earlier[0, 0] = True
  weights = np.where(earlier, np.exp(scores), 0)
  weights /= weights.sum(axis=-1, keepdims=True)
  y = np.einsum("bhts,bshk->bthk", weights, value).reshape(x.shape)
  assert_close(call(mixer, x).y, mixer.output(jnp.asarray(y, x.dtype)), 1e-5)


def test_hashes_are_no_parameters_and_the_same_in_every_layer():
  mixer = mixer_of("reformer")
  assert set(nnx.to_pure_dict(nnx.state(mixer))) == {"query", "value", "output"}
  x = inputs()
  stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), mixer)
  _, y = jit(
    lambda stack, x: jax.lax.scan(
      lambda x, layer: (layer(x).y, layer(x).y), x, stack
    )
  )(stack, x)
  assert_close(y[1], call(mixer, call(mixer, x).y).y, 1e-5)


def test_states_of_other_layers_are_refused():
  mixer = mixer_of("longformer")
  others = (
    mixer.init_state(BATCH + 1),
    mixer_of("swa").init_state(BATCH),
    aa.Cache(aa.Entries(*[jnp.zeros((BATCH, 3, 4, 4))] * 2), jnp.zeros((2,))),
  )
  for other in others:
    with pytest.raises(UserError, match="does not belong to this layer"):
      mixer(inputs(), state=other)
