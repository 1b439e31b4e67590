"""Softmax attention as pure functions: full, windowed, hashed.

Arrays are [B, T, H, K]; a query of H heads may share keys of fewer. Each
function takes documents that start anywhere and goes on from a cache, with
which any split of a sequence gives the same numbers. `recurrent` is the
definition, token by token.
"""

from atlas_jax.attention.cache import (
  Cache,
  Entries,
  WindowCache,
  append,
  check_room,
  empty_window,
  extend,
  extend_window,
  resize,
  room,
)
from atlas_jax.attention.core import attend
from atlas_jax.attention.documents import document_starts, positions
from atlas_jax.attention.full import full_attention, step_attention
from atlas_jax.attention.hashing import bucket_of
from atlas_jax.attention.reference import recurrent
from atlas_jax.attention.window import step_window, window_attention

__all__ = [
  "Cache",
  "Entries",
  "WindowCache",
  "append",
  "attend",
  "bucket_of",
  "check_room",
  "document_starts",
  "empty_window",
  "extend",
  "extend_window",
  "full_attention",
  "positions",
  "recurrent",
  "resize",
  "room",
  "step_attention",
  "step_window",
  "window_attention",
]
