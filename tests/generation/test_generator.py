"""Generation: what is written, what it depends on, what it costs."""

import collections
import contextlib
import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.data.tokenizers import ByteTokenizer
from atlas_jax.errors import UserError
from atlas_jax.generation import GREEDY, Context, Generator, Sampling
from atlas_jax.generation.generator import _Row
from tests.generation.helpers import LetterTokenizer, generator, letter_model

PROMPTS = ["The", "a prompt of more than two segments", "x0. y1"]
TOKENIZER = LetterTokenizer()


@contextlib.contextmanager
def compilations():
  """Counts what is compiled inside the block."""
  counts = collections.Counter()

  def listen(event: str, _: float, **__: object) -> None:
    counts["all"] += event == "/jax/core/compile/backend_compile_duration"

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield counts
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


@jax.jit
def forward(tokens, mask):
  return letter_model()(tokens, mask=mask).logits


def most_likely(texts):
  """For each place of each text the most likely next letter, uncached."""
  ids = [TOKENIZER.encode(text) for text in texts]
  tokens = np.zeros((len(ids), 128), np.int32)
  mask = np.zeros((len(ids), 128), bool)
  for row, text in enumerate(ids):
    tokens[row, : len(text)] = text
    mask[row, : len(text)] = True
  return np.argmax(forward(jnp.asarray(tokens), jnp.asarray(mask)), axis=-1)


@pytest.fixture(scope="module")
def greedy():
  """Greedy continuations of the prompts, of 60 tokens: 15 chunks."""
  return generator().generate(PROMPTS, sampling=GREEDY, max_tokens=60)


def test_greedy_with_a_state_is_greedy_without(greedy):
  likely = most_likely([p + t for p, t in zip(PROMPTS, greedy, strict=True)])
  for row, (prompt, text) in enumerate(zip(PROMPTS, greedy, strict=True)):
    ids = TOKENIZER.encode(text)
    assert len(ids) == 60
    assert len(set(ids)) > 5
    begin = len(prompt) - 1
    np.testing.assert_array_equal(likely[row, begin : begin + 60], ids)


def test_a_row_does_not_depend_on_its_batch(greedy):
  for row in (1, 2):
    (text,) = generator().generate(
      [PROMPTS[row]], sampling=GREEDY, max_tokens=20
    )
    assert text == greedy[row][:20]


def test_a_sampled_row_is_its_seed_and_prompt():
  texts = generator().generate(PROMPTS, seed=[5, 6, 7], max_tokens=20)
  turned = generator().generate(PROMPTS[::-1], seed=[7, 6, 5], max_tokens=20)
  assert texts == turned[::-1]
  assert generator().generate(PROMPTS, seed=5, max_tokens=20) == texts
  same = generator().generate(["The"] * 3, seed=[5, 5, 8], max_tokens=20)
  assert same[0] == same[1] == texts[0]
  assert same[2] != same[0]


def test_neither_steps_nor_settings_nor_calls_compile_anything(greedy):
  with compilations() as counts:
    generator().generate(PROMPTS, sampling=GREEDY, max_tokens=55)
    # Other lengths of the same buckets, and other settings.
    generator().generate(
      ["a", "bcd", "A prompt of another length"],
      sampling=Sampling(0.7, top_k=5, top_p=0.9),
      seed=[1, 2, 3],
      max_tokens=7,
      stop=["e"],
    )
  assert counts["all"] == 0


def test_prompts_are_read_in_a_few_shapes():
  mine = Generator(letter_model(), TOKENIZER, buckets=(2, 4))
  shapes = []

  def read(params, context, tokens, lengths):
    shapes.append((tokens.shape, lengths.tolist()))
    return context

  mine._program = dataclasses.replace(
    mine._program, read=read, prepare=lambda params, context: context
  )
  for length in (1, 2, 3, 4):
    mine.read(["a" * length])
  assert [shape for shape, _ in shapes] == [(1, 2), (1, 2), (1, 4), (1, 4)]
  shapes.clear()
  mine.read(["a" * 10, "a", "a" * 5])
  assert shapes == [
    ((3, 4), [4, 1, 4]),
    ((3, 4), [4, 0, 1]),
    ((3, 2), [2, 0, 0]),
  ]


def test_the_state_never_grows(greedy):
  stream = generator().stream(PROMPTS, sampling=GREEDY, max_tokens=50)
  sizes, arrays = [], []
  for _ in stream:
    sizes.append(stream._context.nbytes)
    arrays.append(len(jax.live_arrays()))
  assert len(set(sizes)) == 1
  assert len(set(arrays[5:-3])) == 1
  short = generator().read(["a", "b", "c"])
  assert short.nbytes == sizes[0]


def test_a_step_consumes_its_context():
  stream = generator().stream(PROMPTS, max_tokens=3)
  # Nothing is to be gained from an array without numbers.
  before = [x for x in jax.tree.leaves(stream._context.state) if x.size]
  next(stream)
  assert all(leaf.is_deleted() for leaf in before)


