"""Parameter paths as text: `blocks/mixer/query/kernel`."""

from typing import Any

import jax

# Parameters below this prefix are stacked over layers: their first axis counts
# layers and is not an axis of the parameter itself.
STACKED = "blocks/"


def path_name(path: tuple[Any, ...]) -> str:
  """Writes a key path of jax.tree_util as names joined by slashes."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def is_stacked(name: str) -> bool:
  """Says whether a parameter's first axis is the layer."""
  return name.startswith(STACKED)
