"""Settings of every test: strict promotion, eight CPU devices, options."""

import gc
import os
import pathlib

import jax
import pytest
from absl import flags

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_MAPS = pathlib.Path("/proc/self/maps")
# Linux lets a process have 65,530 of them; XLA crashes where it gets no more.
_MOST_MAPS = 25_000
_DATA_ROOT_MESSAGE = "wants real data: give its folder by --data-root=DIR"

# An implicit promotion is a mistake waiting for the day it costs memory
# (float32 to float64) or numbers ([T] broadcast against [B, T]).
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Must come before the first use of a device.
jax.config.update("jax_num_cpu_devices", 8)
# Grain reads an absl flag and fails while no main has parsed them.
flags.FLAGS.mark_as_parsed()

# Compiling is most of the time of a tiny test: a third less of it without the
# optimisations that only larger arrays repay. Entries of the cache are valid
# for one version of jax only.
jax.config.update("jax_disable_most_optimizations", True)
_CACHE = _ROOT / ".cache" / "jax" / jax.__version__
jax.config.update("jax_compilation_cache_dir", os.fspath(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds `--full`, `--data-root` and `--smollm2`."""
  parser.addoption(
    "--full",
    action="store_true",
    help="also run the tests marked full: the large grid, many minutes",
  )
  parser.addoption(
    "--data-root",
    metavar="DIR",
    help="folder of real data for the tests that want it; without it they skip",
  )
  parser.addoption(
    "--smollm2",
    metavar="FILE",
    help="run the tests of a real pretrained model: its GGUF file, or smollm2 "
    "for that of the installed package; without it they skip",
  )


def pytest_configure(config: pytest.Config) -> None:
  """Registers the markers."""
  config.addinivalue_line("markers", "full: runs only with --full")


def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Takes the tests marked full out of a run without --full."""
  if config.getoption("full"):
    return
  full = [item for item in items if item.get_closest_marker("full")]
  if full:
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(autouse=True)
def few_programs():
  """Drops compiled programs, each of which maps memory, before it runs out."""
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def small_texts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A folder of a few short documents, which no test changes."""
  folder = tmp_path_factory.mktemp("texts")
  for index in range(12):
    words = [f"document {index} counts {n} of {index * n}; " for n in range(20)]
    (folder / f"{index}.txt").write_text("".join(words))
  return folder


@pytest.fixture(scope="session")
def data_root(request: pytest.FixtureRequest) -> pathlib.Path:
  """The folder given by --data-root; skips the test without it."""
  given = request.config.getoption("data_root")
  if given is None:
    pytest.skip(_DATA_ROOT_MESSAGE)
  path = pathlib.Path(given)
  if not path.is_dir():
    raise pytest.UsageError(f"--data-root={given} is not a folder")
  return path