def test_a_context_is_a_value_that_can_be_forked(greedy):
  read = generator().read(PROMPTS)
  whole = generator().generate(read, seed=3, max_tokens=30)
  assert generator().generate(read, seed=3, max_tokens=30) == whole
  assert whole != generator().generate(read, seed=9, max_tokens=30)
  stream = generator().stream(read, seed=3, max_tokens=11)
  texts = ["", "", ""]
  for piece in stream:
    texts[piece.row] += piece.text
  # To the host and back, as a file would keep it.
  kept = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), stream.context())
  for _ in range(2):
    rest = generator().generate(kept, seed=3, max_tokens=19)
    assert [a + b for a, b in zip(texts, rest, strict=True)] == whole


def test_a_stream_goes_on_unaffected_by_its_forks():
  whole = generator().generate(PROMPTS, seed=3, max_tokens=9)
  stream = generator().stream(PROMPTS, seed=3, max_tokens=9)
  texts = ["", "", ""]
  for number, piece in enumerate(stream):
    texts[piece.row] += piece.text
    if number % 4 == 0:
      generator().generate(stream.context(), seed=1, max_tokens=2)
  assert texts == whole


def test_reading_in_parts_is_reading_at_once():
  parts = generator().read(["ab", "a", "abcdefghijk"])
  parts = generator().read(["cde", "", "lmn"], after=parts)
  assert isinstance(parts, Context)
  whole = generator().read(["abcde", "a", "abcdefghijklmn"])
  np.testing.assert_allclose(parts.logits, whole.logits, atol=1e-4)
  texts = [
    generator().generate(context, sampling=GREEDY, max_tokens=12)
    for context in (parts, whole)
  ]
  assert texts[0] == texts[1]


def test_a_stop_string_ends_a_row_and_only_that(greedy):
  stop = greedy[0][20:23]
  texts = generator().generate(
    PROMPTS, sampling=GREEDY, max_tokens=60, stop=[stop]
  )
  assert texts[0] == greedy[0][: greedy[0].index(stop)]
  for text, whole in zip(texts, greedy, strict=True):
    assert text == whole.split(stop)[0]
  assert max(map(len, texts)) == 60


def test_pieces_tell_why_a_row_ended(greedy):
  stop = greedy[1][4:6]
  pieces = list(
    generator().stream(PROMPTS, sampling=GREEDY, max_tokens=10, stop=[stop])
  )
  ends = {piece.row: piece.end for piece in pieces if piece.end}
  assert ends[1] == "stop"
  assert "max_tokens" in ends.values()
  for row in range(3):
    mine = [piece for piece in pieces if piece.row == row]
    assert [piece.end is None for piece in mine] == (
      [True] * (len(mine) - 1) + [False]
    )


def test_the_end_of_text_ends_a_row_and_is_not_read(greedy):
  tokenizer = LetterTokenizer()
  tokenizer.end_of_text = TOKENIZER.encode(greedy[0])[9]
  mine = Generator(letter_model(), tokenizer, buckets=(4, 8))
  before = greedy[0][: greedy[0].index(greedy[0][9])]
  stream = mine.stream(PROMPTS, sampling=GREEDY, max_tokens=60)
  pieces = [piece for piece in stream if piece.row == 0]
  assert "".join(piece.text for piece in pieces) == before
  assert pieces[-1].end == "end_of_text"
  # The row stands where its text ends, though others went on.
  again = generator().read([PROMPTS[0] + before, "a", "b"])
  np.testing.assert_allclose(
    stream.context().logits[0], again.logits[0], atol=1e-4
  )


def test_characters_come_out_whole():
  row = _Row(ByteTokenizer(), 5, [])
  out = [row.push(byte) for byte in "né".encode() + b"\xe2\x82"]
  assert out == [
    ("n", None),
    ("", None),
    ("é", None),
    ("", None),
    ("\N{REPLACEMENT CHARACTER}", "max_tokens"),
  ]


def test_a_model_that_is_not_finite_is_told():
  graph, params = nnx.split(letter_model())
  params = jax.tree.map(lambda x: x * jnp.float32(np.nan), params)
  broken = Generator(nnx.merge(graph, params), TOKENIZER, buckets=(4, 8))
  with pytest.raises(UserError, match="not finite"):
    broken.generate(PROMPTS, sampling=GREEDY, max_tokens=5)


def test_random_weights_are_told(caplog):
  with caplog.at_level(logging.WARNING, logger="absl"):
    Generator(letter_model(), TOKENIZER)
    assert not caplog.records
    Generator(letter_model(), TOKENIZER, trained=False)
  assert "weights of this model are random" in caplog.text


def test_what_does_not_fit_is_refused():
  with pytest.raises(UserError, match="the tokenizer has 257 tokens"):
    Generator(letter_model(), ByteTokenizer())
  for buckets in ((), (0, 4), (4, 4), (8, 4)):
    with pytest.raises(UserError, match="buckets"):
      Generator(letter_model(), TOKENIZER, buckets=buckets)
  with pytest.raises(UserError, match="max_tokens is -1"):
    generator().stream(PROMPTS, max_tokens=-1)
  with pytest.raises(UserError, match="2 prompts for 3 rows"):
    generator().read(["a", "b"], after=generator().read(PROMPTS))
  with pytest.raises(UserError, match="prompt 1 is empty"):
    generator().generate(["a", "", "b"])
