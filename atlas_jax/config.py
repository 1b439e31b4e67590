"""Frozen dataclasses as configurations: documented fields, dotted names.

A configuration is a tree of frozen dataclasses. A field that is itself a
dataclass is a branch, every other field is a leaf, and a leaf is called by its
dotted name: `model.memory.window`. A leaf is a bool, int, float, str, a
`Literal` of strings, a tuple of those, or `None` where the type says so, and
can be read from a string (a flag) or from a JSON value.

A wrong name or value raises `atlas_jax.errors.UserError`, one line long.
"""

import ast
import copy
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from atlas_jax.errors import UserError

Config = TypeVar("Config")

_BOOLS = {
  "true": True,
  "yes": True,
  "1": True,
  "false": False,
  "no": False,
  "0": False,
}

# Below this likeness a suggestion confuses more than it helps.
_NEAR = 0.6


class Leaf(NamedTuple):
  """One leaf of a configuration.

  Attributes:
    type: The annotated type, resolved (never a string).
    default: The value in the instance asked, or the class's default;
      `dataclasses.MISSING` for a class whose field has none.
    doc: The help text given to `field`.
  """

  type: Any
  default: Any
  doc: str


def field(default: Any, doc: str) -> Any:
  """Declares a documented dataclass field: `dim: int = field(64, "Width.")`.

  Args:
    default: The default; immutable, as the dataclasses are frozen.
    doc: One or two sentences that become the help of the field's flag.
  """
  return dataclasses.field(default=default, metadata={"doc": doc})


def leaves(config: Any) -> dict[str, Leaf]:
  """Lists every leaf of a configuration class or instance by dotted name."""
  found: dict[str, Leaf] = {}
  hints = _hints(config)
  for spec in dataclasses.fields(config):
    if isinstance(config, type):
      value = _default(spec)
    else:
      value = getattr(config, spec.name)
    kind = hints[spec.name]
    if dataclasses.is_dataclass(kind):
      branch = kind if value is dataclasses.MISSING else value
      for name, leaf in leaves(branch).items():
        found[f"{spec.name}.{name}"] = leaf
    else:
      found[spec.name] = Leaf(kind, value, spec.metadata.get("doc", ""))
  return found


def to_dict(config: Any) -> dict[str, Any]:
  """Turns a configuration into nested dicts of JSON values (tuples: lists)."""
  return {
    spec.name: _to_json(getattr(config, spec.name))
    for spec in dataclasses.fields(config)
  }


def from_dict(cls: type[Config], values: Mapping[str, Any]) -> Config:
  """Builds a configuration from nested dicts, as `to_dict` made them.

  Args:
    cls: The dataclass to build.
    values: Field values; fields that are absent keep their defaults.

  Raises:
    UserError: A name is unknown, a value has the wrong type, or a field
      without default is absent.
  """
  return _build(cls, None, values, "", list(leaves(cls)))


def replace(config: Config, values: Mapping[str, Any]) -> Config:
  """Returns a copy with some fields changed.

  All changes are made at once, so that values which are valid only together
  never meet the old ones in `__post_init__`.

  Args:
    config: The configuration to start from.
    values: New values by dotted name: `{"model.dim": 64, "train.steps": 10}`.
      A string is read as the field's type; a whole branch is given as an
      instance of its dataclass.

  Raises:
    UserError: A name is unknown or a value has the wrong type.
  """
  tree: dict[str, Any] = {}
  for name in sorted(values, key=lambda name: name.count(".")):
    *path, last = name.split(".")
    node = tree
    for part in path:
      node = node.setdefault(part, {})
      if not isinstance(node, dict):
        raise UserError(
          f"{name} is given twice: by itself and inside a whole branch; "
          "give one of the two"
        )
    node[last] = copy.deepcopy(values[name])
  return _build(type(config), config, tree, "", list(leaves(config)))


def coerce(value: Any, kind: Any, name: str) -> Any:
  """Reads a string or a JSON value as the type of a leaf.

  Args:
    value: A string (from a flag) or a value of or near the type.
    kind: bool, int, float, str, `Literal` of strings, a tuple type of these,
      or a union of one of them with None.
    name: The dotted name, for the message.

  Returns:
    The value as `kind`.

  Raises:
    UserError: The value cannot be read as `kind`.
    TypeError: `kind` is none of the supported types (a mistake in the
      dataclass, not in the value).
  """
  try:
    return _coerce(value, kind)
  except (ValueError, SyntaxError, OverflowError):
    hint = ""
    if typing.get_origin(kind) is Literal and isinstance(value, str):
      hint = suggestion(value, typing.get_args(kind))
    raise UserError(
      f"{name}: expected {describe(kind)}, got {value!r}{hint}"
    ) from None


