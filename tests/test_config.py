"""Configuration trees: names, defaults, JSON, strings, mistakes."""

import dataclasses
import json
import re
from typing import Literal

import pytest

from atlas_jax import config
from atlas_jax.errors import UserError

Triple = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Memory:
  """A branch of a branch, with every supported type."""

  window: int = config.field(4, "Tokens seen at once.")
  scale: float = config.field(0.5, "A number.")
  residual: bool = config.field(False, "Yes or no.")
  kind: Literal["plain", "gated"] = config.field("plain", "One of two.")
  sketch: int | None = config.field(None, "Perhaps a number.")
  powers: tuple[int, ...] = config.field((1, 2), "Any number of them.")
  pair: tuple[int, float] = config.field((1, 0.5), "Exactly two.")
  coefficients: tuple[Triple, ...] = config.field(((1.0, 2.0, 3.0),), "Rows.")


@dataclasses.dataclass(frozen=True)
class Model:
  """A branch that checks its values against each other."""

  dim: int = config.field(64, "Width.")
  heads: int = config.field(4, "Heads.")
  memory: Memory = config.field(Memory(), "The memory.")

  def __post_init__(self):
    if self.dim % self.heads:
      raise UserError("dim is not divisible by heads")


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A root, with a default that differs from the branch's own."""

  model: Model = dataclasses.field(default_factory=lambda: Model(dim=32))
  name: str = config.field("first", "A name.")


@dataclasses.dataclass(frozen=True)
class Required:
  """A field without default."""

  path: str = dataclasses.field(metadata={"doc": "Needed."})


def test_leaves_of_a_class_have_types_defaults_and_docs():
  found = config.leaves(Experiment)
  assert list(found)[:3] == [
    "model.dim",
    "model.heads",
    "model.memory.window",
  ]
  assert found["model.dim"] == (int, 32, "Width.")
  assert found["model.memory.sketch"] == (int | None, None, "Perhaps a number.")
  assert found["name"] == (str, "first", "A name.")
  assert config.leaves(Required)["path"].default is dataclasses.MISSING


def test_leaves_of_an_instance_have_its_values():
  found = config.leaves(Experiment(model=Model(dim=8)))
  assert found["model.dim"].default == 8


def test_json_round_trip():
  before = config.replace(
    Experiment(), {"model.memory.sketch": 7, "model.memory.powers": (3,)}
  )
  text = json.dumps(config.to_dict(before))
  assert config.from_dict(Experiment, json.loads(text)) == before


def test_from_dict_keeps_the_defaults_of_the_branch_it_is_in():
  assert config.from_dict(Experiment, {"model": {"heads": 2}}) == Experiment(
    model=Model(dim=32, heads=2)
  )


@pytest.mark.parametrize(
  ("name", "text", "value"),
  [
    ("window", "12", 12),
    ("window", "1_000", 1000),
    ("scale", "1e-3", 1e-3),
    ("scale", "2", 2.0),
    ("scale", "inf", float("inf")),
    ("residual", "true", True),
    ("residual", "No", False),
    ("kind", "gated", "gated"),
    ("sketch", "none", None),
    ("sketch", "5", 5),
    ("powers", "1,2, 3", (1, 2, 3)),
    ("powers", "(4,)", (4,)),
    ("powers", "", ()),
    ("pair", "3,1e-2", (3, 1e-2)),
    ("coefficients", "[[1,2,3],(4,5,6)]", ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))),
  ],
)
def test_strings_are_read_as_the_type_of_the_field(name, text, value):
  changed = config.replace(Experiment(), {f"model.memory.{name}": text})
  got = getattr(changed.model.memory, name)
  assert got == value
  assert type(got) is type(value)


@pytest.mark.parametrize(
  ("name", "value", "words"),
  [
    ("window", "1.5", "expected int, got '1.5'"),
    ("window", "many", "expected int, got 'many'"),
    ("window", 1.5, "expected int, got 1.5"),
    ("window", True, "expected int, got True"),
    ("window", None, "expected int, got None"),
    ("window", "", "expected int, got ''"),
    ("scale", "nan", "expected float, got 'nan'"),
    ("residual", "maybe", "expected true or false, got 'maybe'"),
    ("residual", 1, "expected true or false, got 1"),
    ("kind", "gatd", "expected one of plain, gated, got 'gatd'; did you mean"),
    ("kind", [], "expected one of plain, gated, got []"),
    ("sketch", "x", "expected int or none, got 'x'"),
    ("powers", "1,x", "expected a comma-separated list of int, got '1,x'"),
    ("powers", "(1", "expected a comma-separated list of int, got '(1'"),
    ("powers", 3, "expected a comma-separated list of int, got 3"),
    ("pair", "3", "expected a comma-separated list: int, float, got '3'"),
  ],
)
def test_a_value_of_the_wrong_type_is_one_line(name, value, words):
  with pytest.raises(UserError, match=re.escape(words)) as caught:
    config.replace(Experiment(), {f"model.memory.{name}": value})
  assert str(caught.value).startswith(f"model.memory.{name}: ")
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("model.memory.windw", "did you mean model.memory.window?"),
    ("window", "did you mean model.memory.window?"),
    ("model.kind", "did you mean model.memory.kind?"),
    ("model.zzz", "unknown field model.zzz"),
    ("zzz.dim", "did you mean model.dim?"),
    ("name.dim", "name is a single value"),
    ("model", "model is a group of fields"),
  ],
)
def test_a_wrong_name_is_answered_with_the_nearest(name, words):
  with pytest.raises(UserError, match=re.escape(words)):
    config.replace(Experiment(), {name: "1"})


def test_values_that_fit_only_together_are_changed_together():
  changed = config.replace(Experiment(), {"model.dim": 9, "model.heads": 3})
  assert (changed.model.dim, changed.model.heads) == (9, 3)
  with pytest.raises(UserError, match="not divisible"):
    config.replace(Experiment(), {"model.dim": 9})


def test_a_branch_is_replaced_whole():
  memory = Memory(window=9)
  assert (
    config.replace(Experiment(), {"model.memory": memory}).model.memory
    == memory
  )
  with pytest.raises(UserError, match="given twice"):
    config.replace(
      Experiment(), {"model.memory.window": 1, "model.memory": memory}
    )


def test_replace_leaves_its_arguments_alone():
  values = {"model": {"memory": {"window": 3}}, "model.memory.scale": 2}
  config.replace(Experiment(), values)
  assert values["model"] == {"memory": {"window": 3}}


def test_an_absent_field_without_default_is_named():
  with pytest.raises(UserError, match="no value for path"):
    config.from_dict(Required, {})
  assert config.from_dict(Required, {"path": "a"}) == Required("a")


def test_an_unsupported_type_is_a_mistake_of_the_dataclass():
  with pytest.raises(TypeError, match="not a supported type"):
    config.coerce("1", bytes, "name")
