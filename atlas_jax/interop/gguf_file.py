"""GGUF files: metadata by name, and tensors as float32 arrays.

The format holds quantised weights; the public `gguf` package reads it and
turns blocks of integers back into numbers.
"""

import importlib.util
import os
from typing import Any, TypeVar, cast, overload

import numpy as np
from jaxtyping import Float

from atlas_jax import paths
from atlas_jax.errors import UserError

Value = TypeVar("Value", bool, int, float, str)


class GgufFile:
  """A GGUF file that is open for reading.

  Args:
    path: The file.

  Attributes:
    name: The path as it was given, for messages.
    keys: Names of the metadata.
    tensors: Names of the tensors.

  Raises:
    UserError: The extra `gguf` is not installed, or the file cannot be read,
      is no GGUF file, is damaged or cut short.
  """

  def __init__(self, path: str | os.PathLike[str]):
    if importlib.util.find_spec("gguf") is None:
      raise UserError(
        "GGUF files need another package: pip install 'atlas-jax[gguf]'"
      )
    # Installed only where it is used.
    import gguf

    self.name = os.fspath(path)
    try:
      with paths.expand(path).open("rb") as stream:
        begins = stream.read(4)
    except OSError as error:
      raise UserError(
        f"cannot read the weights {self.name!r}: {error.strerror or error}"
      ) from error
    if begins != b"GGUF":
      raise UserError(f"{self.name!r} is no GGUF file: name another")
    try:
      reader = gguf.GGUFReader(paths.expand(path))
    except Exception as error:  # The parser raises whatever it runs into.
      raise self._damaged(error) from error
    self._fields = reader.fields
    self._tensors = {tensor.name: tensor for tensor in reader.tensors}
    self._dequantize = gguf.dequantize
    self.keys = tuple(self._fields)
    self.tensors = tuple(self._tensors)

  @overload
  def value(self, key: str, kind: type[Value]) -> Value: ...

  @overload
  def value(self, key: str, kind: type[Value], default: Value) -> Value: ...

  def value(
    self, key: str, kind: type[Value], default: Value | None = None
  ) -> Value:
    """Returns one number, string or flag of the metadata.

    Args:
      key: Its name.
      kind: bool, int, float or str.
      default: What it is where the file does not say; None: it must.

    Raises:
      UserError: It is missing or of another kind.
    """
    found = self._contents(key, default)
    # To Python a flag is a whole number.
    if type(found) is not kind:
      raise UserError(
        f"{key} of {self.name!r} is {_show(found)} and should be of type "
        f"{kind.__name__}: the file is of a kind that is not known here"
      )
    return cast(Value, found)

  def values(self, key: str, kind: type[Value]) -> list[Value]:
    """Returns an array of the metadata as a list.

    Args:
      key: Its name.
      kind: bool, int, float or str.

    Raises:
      UserError: It is missing or holds something else.
    """
    found = self._contents(key, None)
    whole = isinstance(found, list) and all(type(one) is kind for one in found)
    if not whole:
      raise UserError(
        f"{key} of {self.name!r} is {_show(found)} and should be a list of "
        f"{kind.__name__}: the file is of a kind that is not known here"
      )
    return cast(list[Value], found)

  def tensor(self, name: str) -> Float[np.ndarray, "*shape"]:
    """Returns a tensor in float32; the last axis is the first in the file.

    Raises:
      UserError: It is missing, its quantisation is not known, or a number of
        it is not finite.
    """
    found = self._tensors.get(name)
    if found is None:
      raise UserError(f"{self.name!r} has no tensor {name}: name another file")
    kind = found.tensor_type
    try:
      array = self._dequantize(found.data, kind)
    except Exception as error:  # Whatever the package does not implement.
      raise UserError(
        f"{name} of {self.name!r} is stored as {kind.name}, which cannot be "
        "read: take another quantisation of it"
      ) from error
    array = np.asarray(array, np.float32)
    if not np.isfinite(array).all():
      raise UserError(
        f"{name} of {self.name!r} holds numbers that are not finite: the file "
        "is damaged; get it again"
      )
    return array

  def _contents(self, key: str, default: Any) -> Any:
    if key not in self._fields:
      if default is not None:
        return default
      raise UserError(
        f"{self.name!r} does not say {key}: the file is not complete or not of "
        "a language model"
      )
    try:
      return self._fields[key].contents()
    except Exception as error:  # Text that is no UTF-8, for one.
      raise self._damaged(error) from error

  def _damaged(self, error: Exception) -> UserError:
    return UserError(
      f"{self.name!r} is damaged or cut short ({type(error).__name__}: "
      f"{error}): get it again"
    )


def _show(value: Any) -> str:
  """A value, or what it is of if that is long."""
  if isinstance(value, list):
    return f"a list of {len(value)}"
  return repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