def describe(kind: Any) -> str:
  """Says in words which values a leaf of this type takes."""
  if kind is bool:
    return "true or false"
  if kind is type(None):
    return "none"
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is Literal:
    return "one of " + ", ".join(map(str, args))
  if origin in (typing.Union, types.UnionType):
    return " or ".join(describe(arg) for arg in args)
  if origin is tuple:
    if args[-1] is Ellipsis:
      return f"a comma-separated list of {describe(args[0])}"
    return "a comma-separated list: " + ", ".join(map(describe, args))
  return getattr(kind, "__name__", str(kind))


def suggestion(name: str, names: Iterable[str], prefix: str = "") -> str:
  """Returns "; did you mean X?" for the nearest of `names`, or "".

  Dotted names are compared whole and by their last parts, so that `windw`
  finds `model.memory.window`. The name is shown with `prefix` before it.
  """

  def likeness(known: str) -> float:
    pairs = ((name, known), (name.split(".")[-1], known.split(".")[-1]))
    return sum(difflib.SequenceMatcher(None, *p).ratio() for p in pairs) / 2

  nearest = max(names, key=likeness, default="")
  if likeness(nearest) < _NEAR:
    return ""
  return f"; did you mean {prefix}{nearest}?"


def _hints(config: Any) -> dict[str, Any]:
  cls = config if isinstance(config, type) else type(config)
  return typing.get_type_hints(cls)


def _default(spec: dataclasses.Field) -> Any:
  """The default of a field, or `dataclasses.MISSING`."""
  if spec.default_factory is not dataclasses.MISSING:
    return spec.default_factory()
  return spec.default


def _to_json(value: Any) -> Any:
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return to_dict(value)
  if isinstance(value, tuple):
    return [_to_json(item) for item in value]
  return value


def _build(
  cls: Any, base: Any, values: Mapping[str, Any], prefix: str, names: list[str]
) -> Any:
  """Builds `cls` from `base` (None: from its defaults) and new values."""
  specs = {spec.name: spec for spec in dataclasses.fields(cls)}
  hints = _hints(cls)
  changes: dict[str, Any] = {}
  for key, value in values.items():
    name = f"{prefix}{key}"
    if key not in specs:
      while isinstance(value, Mapping) and value:
        part, value = next(iter(value.items()))
        name = f"{name}.{part}"
      raise UserError(f"unknown field {name}{suggestion(name, names)}")
    kind: Any = hints[key]
    if not dataclasses.is_dataclass(kind):
      if isinstance(value, Mapping):
        raise UserError(f"{name} is a single value and has no fields")
      changes[key] = coerce(value, kind, name)
    elif isinstance(value, Mapping):
      branch = _default(specs[key]) if base is None else getattr(base, key)
      if branch is dataclasses.MISSING:
        branch = None
      changes[key] = _build(kind, branch, value, f"{name}.", names)
    elif type(value) is kind:
      changes[key] = value
    else:
      raise UserError(f"{name} is a group of fields; set {name}.<field>")
  if base is not None:
    return dataclasses.replace(base, **changes)
  absent = [
    f"{prefix}{key}"
    for key, spec in specs.items()
    if key not in changes and _default(spec) is dataclasses.MISSING
  ]
  if absent:
    raise UserError(f"no value for {', '.join(absent)}")
  return cls(**changes)


def _coerce(value: Any, kind: Any) -> Any:
  """`coerce`, with a bare ValueError for a value that does not fit."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    return _coerce_union(value, args)
  if origin is Literal:
    if value not in args:
      raise ValueError
    return value
  if origin is tuple:
    return _coerce_tuple(value, args)
  if kind is bool:
    return _coerce_bool(value)
  if kind in (int, float):
    return _coerce_number(value, kind)
  if kind is str:
    if not isinstance(value, str):
      raise ValueError
    return value
  raise TypeError(f"{kind} is not a supported type of configuration field")


def _coerce_union(value: Any, kinds: tuple[Any, ...]) -> Any:
  if type(None) in kinds:
    if value is None or value == "none":
      return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
  if len(kinds) != 1:
    raise TypeError(f"a field may be one type or None, not {kinds}")
  return _coerce(value, kinds[0])


def _coerce_bool(value: Any) -> bool:
  if isinstance(value, str):
    if value.lower() not in _BOOLS:
      raise ValueError
    return _BOOLS[value.lower()]
  if not isinstance(value, bool):
    raise ValueError
  return value


def _coerce_number(value: Any, kind: type) -> int | float:
  if isinstance(value, bool) or not isinstance(value, str | int | float):
    raise ValueError
  if kind is int and isinstance(value, float) and not value.is_integer():
    raise ValueError
  number = kind(value)
  if math.isnan(number):
    raise ValueError
  return number


def _coerce_tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
  if isinstance(value, str):
    text = value.strip()
    if text.startswith(("(", "[")):
      value = ast.literal_eval(text)
    else:
      value = [part.strip() for part in text.split(",")] if text else []
  if not isinstance(value, tuple | list):
    raise ValueError
  if kinds and kinds[-1] is Ellipsis:
    kinds = kinds[:1] * len(value)
  if len(value) != len(kinds):
    raise ValueError
  return tuple(_coerce(v, kind) for v, kind in zip(value, kinds, strict=True))
