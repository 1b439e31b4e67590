"""The suite of speeds: what runs, what is predicted, what is reported."""

import json

import jax
import jax.numpy as jnp
import pytest

from atlas_jax.benchmark import layer, measure, speed, speed_report
from atlas_jax.errors import UserError

SHAPE = layer.Shape(dim=8, heads=2, chunk=4)


def options(**changes) -> speed.Options:
  small = {
    "lengths": (8, 16, 24),
    "windows": (2,),
    "repeats": 2,
    "turn_seconds": 0.0,
    "compare_at": 16,
    "decode_tokens": 6,
    "longest_whole": 16,
    "shape": SHAPE,
  }
  return speed.Options(**(small | changes))


def test_predicted_memory_is_what_the_compiler_says():
  chosen = options(lengths=(64, 128, 256))
  points = []
  for length in chosen.lengths:
    case = speed.Case(layer.MATERIALISED, 1, length, False)
    program = measure.compile_program(
      speed._function(chosen, case), *speed._shapes(chosen, case)
    )
    points.append((length, program.peak_bytes))
  found = measure.predict(points[:2], 256)
  assert found == pytest.approx(points[2][1], rel=0.05)


def fake_compiler(monkeypatch, bytes_per_token: int) -> list[int]:
  """Lets programs cost so much; returns the lengths that get compiled."""
  compiled = []

  def compile_program(function, state, x, *token, donate=None):
    if donate is not None:
      return measure.Program(lambda state, *args: (state, 0), 1.0, 1)
    compiled.append(x.shape[1])
    size = 1000 + bytes_per_token * x.shape[1]
    return measure.Program(lambda *args: None, 1.0, size)

  monkeypatch.setattr(measure, "compile_program", compile_program)
  return compiled


def test_what_does_not_fit_is_neither_run_nor_compiled(monkeypatch):
  compiled = fake_compiler(monkeypatch, 100)
  chosen = options(lengths=(8, 16, 24, 32), limit_bytes=1000 + 100 * 20)
  cases = [
    case
    for case in speed.prepare(chosen)
    if case.method == layer.TOKENS and case.backward
  ]
  assert [case.program is not None for case in cases] == [
    True,
    True,
    False,
    False,
  ]
  assert [case.peak_bytes for case in cases] == [1800, 2600, 3400, 4200]
  assert [case.compiled for case in cases] == [True, True, False, False]
  # Ours and attention by blocks run everywhere; the limit is not theirs.
  assert compiled.count(32) == 4


def test_the_first_length_too_large_is_told_as_it_is(monkeypatch):
  compiled = fake_compiler(monkeypatch, 100)
  chosen = options(limit_bytes=1000)
  found = [c for c in speed.prepare(chosen) if c.method == layer.MATERIALISED]
  assert all(case.program is None for case in found)
  assert found[0].peak_bytes == 1800
  assert found[0].compiled
  assert not found[1].compiled
  assert found[1].peak_bytes > found[0].peak_bytes
  assert compiled.count(24) == 4


@pytest.fixture(scope="module")
def result():
  with pytest.MonkeyPatch.context() as patch:
    fake_compiler(patch, 100)
    return json.loads(json.dumps(speed.run(options())))


def test_every_case_is_measured(result):
  cases = {
    (c["method"], c["window"], c["length"], c["backward"]): c
    for c in result["cases"]
  }
  # Three ways of the memory, attention by blocks; whole up to 16 tokens.
  assert len(cases) == 2 * (4 * 3 + 2)
  for case in cases.values():
    assert case["fits"]
    assert len(case["wall_seconds"]) == len(case["cpu_seconds"]) == 3
    assert case["tokens_per_second"] > 0
  assert result["decode"][0]["window"] == 2
  assert result["environment"]["cores"] >= 1


def test_a_slow_case_sits_out_unless_it_is_ours(monkeypatch):
  fake_compiler(monkeypatch, 100)
  chosen = options(lengths=(8,), patience=0.0, repeats=1, decode_tokens=2)
  for case in speed.run(chosen)["cases"]:
    calls = 2 if case["method"] == layer.OURS else 1
    assert len(case["wall_seconds"]) == calls


def test_ours_is_really_compiled_and_run(monkeypatch):
  monkeypatch.setattr(speed, "methods", lambda options: [(layer.OURS, 2)])
  found = speed.run(options(lengths=(8,), repeats=1))
  forward, backward = found["cases"]
  assert not forward["backward"]
  assert 0 < forward["peak_bytes"] < backward["peak_bytes"]
  assert backward["compile_seconds"] > 0
  assert found["decode"][0]["wall_microseconds"] > 0


def case(method, length, speed_, window=None, peak=1, fits=True):
  out = {
    "method": method,
    "window": window,
    "length": length,
    "backward": True,
    "fits": fits,
    "peak_bytes": peak,
  }
  if fits:
    out |= {
      "tokens_per_second": speed_,
      "resident_bytes": None,
      "compile_seconds": 1.0,
    }
  return out


