"""The loss against its definition, whole and in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import models
from tests.layers.helpers import assert_close, jit
from tests.models.helpers import VOCAB, batch_of, model_of, tokens


def test_loss_is_the_weighted_mean_of_cross_entropies():
  model, batch = model_of(), batch_of(tokens())
  loss, metrics = jit(models.loss)(model, batch)
  out = jit(lambda model, ids: model(ids))(model, batch["tokens"])
  logits = np.asarray(out.logits, np.float64)
  log_norm = np.log(np.sum(np.exp(logits), axis=-1))
  chosen = np.take_along_axis(
    logits, np.asarray(batch["targets"])[..., None], axis=-1
  )[..., 0]
  expected = np.average(log_norm - chosen, weights=batch["weights"])
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert "inner_loss" in metrics


@pytest.mark.parametrize("at_once", [1, 2 * VOCAB * 5, 2 * VOCAB * 18])
def test_parts_give_the_same_losses_and_gradients(at_once):
  model, batch = model_of(), batch_of(tokens())
  hidden = jax.random.normal(jax.random.key(3), (2, 19, 16))

  def total(model, hidden, **options):
    losses = models.token_losses(model, hidden, batch["targets"], **options)
    return jnp.sum(jnp.sin(losses)), losses

  grad = jax.grad(total, argnums=(0, 1), has_aux=True)
  (by_model, by_hidden), whole = jit(grad)(model, hidden)
  (parts_model, parts_hidden), parts = jit(
    lambda model, hidden: grad(model, hidden, at_once=at_once)
  )(model, hidden)
  assert parts.shape == (2, 19)
  assert_close(parts, whole, 1e-6)
  assert_close(parts_hidden, by_hidden, 1e-5)
  assert_close(
    nnx.to_pure_dict(nnx.state(parts_model)),
    nnx.to_pure_dict(nnx.state(by_model)),
    1e-5,
  )


def test_all_logits_at_once_never_exist_in_parts():
  model = model_of()
  hidden = jnp.zeros((2, 64, 16))
  targets = jnp.zeros((2, 64), jnp.int32)
  text = (
    jax.jit(
      jax.grad(
        lambda hidden: jnp.sum(
          models.token_losses(model, hidden, targets, at_once=2 * 8 * VOCAB)
        )
      )
    )
    .lower(hidden)
    .as_text()
  )
  assert f"2x8x{VOCAB}x" in text
  assert f"2x64x{VOCAB}x" not in text
  assert f"8x2x8x{VOCAB}x" not in text


def test_garbage_targets_at_padding_do_no_harm():
  model = model_of()
  segments = jnp.array([[1] * 8 + [0] * 4] * 2)
  batch = batch_of(tokens(length=12), segments)
  bad = dict(batch, targets=jnp.where(segments > 0, batch["targets"], -100))
  loss = jit(models.loss)
  assert loss(model, bad)[0] == loss(model, batch)[0]
  nothing = dict(batch, weights=jnp.zeros((2, 12)))
  assert loss(model, nothing)[0] == 0.0
