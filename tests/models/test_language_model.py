"""The contract of the whole model: splits, steps, padding, documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import config as configs
from atlas_jax import memory as am
from atlas_jax import models
from atlas_jax.errors import UserError
from tests.layers.helpers import assert_close, finite, jit
from tests.models.helpers import (
  TINY,
  TINY_TITANS,
  VOCAB,
  batch_of,
  model_of,
  tokens,
)

LIMIT = 1e-4


# One function for all calls, so that equal shapes compile once.
@jit
def call(model, ids, state=None, mask=None):
  return model(ids, state=state, mask=mask)


@jit
def step(model, ids, state, valid):
  return model.step(ids, state, valid=valid)


@jit
def prepare(model, state):
  return model.prepare(state)


@functools.partial(jit, static_argnames=("max_segments", "aligned"))
def slopes(model, ids, **arguments):
  """Gradients by parameter, and the outputs."""

  def total(model):
    out = model(ids, **arguments)
    return jnp.sum(jnp.sin(out.logits)), out

  return jax.grad(total, has_aux=True)(model)


gradients = jit(jax.grad(models.loss, has_aux=True))


def canonical(state):
  """A state without what `prepare` derives from the rest."""
  memory = am.without_cache(state.blocks.memory)
  return state._replace(blocks=state.blocks._replace(memory=memory))


def row_of(state, row):
  """One row of a model's state."""
  return jax.tree.map(lambda leaf: leaf[:, row], state)


def parameters(model):
  return nnx.to_pure_dict(nnx.state(model))


def test_any_split_and_any_number_of_steps_is_one_call():
  model, ids = model_of(), tokens()
  whole = call(model, ids)
  assert whole.logits.shape == (2, 19, VOCAB)
  assert whole.logits.dtype == jnp.float32
  parts, state = [], model.init_state(2)
  for start in (0, 7):
    out = call(model, ids[:, start : start + 7], state)
    parts.append(out.logits)
    state = out.state
  state = prepare(model, state)
  everyone = jnp.array([True, True])
  for t in range(14, 19):
    logits, after = step(model, ids[:, t], state, everyone)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    parts.append(logits[:, None])
    state = after
  assert_close(jnp.concatenate(parts, axis=1), whole.logits, LIMIT)
  assert_close(canonical(state), canonical(whole.state), LIMIT)


def test_rows_without_a_token_stay_as_they_are():
  model, ids = model_of(), tokens()
  state = prepare(model, call(model, ids[:, :7], model.init_state(2)).state)
  _, after = step(model, ids[:, 7], state, jnp.array([False, True]))
  for old, new in zip(
    jax.tree.leaves(row_of(state, 0)),
    jax.tree.leaves(row_of(after, 0)),
    strict=True,
  ):
    assert jnp.array_equal(old, new)
  _, both = step(model, ids[:, 7], state, jnp.array([True, True]))
  assert_close(row_of(after, 1), row_of(both, 1), 1e-6)


def test_padding_is_invisible_whatever_it_holds():
  model, ids = model_of(), tokens(length=7)
  random = np.random.default_rng(0)
  places = (
    np.arange(12, 19),
    np.arange(7),
    np.sort(random.permutation(19)[:7]),
    np.sort(random.permutation(19)[:7]),
  )
  garbage = np.array([[-7], [10**6], [-1], [VOCAB]]) + np.zeros((4, 19), int)
  mask = np.zeros((4, 19), bool)
  for row, valid in enumerate(places):
    mask[row, valid] = True
    garbage[row, valid] = ids[row % 2]
  out = call(model, jnp.asarray(garbage, jnp.int32), mask=jnp.asarray(mask))
  alone = call(model, ids, model.init_state(2))
  assert jnp.all(out.logits[~mask] == 0)
  for row in range(4):
    assert_close(out.logits[row][mask[row]], alone.logits[row % 2], LIMIT)
    assert_close(row_of(out.state, row), row_of(alone.state, row % 2), LIMIT)


