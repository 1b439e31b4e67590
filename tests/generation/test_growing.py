"""Generation with a state that keeps every token and must be given room."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import models
from atlas_jax.generation import GREEDY, Generator
from atlas_jax.models import room
from tests.generation.helpers import CONFIG, LetterTokenizer, random_model

TOKENIZER = LetterTokenizer()
PROMPTS = ["The", "a prompt of three segments", "x0. y1"]
DRAWN = 20
# The longest text, and more than any of its segments and rooms.
LENGTH = 64


@pytest.fixture(scope="module")
def model() -> models.LanguageModel:
  """A transformer of letters."""
  config = dataclasses.replace(
    CONFIG, mixer="transformer", memory=models.MemoryOptions()
  )
  return random_model(TOKENIZER.vocab_size, config)


@pytest.fixture
def generator(model, monkeypatch) -> Generator:
  """Begins with room for 4 tokens; reads at most 8 at once."""
  monkeypatch.setattr(room, "FIRST_ROOM", 4)
  return Generator(model, TOKENIZER, buckets=(4, 8))


def test_greedy_over_several_rooms_is_greedy_without_a_state(model, generator):
  with warnings.catch_warnings():
    # Of buffers, say, that were to be used again and could not.
    warnings.simplefilter("error")
    texts = generator.generate(PROMPTS, sampling=GREEDY, max_tokens=DRAWN)
  forward = jax.jit(lambda tokens: jnp.argmax(model(tokens).logits, axis=-1))
  for prompt, text in zip(PROMPTS, texts, strict=True):
    ids = TOKENIZER.encode(prompt + text)
    assert len(ids) == len(prompt) + DRAWN
    assert len(set(text)) > 3
    # What comes after a token does not change what it says.
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(ids)] = ids
    likely = np.asarray(forward(jnp.asarray(tokens)))[0]
    begin = len(prompt) - 1
    np.testing.assert_array_equal(
      likely[begin : len(ids) - 1], ids[len(prompt) :]
    )


def test_a_text_that_is_read_in_two_parts_goes_on_the_same(generator):
  whole = generator.generate(PROMPTS[1:2], seed=4, max_tokens=DRAWN)
  first = generator.read([PROMPTS[1][:11]])
  second = generator.read([PROMPTS[1][11:]], first)
  assert generator.generate(second, seed=4, max_tokens=DRAWN) == whole
  # What was read first stays usable.
  again = generator.read([PROMPTS[1][11:]], first)
  assert generator.generate(again, seed=4, max_tokens=DRAWN) == whole


def test_a_stream_can_be_forked_and_go_on(generator):
  whole = generator.generate(PROMPTS[:1], seed=4, max_tokens=DRAWN)[0]
  stream = generator.stream(PROMPTS[:1], seed=4, max_tokens=DRAWN)
  begun = [next(stream).text for _ in range(7)]
  fork = stream.context()
  rest = [piece.text for piece in stream]
  assert "".join(begun + rest) == whole
  other = generator.generate(fork, seed=4, max_tokens=DRAWN - 7)[0]
  assert other == "".join(rest)
