"""What the documents show runs; what they name exists."""

import importlib
import pathlib
import re
import shlex

import pytest
from absl import flags as absl_flags

from atlas_jax import config as configs
from atlas_jax.training.config import ExperimentConfig
from experiments import flags
from experiments.configs import PRESETS

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = [
  ROOT / "README.md",
  ROOT / "CONTRIBUTING.md",
  ROOT / "CHANGELOG.md",
  *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

every_document = pytest.mark.parametrize(
  "document", [pytest.param(path, id=path.name) for path in DOCUMENTS]
)


def fences(document: pathlib.Path) -> list[tuple[str, str]]:
  """The language and the text of each fenced block."""
  return FENCE.findall(document.read_text())


BLOCKS = [
  pytest.param(document, code, id=f"{document.name}-{number}")
  for document in DOCUMENTS
  for number, (language, code) in enumerate(fences(document))
  if language == "python"
]


def quoted(document: pathlib.Path) -> list[str]:
  """What stands in single backticks outside of fenced blocks."""
  return re.findall(r"`([^`\n]+)`", FENCE.sub("", document.read_text()))


def test_there_is_something_to_run():
  sources = {case.values[0].name for case in BLOCKS}
  assert {"README.md", "memory.md"} <= sources


@pytest.mark.parametrize(("document", "code"), BLOCKS)
def test_python_runs_as_written(document, code):
  exec(compile(code, str(document), "exec"), {"__name__": "document"})


def trainings(document: pathlib.Path) -> list[str]:
  """The commands of its fenced blocks that train something."""
  text = "\n".join(code for _, code in fences(document)).replace("\\\n", " ")
  return re.findall(r"^python -m (experiments\.train .*)$", text, re.MULTILINE)


def test_trainings_are_of_valid_models():
  commands = [line for document in DOCUMENTS for line in trainings(document)]
  assert commands
  for command in commands:
    values = absl_flags.FlagValues()
    flags.define_presets(PRESETS, values)
    flags.define_fields(ExperimentConfig, flag_values=values)
    words = [
      word
      for word in shlex.split(command)
      if word.lstrip("-").split("=")[0] in values
    ]
    values(["train", *words])
    flags.resolve(PRESETS, values).validate()


@every_document
def test_links_lead_somewhere(document):
  text = FENCE.sub("", document.read_text())
  for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", text):
    if target.startswith(("https://", "http://")):
      continue
    path, _, anchor = target.partition("#")
    found = document.parent / path if path else document
    assert found.exists(), target
    if anchor:
      assert anchor in anchors(found), target


def anchors(document: pathlib.Path) -> set[str]:
  """The names that headings of a document get on the web."""
  headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
  plain = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
  return {heading.strip().replace(" ", "-") for heading in plain}


@every_document
def test_commands_name_what_exists(document):
  text = document.read_text()
  known = configs.leaves(ExperimentConfig)
  for flag in re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", text):
    assert flag in known or any(n.startswith(f"{flag}.") for n in known), flag
  for preset in re.findall(r"--config=(\w+)", text):
    assert preset in PRESETS
  for main in re.findall(r"python -m experiments\.(\w+)", text):
    assert (ROOT / "experiments" / f"{main}.py").is_file(), main
  targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
  for target in re.findall(r"^make ([a-z][\w-]*)", text, re.M):
    assert target in targets


@every_document
def test_named_tests_and_functions_exist(document):
  source = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
  tests = set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
  modules = {p.stem for p in (ROOT / "atlas_jax" / "memory").glob("*.py")}
  for name in quoted(document):
    if re.fullmatch(r"test_\w+", name):
      assert name in tests, name
    elif re.fullmatch(r"atlas_jax(\.\w+)+", name):
      assert resolves(name), name
    elif re.fullmatch(r"\w+\.json", name):
      continue
    elif re.fullmatch(r"\w+\.\w+", name) and name.split(".")[0] in modules:
      assert resolves(f"atlas_jax.memory.{name}"), name
    elif re.fullmatch(r"[\w/]+/[\w.]+\.(py|md|sh)", name):
      assert (ROOT / name).exists(), name


def resolves(name: str) -> bool:
  """Whether a dotted name is a module, or an attribute of one."""
  try:
    importlib.import_module(name)
  except ModuleNotFoundError:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)
  return True
