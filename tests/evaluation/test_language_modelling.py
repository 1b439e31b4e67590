"""Losses of whole documents, read in parts, beside those of one call."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.errors import UserError
from atlas_jax.evaluation import evaluate
from tests.evaluation.helpers import (
  TEXTS,
  TOKENIZER,
  WINDOW,
  byte_model,
  documents_of,
)

LENGTH = 64


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
  return documents_of(tmp_path_factory.mktemp("documents"))


@jax.jit
def forward(tokens, mask, targets):
  logits = byte_model()(tokens, mask=mask).logits
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - picked


def direct(pieces):
  """Losses of pieces of token ids, all of one call with fresh memories."""
  shape = (12, LENGTH)
  tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  mask = np.zeros(shape, bool)
  for row, ids in enumerate(pieces):
    count = len(ids) - 1
    tokens[row, :count], targets[row, :count] = ids[:-1], ids[1:]
    mask[row, :count] = True
  losses = np.asarray(forward(*map(jnp.asarray, (tokens, mask, targets))))
  return [losses[row, : len(ids) - 1] for row, ids in enumerate(pieces)]


def ids_of(text):
  return [*TOKENIZER.encode(text), TOKENIZER.end_of_text]


@pytest.fixture(scope="module")
def result(documents):
  return evaluate(byte_model(), TOKENIZER, documents, window=WINDOW, batch=2)


def test_documents_read_in_parts_are_documents_read_at_once(result):
  expected = direct([ids_of(text) for text in TEXTS.values()])
  for found, (name, text), nats in zip(
    result.documents, TEXTS.items(), expected, strict=True
  ):
    size = len(text.encode()) - 1  # The first byte is not predicted.
    assert (found.id, found.tokens, found.bytes) == (name, size + 1, size)
    assert found.loss == pytest.approx(nats.mean(), rel=1e-4)
    if size:
      bits = nats.sum() / size / math.log(2)
      assert found.bits_per_byte == pytest.approx(bits, rel=1e-4)
    else:
      assert found.bits_per_byte is None
  together = np.concatenate(expected)
  assert result.tokens == len(together)
  assert result.loss == pytest.approx(together.mean(), rel=1e-4)
  assert result.perplexity == pytest.approx(math.exp(together.mean()), rel=1e-3)
  size = sum(len(text.encode()) - 1 for text in TEXTS.values())
  assert result.bytes == size
  bits = together.sum() / size / math.log(2)
  assert result.bits_per_byte == pytest.approx(bits, rel=1e-4)


def test_positions_are_those_of_one_call(result):
  nats = direct([ids_of(text) for text in TEXTS.values()])
  for buckets, chosen in (
    (result.positions, nats),
    (result.long_positions, [x for x in nats if len(x) >= WINDOW]),
  ):
    for bucket in buckets:
      inside = np.concatenate(
        [x[bucket.first - 1 : bucket.last] for x in chosen]
      )
      assert bucket.tokens == len(inside)
      assert bucket.loss == pytest.approx(inside.mean(), rel=1e-4)
  assert result.long == WINDOW
  assert len(result.long_positions) == len(result.positions) == 7


def test_a_limited_context_reads_pieces_with_fresh_memories(documents, result):
  found = evaluate(
    byte_model(), TOKENIZER, documents, window=WINDOW, context=16, batch=2
  )
  pieces, owner = [], []
  for number, text in enumerate(TEXTS.values()):
    ids = ids_of(text)
    for start in range(0, len(ids) - 1, 16):
      pieces.append(ids[start : start + 17])
      owner.append(number)
  losses = direct(pieces)
  for number, document in enumerate(found.documents):
    mine = [x for x, o in zip(losses, owner, strict=True) if o == number]
    assert document.loss == pytest.approx(np.concatenate(mine).mean(), rel=1e-4)
  assert found.positions[-1].first == 16
  assert found.loss != pytest.approx(result.loss, rel=1e-4)


def test_the_batch_and_the_repetition_change_nothing(documents, result):
  again = evaluate(byte_model(), TOKENIZER, documents, window=WINDOW, batch=2)
  assert again == result
  wide = evaluate(byte_model(), TOKENIZER, documents, window=WINDOW, batch=99)
  for one, other in zip(wide.documents, result.documents, strict=True):
    assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_a_limit_reads_the_same_beginning(documents, result):
  told = []
  found = evaluate(
    byte_model(),
    TOKENIZER,
    documents,
    window=WINDOW,
    batch=2,
    tokens=60,
    progress=lambda done, total: told.append((done, total)),
  )
  assert found.tokens == 60
  assert told[-1] == (60, 60)
  assert sorted(told) == told
  whole = {document.id: document for document in result.documents}
  same = [x for x in found.documents if x.tokens == whole[x.id].tokens]
  assert len(same) == len(found.documents) - 1
  for document in same:
    assert document.loss == pytest.approx(whole[document.id].loss, rel=1e-4)


def test_what_cannot_be_measured_is_told(documents):
  with pytest.raises(UserError, match="batch is 0"):
    evaluate(byte_model(), TOKENIZER, documents, window=WINDOW, batch=0)
  with pytest.raises(UserError, match="context is -1"):
    evaluate(byte_model(), TOKENIZER, documents, window=WINDOW, context=-1)
  graph, params = nnx.split(byte_model())
  broken = nnx.merge(
    graph, jax.tree.map(lambda x: x * jnp.float32(np.nan), params)
  )
  with pytest.raises(UserError, match="not a finite number"):
    evaluate(broken, TOKENIZER, documents, window=WINDOW, batch=2)


def test_a_result_is_plain_values(result):
  values = dataclasses.asdict(result)
  for document in values["documents"]:
    assert type(document["loss"]) is float
    assert type(document["tokens"]) is int
