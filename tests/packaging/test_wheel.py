"""The wheel: built from a clean copy, installed, imported elsewhere."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.full

IMPORT_EVERYTHING = """
import importlib, pathlib, pkgutil, sys
import atlas_jax, pallas_kernels
folder = pathlib.Path(sys.argv[1])
count = 0
for package in (atlas_jax, pallas_kernels):
  assert folder in pathlib.Path(package.__file__).parents, package.__file__
  for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):
    importlib.import_module(module.name)
    count += 1
print(atlas_jax.__version__, count)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  # A copy, as building leaves files in the source folder.
  folder = tmp_path_factory.mktemp("source folder")
  source = folder / "atlas-jax"
  ignore = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "runs")
  shutil.copytree(ROOT, source, ignore=ignore)
  command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder]
  subprocess.run([*command, source], check=True, capture_output=True)
  (built,) = folder.glob("*.whl")
  return built


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  tops = {name.split("/")[0] for name in names}
  assert {top for top in tops if not top.endswith(".dist-info")} == {
    "atlas_jax",
    "pallas_kernels",
  }
  for package in ("atlas_jax", "pallas_kernels"):
    assert f"{package}/py.typed" in names
    sources = {
      path.relative_to(ROOT).as_posix()
      for path in (ROOT / package).rglob("*.py")
    }
    assert sources <= set(names)
  assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_installs_and_imports(wheel, tmp_path):
  target = tmp_path / "installed"
  subprocess.run(
    [
      *(sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"),
      *("--no-index", "--target", target, wheel),
    ],
    check=True,
    capture_output=True,
  )
  done = subprocess.run(
    [sys.executable, "-c", IMPORT_EVERYTHING, target],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert int(done.stdout.split()[1]) > 3
