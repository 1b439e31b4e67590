"""What setup.cfg promises, against what the repository holds."""

import ast
import configparser
import pathlib
import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import atlas_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUR_PACKAGES = ("atlas_jax", "pallas_kernels")
# Import name to the name of the distribution that has it.
DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}
# Brought by jax itself, which pins the one that fits.
BROUGHT = {"jaxlib", "ml-dtypes"}


def setup() -> configparser.ConfigParser:
  parser = configparser.ConfigParser()
  parser.read(ROOT / "setup.cfg")
  return parser


def requirements(text: str) -> dict[str, Requirement]:
  lines = [line for line in text.splitlines() if line.strip()]
  found = [Requirement(line) for line in lines if not line.startswith("#")]
  return {canonicalize_name(found_one.name): found_one for found_one in found}


def pinned(version: str) -> dict[str, str]:
  text = (ROOT / f"constraints/py{version.replace('.', '')}.txt").read_text()
  lines = [line for line in text.splitlines() if not line.startswith("#")]
  pairs = [line.split("==") for line in lines]
  return {canonicalize_name(name): number for name, number in pairs}


def supported() -> list[str]:
  classifiers = setup()["metadata"]["classifiers"]
  return re.findall(r"Python :: (3\.\d+)", classifiers)


@pytest.mark.parametrize("version", supported())
def test_every_supported_python_has_pins_that_setup_cfg_allows(version):
  pins = pinned(version)
  options = setup()["options"]
  extras = setup()["options.extras_require"]
  wanted = [options["install_requires"], extras["dev"]]
  wanted += [extras[name] for name in ("tb", "text", "plot", "export", "gguf")]
  for text in wanted:
    for name, requirement in requirements(text).items():
      if name != "atlas-jax":
        assert requirement.specifier.contains(pins[name]), requirement


def test_bad_releases_are_excluded():
  core = requirements(setup()["options"]["install_requires"])
  for bad in ("0.10.2", "0.11.0", "0.11.1", "0.10.0"):
    assert not core["jax"].specifier.contains(bad)
  for good in ("0.10.1", "0.11.2", "0.12.0.1"):
    assert core["jax"].specifier.contains(good)
  assert not core["flax"].specifier.contains("0.12.9")


def test_pyproject_holds_nothing_but_the_build_system():
  text = (ROOT / "pyproject.toml").read_text()
  assert re.findall(r"^\[(.*)\]$", text, re.MULTILINE) == ["build-system"]


def test_the_version_is_the_newest_of_the_changelog():
  changelog = (ROOT / "CHANGELOG.md").read_text()
  versions = re.findall(r"^## (\d\S*)", changelog, re.MULTILINE)
  assert versions[0] == atlas_jax.__version__


def test_the_license_is_apache():
  text = (ROOT / "LICENSE").read_text()
  assert "Apache License" in text
  assert "Version 2.0, January 2004" in text


@pytest.mark.parametrize("package", OUR_PACKAGES)
def test_packages_ship_their_types(package):
  assert (ROOT / package / "py.typed").exists()


def imported(package: str) -> dict[str, pathlib.Path]:
  """Top-level names imported by a package when it is imported, anywhere."""
  found = {}
  for path in sorted((ROOT / package).rglob("*.py")):
    for node in ast.parse(path.read_text()).body:
      if isinstance(node, ast.Import):
        for alias in node.names:
          found[alias.name.split(".")[0]] = path
      elif isinstance(node, ast.ImportFrom) and node.module:
        found[node.module.split(".")[0]] = path
  return found


@pytest.mark.parametrize("package", OUR_PACKAGES)
def test_what_a_package_imports_at_the_top_is_required_by_the_core(package):
  core = set(requirements(setup()["options"]["install_requires"])) | BROUGHT
  for name, path in imported(package).items():
    if name in sys.stdlib_module_names or name in OUR_PACKAGES:
      continue
    distribution = canonicalize_name(DISTRIBUTIONS.get(name, name))
    assert distribution in core, f"{path} imports {name}"


# Imports run one way; a room may import those below it, and no room above.
BELOW = {
  "pallas_kernels": set(),
  "atlas_jax/memory": {"atlas_jax.errors", "pallas_kernels"},
  "atlas_jax/attention": {"atlas_jax.errors", "atlas_jax.memory"},
  "atlas_jax/recurrences": {"atlas_jax.errors", "atlas_jax.memory"},
  "atlas_jax/layers": {
    "atlas_jax.attention",
    "atlas_jax.config",
    "atlas_jax.errors",
    "atlas_jax.memory",
    "atlas_jax.recurrences",
    "pallas_kernels",
  },
  "atlas_jax/models": {
    "atlas_jax.attention",
    "atlas_jax.config",
    "atlas_jax.errors",
    "atlas_jax.layers",
    "atlas_jax.memory",
    "pallas_kernels",
  },
}


@pytest.mark.parametrize("room", BELOW)
def test_imports_run_one_way(room):
  own = room.replace("/", ".")
  for path in sorted((ROOT / room).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
      else:
        continue
      for name in names:
        if name.split(".")[0] in (*OUR_PACKAGES, "experiments"):
          allowed = BELOW[room] | {own}
          assert any(f"{name}.".startswith(f"{a}.") for a in allowed), (
            f"{path} imports {name}"
          )


def test_the_library_never_imports_the_mains():
  for path in sorted((ROOT / "atlas_jax").rglob("*.py")):
    assert not re.search(
      r"^\s*(from|import) experiments", path.read_text(), re.MULTILINE
    ), path
