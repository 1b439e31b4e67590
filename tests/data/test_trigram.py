"""The trigram against its formula spelt out, and what it must not do."""

import collections
import lzma
import math

import numpy as np
import pytest

from atlas_jax.data import Trigram, trigram
from atlas_jax.errors import UserError


def probability(runs, strengths, context: bytes, byte: int) -> float:
  """The formula of the module's docstring, by dictionaries."""
  k = strengths[len(context)]
  follow = collections.Counter(
    run[i]
    for run in runs
    for i in range(len(context), len(run))
    if run[i - len(context) : i] == context
  )
  lower = (
    probability(runs, strengths, context[1:], byte) if context else 1 / 256
  )
  total = follow.total() + k * len(follow)
  return (follow[byte] + k * len(follow) * lower) / total if total else lower


def text(seed: int, length: int) -> bytes:
  """Bytes of a random walk, so that a context tells something."""
  steps = np.random.default_rng(seed).integers(-2, 3, length)
  return (np.cumsum(steps) % 23 + 97).astype(np.uint8).tobytes()


@pytest.mark.parametrize("count", [1, 3, 14])
def test_equals_the_formula(count):
  runs = [text(seed, 20 + 30 * seed) for seed in range(count)]
  scored = [text(99, 40) + b"\xff\x00new", b"", b"a", b"ab"]
  fitted = Trigram(runs)
  bits = []
  for run in scored:
    for i in range(1, len(run)):
      context = run[max(i - 2, 0) : i]
      chance = probability(runs, fitted.strengths, context, run[i])
      bits.append(-math.log2(chance))
  expected = sum(bits) / len(bits)
  assert fitted.bits_per_byte(scored) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("context", [b"", b"a", b"zz", b"qx"])
def test_formula_sums_to_one(context):
  runs = [b"abracadabra" * 3, b"zzz"]
  chances = [probability(runs, (1.0, 0.5, 2.0), context, b) for b in range(256)]
  assert sum(chances) == pytest.approx(1.0)


def test_blocks_change_nothing(monkeypatch):
  runs = [text(seed, 50 * seed) for seed in range(1, 13)]
  whole = Trigram(runs)
  expected = whole.bits_per_byte([text(50, 333)])
  monkeypatch.setattr(trigram, "_BLOCK", 7)
  cut = Trigram(runs)
  assert cut.strengths == whole.strengths
  assert cut.bits_per_byte([text(50, 333)]) == pytest.approx(expected)


def test_strengths_are_chosen_on_training_text_alone():
  runs = [text(seed, 300) for seed in range(20)]
  fitted = Trigram(runs)
  before = fitted.strengths
  fitted.bits_per_byte([b"\x00\xff" * 500])
  assert fitted.strengths == before
  assert fitted.bits_per_byte(runs) < math.log2(5)


def test_more_smoothing_for_text_that_repeats_less():
  noise = np.random.default_rng(0).integers(0, 256, 4000, np.uint8).tobytes()
  regular = b"abcdefgh" * 500
  assert Trigram([noise]).strengths[2] > Trigram([regular]).strengths[2]
  assert Trigram([regular]).bits_per_byte([regular]) < 0.05
  # Nothing can predict uniform noise; the baseline loses little by trying.
  other = np.random.default_rng(1).integers(0, 256, 4000, np.uint8).tobytes()
  assert 8.0 <= Trigram([noise]).bits_per_byte([other]) < 8.3


def test_real_text_is_near_what_is_known(data_root):
  path = next((data_root / "tinyshakespeare").glob("*.xz"))
  raw = lzma.decompress(path.read_bytes())
  cut = len(raw) * 9 // 10
  bits = Trigram([raw[:cut]]).bits_per_byte([raw[cut:]])
  assert 2.7 < bits < 3.1


@pytest.mark.parametrize("runs", [[], [b""]])
def test_nothing_to_fit(runs):
  with pytest.raises(UserError, match="no text to fit"):
    Trigram(runs)


@pytest.mark.parametrize("runs", [[], [b""], [b"a", b"b"]])
def test_nothing_to_score(runs):
  with pytest.raises(UserError, match="no text to score"):
    Trigram([b"abc"]).bits_per_byte(runs)
