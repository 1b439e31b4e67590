"""The suite `mixers`: what it measures, predicts, reports and draws."""

import json

import pytest

from atlas_jax.benchmark import mixers, mixers_report
from atlas_jax.errors import UserError

OPTIONS = mixers.Options(
  names=("swa", "hyena", "gru"),
  lengths=(16, 32, 64),
  repeats=1,
  turn_seconds=0.0,
  compare_at=32,
  dim=16,
  heads=2,
  window=8,
  decode_tokens=2,
)


@pytest.fixture(scope="module")
def result():
  return mixers.run(OPTIONS)


def test_everything_is_measured_and_fits_into_json(result):
  assert json.loads(json.dumps(result))["options"]["dim"] == 16
  assert [found["name"] for found in result["mixers"]] == list(OPTIONS.names)
  for found in result["mixers"]:
    assert len(found["cases"]) == 6
    for case in (*found["cases"], *found["definition"]):
      assert case["fits"]
      assert case["seconds"] > 0
      assert case["peak_bytes"] > 0
    assert found["decode"]["seconds"] > 0
  swa, hyena, _ = result["mixers"]
  # Keys and values of 8 tokens, and a count.
  assert swa["state_bytes"]["64"] == swa["state_bytes"]["16"]
  assert swa["state_bytes"]["64"] == 2 * 8 * 16 * 4 + 4
  assert (swa["grows"], hyena["grows"]) == (False, True)
  assert hyena["state_bytes"]["64"] > 64 * 16 * 4


def test_what_does_not_fit_is_predicted_and_said(result):
  small = mixers.Options(
    **{**vars(OPTIONS), "names": ("transformer",), "limit_seconds": 0.0}
  )
  found = mixers.measure_mixer(small, "transformer")
  last = found["cases"][2]
  assert not last["fits"]
  assert last["seconds"] > 0
  assert last["peak_bytes"] > found["cases"][1]["peak_bytes"]
  told = dict(result, mixers=[found])
  assert f"({last['peak_bytes'] / 2**20:,.0f})" in mixers_report.markdown(
    told, "command"
  )


def test_a_definition_that_does_not_fit_is_said_to(result):
  small = mixers.Options(
    **{**vars(OPTIONS), "names": ("transformer",), "limit_bytes": 1}
  )
  found = mixers.measure_mixer(small, "transformer")
  assert found["definition"][0]["seconds"] is None
  told = mixers_report.markdown(dict(result, mixers=[found]), "command")
  assert "needs 0 GiB" in told
  assert "(does not fit)" in told


def test_growth_is_that_between_the_two_lengths_before():
  case = lambda length, peak, seconds: {
    "length": length,
    "peak_bytes": peak,
    "seconds": seconds,
  }
  assert mixers.predict([case(10, 1, 1.0)], 20) == (None, None)
  before = [case(10, 100, 1.0), case(20, 200, 4.0)]
  peak, seconds = mixers.predict(before, 40)
  assert peak == 400
  assert seconds == pytest.approx(16.0)
  unknown = [case(10, 100, None), case(20, 200, None)]
  assert mixers.predict(unknown, 40) == (400, None)


def test_the_report_tells_gains_and_flatness(result):
  text = mixers_report.markdown(result, "the command")
  assert "`the command`" in text
  for found in result["mixers"]:
    gain = mixers_report.gain(found, True, 32)
    case = next(
      c for c in found["cases"] if c["backward"] and c["length"] == 32
    )
    assert gain == found["definition"][1]["seconds"] / case["seconds"]
    assert mixers_report.flatness(found, False, 32) >= 1
    assert (
      f"| {found['name']} | {mixers_report.gain(found, False, 32):.3g}"
      in (text)
    )


def test_the_picture_is_drawn(result, tmp_path):
  pytest.importorskip("matplotlib", reason="pip install 'atlas-jax[plot]'")
  path = tmp_path / "images" / "mixers.png"
  mixers_report.draw(result, path)
  assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"lengths": ()}, "give rising numbers"),
    ({"lengths": (32, 16)}, "give rising numbers"),
    ({"names": ("swaa",)}, "did you mean swa"),
    ({"repeats": 0}, "1 or more"),
  ],
)
def test_mistakes_are_said(changes, message):
  with pytest.raises(UserError, match=message):
    mixers.Options(**changes)
