"""The printed table of mixers: every one has its line, which is up to date."""

import pathlib

import pytest

from atlas_jax.models.registry import PATTERNS, REGISTRY
from experiments import models

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def document() -> str:
  return (_ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", REGISTRY)
def test_a_mixers_line_is_up_to_date(name, document):
  again = "run python -m experiments.models --write=docs/models.md"
  assert models.row(name) in document, again


def test_stacks_are_of_mixers_and_told(document):
  for name, turns in PATTERNS.items():
    assert set(turns) <= set(REGISTRY)
    assert f"`{name}`: `{turns[0]}`" in document


def test_a_state_is_right_by_hand():
  # 16 heads of width 64, weights and momentum of an MLP 64 - 256 - 64 in
  # float32; 63 pending tokens of k, v and three gates; tails of a convolution
  # over 4 tokens in bfloat16; three counts.
  weights = 16 * 2 * 2 * 64 * 256 * 4
  told = int(models.row("titans").split(" | ")[8].replace(",", ""))
  assert weights < told < 1.15 * weights
