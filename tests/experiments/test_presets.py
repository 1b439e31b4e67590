"""The printed costs of the presets: true, within bounds, and up to date."""

import importlib
import pathlib
import re

import pytest

from experiments import presets
from experiments.configs import PRESETS

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
  return {name: presets.row(name) for name in PRESETS}


def numbers(row: str) -> list[float]:
  return [float(n.replace(",", "")) for n in re.findall(r" ([\d.,]+)[ %]", row)]


def test_start_weights_are_at_most_15_percent(rows):
  for row in rows.values():
    assert numbers(row)[1] <= 15.0, row


def test_the_demo_has_1_to_3_million_parameters(rows):
  for name in ("demo", "demo_atlas_pp", "demo_omeganet", "demo_titans"):
    assert 0.95 <= numbers(rows[name])[0] <= 3.0, rows[name]


def test_a_row_is_right_by_hand(rows):
  # titans_1b3: 8 heads, 64 chunks of 64; per head W and S of an MLP
  # 256 - 1024 - 256, in float32.
  carries = 64 * 8 * 2 * (2 * 256 * 1024) * 4 / 2**20
  assert numbers(rows["titans_1b3"])[3] == carries


def test_docs_and_docstrings_are_up_to_date(rows):
  text = (_ROOT / "docs" / "presets.md").read_text()
  for name, row in rows.items():
    again = "run python -m experiments.presets --write=docs/presets.md"
    assert row in text, again
    module = "demo" if name.startswith("demo") else name.rsplit("_", 1)[-1]
    module = module if module == "demo" else f"atlas_{module}"
    found = importlib.import_module(f"experiments.configs.{module}")
    assert row in (found.__doc__ or ""), f"{module}'s docstring is outdated"