@pytest.mark.parametrize("aligned", [True, False])
def test_packed_documents_are_separate_texts(aligned):
  model, lengths = model_of(), (6, 9, 4)
  if aligned:
    segments = np.repeat([1, 0, 2, 0, 3], [6, 2, 9, 3, 4])
  else:
    segments = np.repeat([1, 2, 3, 0], [*lengths, 5])
  ids = tokens(batch=1, length=24)
  ids = jnp.where(segments > 0, ids, -1)
  grads, out = slopes(
    model,
    ids,
    segment_ids=jnp.asarray(segments)[None],
    max_segments=3,
    aligned=aligned,
  )
  assert (out.state is None) == aligned
  # The same documents, one a row, padded to equal length.
  mask = np.arange(9)[None] < np.array(lengths)[:, None]
  rows = np.zeros((3, 9), np.int32)
  for i, length in enumerate(lengths):
    rows[i, :length] = ids[0, segments == i + 1]
  expected, alone = slopes(model, jnp.asarray(rows), mask=jnp.asarray(mask))
  for i in range(3):
    here = out.logits[0, segments == i + 1]
    assert_close(here, alone.logits[i][mask[i]], LIMIT)
  assert jnp.all(out.logits[0, segments == 0] == 0)
  assert finite(grads)
  assert_close(parameters(grads), parameters(expected), 10 * LIMIT)
  if not aligned:
    # The state is that of the last document.
    assert_close(row_of(out.state, 0), row_of(alone.state, 2), LIMIT)


def test_nothing_looks_ahead_and_rows_are_independent_to_the_bit():
  model, ids = model_of(), tokens()
  logits = call(model, ids).logits
  for t in (1, 7, 8):
    changed = ids.at[1, t].set((ids[1, t] + 1) % VOCAB)
    other = call(model, changed).logits
    assert jnp.array_equal(other[0], logits[0])
    assert jnp.array_equal(other[1, :t], logits[1, :t])
    assert jnp.all(jnp.any(other[1, t:] != logits[1, t:], axis=-1))


def test_every_parameter_gets_a_gradient():
  grads, metrics = gradients(model_of(), batch_of(tokens()))
  grads = parameters(grads)
  # Rows beyond the vocabulary only make the shape round.
  grads["embedding"] = grads["embedding"][:VOCAB]
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert jnp.all(jnp.isfinite(leaf)), path
    for layer in leaf if "blocks" in str(path[0]) else leaf[None]:
      assert jnp.any(layer != 0), path
  assert finite(metrics)
  # Also where documents are packed and no state is returned.
  assert set(metrics) == {
    *("inner_loss", "memory_norm"),
    *("gate_decay", "gate_momentum", "gate_rate", "gate_window"),
  }
  assert metrics["memory_norm"] > 0


def test_direct_and_split_use_give_the_same_bits():
  model, ids = model_of(), tokens()
  graph, params = nnx.split(model)
  split = jit(lambda params, ids: nnx.merge(graph, params)(ids))
  expected = jax.tree.leaves(call(model, ids))
  for leaves in (params, nnx.to_pure_dict(params)):
    got = jax.tree.leaves(split(leaves, ids))
    for a, b in zip(got, expected, strict=True):
      assert jnp.array_equal(a, b)


def test_an_output_matrix_of_its_own():
  untied = models.build(configs.replace(TINY, {"tie_embeddings": False}), VOCAB)
  hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16)))
  hidden = hidden.astype(jnp.float32)
  np.testing.assert_allclose(
    untied.logits(hidden),
    hidden @ untied.head.kernel[...][:, :VOCAB],
    rtol=1e-5,
    atol=1e-6,
  )
  tied = model_of()
  np.testing.assert_allclose(
    tied.logits(hidden),
    hidden @ tied.embedding[...][:VOCAB].T,
    rtol=1e-5,
    atol=1e-6,
  )


def test_same_seed_same_weights_and_layers_of_their_own():
  first, again = models.build(TINY, VOCAB, 3), models.build(TINY, VOCAB, 3)
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
    assert jnp.array_equal(a, b)
  other = models.build(TINY, VOCAB, 4)
  assert not jnp.array_equal(first.embedding[...], other.embedding[...])
  query = first.blocks.mixer.query.kernel[...]
  assert not jnp.array_equal(query[0], query[1])


