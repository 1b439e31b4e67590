"""Evaluating a run's folder: which text, which file, what goes wrong."""

import dataclasses
import json

import pytest

from atlas_jax.errors import UserError
from atlas_jax.evaluation import EvaluationConfig, evaluate_run, plot
from atlas_jax.training import restore
from tests.evaluation.helpers import TEXTS, prepare, write_texts
from tests.generation.helpers import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def run(folder):
  """A run that held out half of its documents."""
  text = write_texts(folder / "text")
  key = prepare(text, folder / "cache", valid_fraction=0.5).key
  made = make_run(
    folder, text=key, data__path=str(text), data__valid_fraction=0.5
  )
  return restore.load(made)


@pytest.fixture(scope="module")
def report(run):
  return evaluate_run(run, EvaluationConfig(batch=2))


def test_the_held_out_documents_are_read(report):
  found = [document.id for document in report.result.documents]
  assert set(found) < set(TEXTS)
  assert found
  assert (report.step, report.window, report.text) == (3, 16, "")


def test_another_text_is_read_whole(run, report, folder):
  path = folder / "text" / "d.txt"
  other = evaluate_run(run, EvaluationConfig(batch=2), {"data.path": str(path)})
  (document,) = other.result.documents
  assert document.tokens == len(TEXTS["d.txt"])
  assert other.text == str(path)
  assert other.name != report.name


def test_a_report_is_written_whole_and_under_its_own_name(report, tmp_path):
  path = report.write(tmp_path / "evaluation")
  assert path.name == f"{report.name}.json"
  kept = json.loads(path.read_text())
  assert kept == json.loads(json.dumps(dataclasses.asdict(report)))
  assert kept["result"]["tokens"] == report.result.tokens
  assert report.write(tmp_path / "evaluation") == path
  assert len(list(path.parent.iterdir())) == 1
  changes = [{"step": 4}, {"context": 8}, {"limit": 9}, {"fingerprint": "x"}]
  changes += [{"run": {**report.run, "text": "another"}}]
  names = {dataclasses.replace(report, **x).name for x in changes}
  assert len(names) == 5
  assert report.name not in names


def test_the_words_hold_the_figures(report):
  words = "\n".join(report.text_lines())
  assert f"perplexity per token {report.result.perplexity:,.3f}" in words
  assert f"bits per byte {report.result.bits_per_byte:.4f}" in words
  assert words.count("\n") == 3 + len(report.result.positions)


@pytest.mark.parametrize("bytes_", [True, False])
def test_a_picture_is_drawn(report, tmp_path, bytes_):
  pytest.importorskip("matplotlib", reason="pip install 'atlas-jax[plot]'")
  if not bytes_:
    result = dataclasses.replace(report.result, bits_per_byte=None)
    report = dataclasses.replace(report, result=result, context=512)
  path = tmp_path / "picture.png"
  plot.write(report, path)
  assert path.read_bytes().startswith(b"\x89PNG")
  assert [x.name for x in tmp_path.iterdir()] == ["picture.png"]


def test_without_matplotlib_the_picture_is_refused(
  report, tmp_path, monkeypatch
):
  monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
  assert not plot.available()
  with pytest.raises(UserError, match=r"atlas-jax\[plot\]"):
    plot.write(report, tmp_path / "picture.png")


def test_a_text_that_changed_is_refused(run):
  record = {**run.record, "text": "of another time"}
  with pytest.raises(UserError, match="no longer what it was trained on"):
    evaluate_run(run._replace(record=record))


def test_a_text_that_is_not_there_is_told(run):
  with pytest.raises(UserError, match="no text at '/no/such/text'"):
    evaluate_run(run, changes={"data.path": "/no/such/text"})


def test_an_empty_text_is_told(run, tmp_path):
  (tmp_path / "a.txt").write_text("")
  with pytest.raises(UserError, match="text is empty"):
    evaluate_run(run, changes={"data.path": str(tmp_path)})


def test_a_folder_that_is_a_file_is_told(report, tmp_path):
  (tmp_path / "evaluation").write_text("")
  with pytest.raises(UserError, match="cannot write"):
    report.write(tmp_path / "evaluation")
