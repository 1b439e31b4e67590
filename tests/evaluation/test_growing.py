"""Documents read with a state that keeps every token."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import models
from atlas_jax.evaluation import evaluate
from atlas_jax.models import room
from tests.evaluation.helpers import TEXTS, TOKENIZER, documents_of
from tests.generation.helpers import CONFIG, random_model

WINDOW = 8


@pytest.fixture(scope="module")
def model() -> models.LanguageModel:
  """A transformer of bytes."""
  config = dataclasses.replace(
    CONFIG, mixer="transformer", memory=models.MemoryOptions()
  )
  return random_model(TOKENIZER.vocab_size, config)


def test_documents_read_in_segments_are_documents_read_at_once(
  model, tmp_path, monkeypatch
):
  # The longest document then takes four rooms.
  monkeypatch.setattr(room, "FIRST_ROOM", 8)
  with warnings.catch_warnings():
    # Of buffers, say, that were to be used again and could not.
    warnings.simplefilter("error")
    result = evaluate(
      model, TOKENIZER, documents_of(tmp_path), window=WINDOW, batch=2
    )
  tokens = np.zeros((len(TEXTS), 65), np.int32)
  for row, text in enumerate(TEXTS.values()):
    ids = [*TOKENIZER.encode(text), TOKENIZER.end_of_text]
    tokens[row, : len(ids)] = ids

  @jax.jit
  def losses(tokens):
    hidden = model.hidden(tokens[:, :-1]).hidden
    return models.token_losses(model, hidden, tokens[:, 1:])

  # What comes after a token does not change its loss.
  expected = np.asarray(losses(jnp.asarray(tokens)))
  for row, found in enumerate(result.documents):
    mean = expected[row, : found.tokens].mean()
    assert found.loss == pytest.approx(mean, rel=1e-4)
  assert max(found.tokens for found in result.documents) > 4 * WINDOW