def made_up(ours=(100.0, 100.0, 90.0), attention=(400.0, 120.0, 60.0)):
  """A result with round numbers at 10, 20 and 40 tokens."""
  lengths = (10, 20, 40)
  cases = [
    case(layer.OURS, n, v, 1, peak=5)
    for n, v in zip(lengths, ours, strict=True)
  ]
  cases += [
    case(layer.BLOCKED, n, v) for n, v in zip(lengths, attention, strict=True)
  ]
  cases += [
    case(layer.MATERIALISED, 20, 4.0, 1, peak=100),
    case(layer.MATERIALISED, 40, None, 1, peak=13 * 2**30, fits=False),
  ]
  options_ = {
    "compare_at": 20,
    "windows": [1],
    "lengths": lengths,
    "shape": {"dim": 8, "heads": 2, "chunk": 4},
    "longest_whole": 16,
    "repeats": 5,
    "turn_seconds": 0.5,
    "patience": 10.0,
    "limit_bytes": 12 * 2**30,
    "decode_tokens": 6,
  }
  return {"options": options_, "cases": cases, "decode": []}


def figures(result):
  return {
    f["name"].split(";")[0].split(" of ours")[0]: f
    for f in speed_report.derive(result)
    if "forward + backward" in f["name"]
  }


def test_derived_figures():
  found = figures(made_up())
  assert found["speed"]["value"] == 25.0
  assert found["speed"]["met"]
  assert found["peak"]["value"] == 0.05
  assert found["peak"]["met"]
  flat = found["slowest over fastest time per token"]
  assert flat["value"] == pytest.approx(100 / 90)
  assert flat["met"]
  overtaken = found[
    "tokens from which ours is faster than the faster attention"
  ]
  assert overtaken["value"] == 40


def test_a_missed_requirement_is_said():
  found = made_up(ours=(39.0, 39.0, 20.0), attention=(10.0, 50.0, 50.0))
  by_name = figures(found)
  assert not by_name["speed"]["met"]
  assert not by_name["slowest over fastest time per token"]["met"]
  name = "tokens from which ours is faster than the faster attention"
  # Faster at the shortest length does not count once it is slower later.
  assert by_name[name]["value"] is None


def test_report_shows_what_does_not_fit(result):
  found = made_up() | {"environment": result["environment"]}
  text = speed_report.markdown(found, speed_report.derive(found), "the command")
  assert "does not fit (13 GiB)" in text
  assert "the command" in text
  assert "| 25 | >= 10 (met) |" in text


def test_report_of_a_run(result):
  text = speed_report.markdown(result, speed_report.derive(result), "c")
  header = next(x for x in text.splitlines() if x.startswith("|  | 8 |"))
  assert header == "|  | 8 | 16 | 24 |"
  tables = [block for block in text.split("\n\n") if block.startswith("|")]
  for table in tables:
    lines = table.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) > 2


@pytest.mark.parametrize(
  "wrong",
  [{"lengths": (16, 8)}, {"lengths": (9,)}, {"lengths": ()}, {"repeats": 0}],
)
def test_wrong_options_are_refused(wrong):
  with pytest.raises(UserError):
    options(**wrong)


def test_lengths_from_text():
  assert speed.parse_lengths(["64", "128"]) == (64, 128)
  with pytest.raises(UserError, match="whole numbers"):
    speed.parse_lengths(["64", "many"])


def test_resident_growth_sees_a_large_result():
  program = measure.compile_program(
    lambda x: jnp.broadcast_to(x, (8 * 2**20,)) + 1.0, jnp.float32(1.0)
  )
  timing, grown = measure.run_resident(program, jnp.float32(1.0))
  assert timing.wall > 0
  if grown is None:
    pytest.skip("wants /proc/self/clear_refs: run it on Linux")
  assert 24 * 2**20 < grown < 256 * 2**20
  assert program.peak_bytes >= 32 * 2**20


def test_layer_gives_every_parameter_a_gradient():
  memory = layer.memory_of(SHAPE, 2)
  params = layer.init(jax.random.key(0), SHAPE, memory)
  x = jax.random.normal(jax.random.key(1), (1, 12, SHAPE.dim))
  core = layer.core_of(layer.OURS, memory)
  slopes = jax.jit(jax.grad(lambda p: layer.loss(core, p, x, SHAPE.heads)))(
    params
  )
  for path, slope in jax.tree.leaves_with_path(slopes):
    assert jnp.any(slope != 0), path


def test_a_turn_leaves_its_first_call_out_unless_it_is_the_only_one(
  monkeypatch,
):
  program = measure.Program(lambda: None, 0.0, 0)
  walls = iter([9.0, 1.0, 2.0, 3.0, 5.0])
  monkeypatch.setattr(
    measure, "run_once", lambda program: measure.Timing(next(walls), 0.0)
  )
  assert measure.run_turn(program, seconds=8.0).wall == 9.0
  assert measure.run_turn(program, seconds=5.0).wall == 2.5