@pytest.mark.parametrize("remat", [True, False])
def test_blocks_are_recomputed_if_asked(remat):
  config = configs.replace(TINY_TITANS, {"remat": remat})
  model = models.abstract(config, VOCAB)
  jaxpr = jax.make_jaxpr(lambda model, ids: model(ids).logits)(model, tokens())
  scans = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  blocks = max(scans, key=lambda scan: len(scan.params["jaxpr"].eqns))
  names = [e.primitive.name for e in blocks.params["jaxpr"].eqns]
  assert (("remat2" in names) or ("checkpoint" in names)) == remat


def test_bfloat16_stays_near_float32():
  # Stated tolerance: 5 % of the root mean square of logits, on average.
  config = configs.replace(TINY, {"dtype": "bfloat16"})
  exact = call(model_of(), tokens()).logits
  out = call(model_of(config), tokens())
  assert out.logits.dtype == jnp.float32
  error = jnp.sqrt(jnp.mean((out.logits - exact) ** 2))
  assert 0 < error < 0.05 * jnp.sqrt(jnp.mean(exact**2))
  weights = jax.tree.leaves(out.state.blocks.memory.weights)
  assert {leaf.dtype for leaf in weights} == {jnp.dtype("float32")}


def test_bfloat16_parameters_have_bfloat16_gradients():
  config = configs.replace(
    TINY, {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  )
  model = models.abstract(config, VOCAB)
  grads, _ = jax.eval_shape(gradients, model, batch_of(tokens()))
  for tree in (model, grads):
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {
      jnp.dtype("bfloat16")
    }


def test_128_thin_layers_train_a_step():
  config = configs.replace(
    TINY_TITANS,
    {"layers": 128, "dim": 8, "mlp_hidden": 8, "memory.expansion": 1.0},
  )
  model = models.build(config, VOCAB)
  batch = batch_of(tokens(length=8))
  value = jit(jax.value_and_grad(models.loss, has_aux=True))
  (before, _), grads = value(model, batch)
  assert finite(grads)
  stepped = jax.tree.map(lambda w, g: w - 0.02 * g, model, grads)
  (after, _), _ = value(stepped, batch)
  assert after < before


def test_before_training_all_tokens_are_about_as_likely():
  logits = call(models.build(TINY, VOCAB), tokens()).logits
  assert 0.3 < float(jnp.mean(jnp.std(logits, axis=-1))) < 3.0


def test_metrics_are_means_over_layers():
  out = call(model_of(), tokens())
  assert set(out.metrics) == set(out.by_layer)
  for name, value in out.metrics.items():
    assert value.shape == ()
    assert out.by_layer[name].shape == (2,)
    np.testing.assert_allclose(value, np.mean(out.by_layer[name]), rtol=1e-6)


def test_reset_makes_rows_fresh():
  model, ids = model_of(), tokens(length=7)
  fresh = model.init_state(2)
  state = call(model, ids, fresh).state
  again = call(model, ids, model.reset(state, jnp.array([True, False]))).logits
  assert jnp.array_equal(again[0], call(model, ids, fresh).logits[0])
  assert jnp.array_equal(again[1], call(model, ids, state).logits[1])


def test_the_state_does_not_grow():
  model = model_of()
  shapes = lambda length: jax.tree.map(
    jnp.shape, jax.eval_shape(call, model, tokens(length=length)).state
  )
  assert shapes(5) == shapes(33) == jax.tree.map(jnp.shape, model.init_state(2))


def test_a_vocabulary_is_needed():
  with pytest.raises(UserError, match="vocabulary of 0"):
    models.build(TINY, 0)


def test_abstract_has_shapes_and_types_only():
  abstract = jax.tree.leaves(models.abstract(TINY, VOCAB))
  real = jax.tree.leaves(models.build(TINY, VOCAB))
  for a, b in zip(abstract, real, strict=True):
    assert isinstance(a, jax.ShapeDtypeStruct)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
