"""The suite that compares bounds: cases, recall, training, report."""

import json

import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.benchmark import (
  bounds,
  bounds_report,
  hostile,
  outer,
  recall,
  remedies,
)

CASES = 20


def memory_of(remedy: str, **changes) -> am.Memory:
  small = {"window": 4, "chunk": 8} | changes
  return remedies.memory_of(remedy, **small)


@pytest.mark.parametrize("remedy", remedies.REMEDIES)
def test_remedies_differ_from_the_default(remedy):
  memory = memory_of(remedy)
  default = memory_of(remedies.DEFAULT)
  assert (memory == default) == (remedy == remedies.DEFAULT)
  assert memory.window == default.window


def test_hostile_cases_do_not_break_the_default():
  found = hostile.outcomes(memory_of(remedies.DEFAULT), 48, width=4)
  assert found.finite.shape == (CASES,) == (len(hostile.names()),)
  assert found.finite.all()
  assert found.slopes_finite.all()
  assert np.isfinite(found.largest).all()


def test_hostile_cases_break_what_has_no_bound():
  found = hostile.outcomes(memory_of("none"), 96, width=4)
  assert not found.finite.all()
  # A case that breaks leaves the others alone.
  assert found.finite.any()
  np.testing.assert_array_equal(np.isinf(found.largest), ~found.finite)


def test_gates_reach_their_extremes():
  *_, gates = hostile.cases(window=3, length=32, width=4)
  decay, rate = np.exp(gates.log_decay), np.asarray(gates.rate)
  assert decay.max() > 1 - 1e-6
  assert decay.min() < 1e-6
  assert rate.max() > 1 - 1e-6
  assert rate.min() < 1e-6
  assert gates.window.shape == (1, 32, CASES, 3)


def linear() -> am.Memory:
  """A matrix memory, whose delta rule can be followed by hand."""
  return am.Memory(
    features=am.Identity(),
    network=am.Matrix(),
    optimizer=am.Momentum(),
    window=1,
    chunk=4,
    bound=None,
  )


def test_one_fact_in_a_matrix_is_the_delta_rule():
  # With a key of length 1 a write takes the error to (1 - 2 rate) of itself.
  found = recall.one_fact(linear(), width=8, seeds=2)
  rates = np.asarray(recall.RATES)
  start = found[0] / (1 - 2 * rates[0]) ** 2
  np.testing.assert_allclose(found, start * (1 - 2 * rates) ** 2, rtol=1e-3)


def test_stream_forgets_when_it_holds_more_than_it_can():
  few = recall.stream(linear(), pairs=2, times=6, width=8, seeds=2)
  many = recall.stream(linear(), pairs=12, times=1, width=8, seeds=2)
  assert few.min() < 0.5 * many.min()


def test_training_tells_where_it_breaks():
  sizes = {"steps": 6, "length": 16, "batch": 1, "dim": 8, "heads": 2}
  calm, wild = outer.train(linear(), (1e-3, float("inf")), **sizes)
  assert calm.first_bad is None
  assert 3.0 < calm.loss < 8.0
  assert wild.first_bad == 1
  assert not np.isfinite(wild.loss)


@pytest.fixture(scope="module")
def result():
  """A run with a cheap memory in place of the compared ones."""
  memories = {"linear": linear()}
  small = bounds.Options(
    depths=(2,),
    length=256,
    width=4,
    fact_width=8,
    pairs=8,
    times=1,
    seeds=2,
    steps=0,
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(remedies, "REMEDIES", memories)
    patch.setattr(remedies, "memory_of", lambda name, **_: memories[name])
    return json.loads(json.dumps(bounds.run(small), allow_nan=False))


def test_result_is_complete(result):
  (remedy,) = result["remedies"]
  assert remedy["name"] == "linear"
  assert len(remedy["one_fact"]) == len(recall.RATES) == len(result["rates"])
  assert len(remedy["stream"]) == len(recall.RATES)
  assert remedy["training"] == []
  (depth,) = remedy["depths"]
  assert depth["depth"] == 2
  # It has no bound.
  assert depth["bad"] > 0
  assert depth["largest"].count(None) == depth["bad"]


def tables(text: str) -> list[str]:
  return [block for block in text.split("\n\n") if block.startswith("|")]


def test_report(result):
  text = bounds_report.markdown(result, "the command")
  assert "the command" in text
  bad = result["remedies"][0]["depths"][0]["bad"]
  assert f"| linear | {bad} / {CASES}," in text
  assert len(tables(text)) == 2


def test_report_says_what_is_not_finite(result):
  broken = json.loads(json.dumps(result))
  broken["options"]["steps"] = 10
  run = {"learning_rate": 0.1, "loss": 2.0, "first_bad": None, "largest": 3.0}
  bad = {"learning_rate": 0.4, "loss": None, "first_bad": 3, "largest": None}
  broken["remedies"][0] |= {"training": [run, bad]}
  broken["remedies"][0]["stream"][0] = None
  text = bounds_report.markdown(broken, "c")
  assert "| linear | 2.000 (3.000) | not finite at step 4 |" in text
  assert "| stream: linear | not finite |" in text
  assert len(tables(text)) == 3
  for table in tables(text):
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_training_text_is_bytes():
  windows = outer._windows(17)
  assert windows.shape[1] == 17
  assert windows.dtype == np.int32
  assert 0 <= windows.min() < windows.max() < 256
