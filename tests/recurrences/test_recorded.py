"""Recurrences against outputs recorded from another implementation.

The arrays and their origin: `reference/README.md`.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.layers.retnet_mixer import log_retention
from atlas_jax.recurrences import (
  MesaState,
  channel_decay,
  delta_rule,
  mesa,
  rwkv7,
  scalar_decay,
)
from tests.layers.helpers import assert_close, jit

_FOLDER = pathlib.Path(__file__).parent / "reference"


def _tokens(arrays, *names):
  """Queries as the other side scales them, and the other arrays by name."""
  query = arrays["query"] * arrays["query"].shape[-1] ** -0.5
  return query, *(arrays[name] for name in ("key", "value", *names))


def _retention(arrays, how):
  query, key, value = _tokens(arrays)
  decay = log_retention(value.shape[2], jnp.float32)
  decay = jnp.broadcast_to(decay, value.shape[:3])
  return {"y": scalar_decay(query, key, value, decay, **how)[0]}


def _linear_attn(arrays, how):
  y, last = scalar_decay(*_tokens(arrays), state=arrays["state"], **how)
  return {"y": y, "last": last}


def _linear_attn_normalised(arrays, how):
  query, key, value = _tokens(arrays)
  value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
  y, last = scalar_decay(query, key, value, **how)
  return {"y": y[..., :-1] / y[..., -1:], "last": last}


def _simple_gla(arrays, how):
  y, last = scalar_decay(*_tokens(arrays, "log_decay", "state"), **how)
  return {"y": y, "last": last}


def _gla(arrays, how):
  y, last = channel_decay(*_tokens(arrays, "log_decay", "state"), **how)
  return {"y": y, "last": last}


def _delta_rule(arrays, how):
  y, last = delta_rule(*_tokens(arrays, "rate"), state=arrays["state"], **how)
  return {"y": y, "last": last}


def _gated_delta_rule(arrays, how):
  y, last = delta_rule(*_tokens(arrays, "rate", "log_decay", "state"), **how)
  return {"y": y, "last": last}


def _rwkv7(arrays, how):
  names = ("erased", "rate", "log_decay", "state")
  y, last = rwkv7(*_tokens(arrays, *names), **how)
  return {"y": y, "last": last}


def _mesa(arrays, how):
  names = ("query", "key", "value", "rate", "log_decay", "ridge")
  before = MesaState(arrays["covariance"], arrays["correlation"])
  y, last = mesa(*(arrays[name] for name in names), before, **how)
  return {
    "y": y,
    "last_covariance": last.covariance,
    "last_correlation": last.correlation,
  }


_RUNS = {
  "retention": _retention,
  "linear_attn": _linear_attn,
  "linear_attn_normalised": _linear_attn_normalised,
  "simple_gla": _simple_gla,
  "gla": _gla,
  "delta_rule": _delta_rule,
  "gated_delta_rule": _gated_delta_rule,
  "rwkv7": _rwkv7,
  "mesa": _mesa,
}


def test_every_recording_has_a_test():
  assert {path.stem for path in _FOLDER.glob("*.npz")} == set(_RUNS)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", _RUNS)
def test_as_recorded(name, implementation):
  with np.load(_FOLDER / f"{name}.npz") as file:
    arrays = dict(file)
  # Chunks of 8: the 21 tokens are no multiple.
  how = {"implementation": implementation, "chunk": 8}
  found = jit(lambda arrays: _RUNS[name](arrays, how))(arrays)
  # Both sides sum in float32; a solve carries its rounding further.
  limit = 1e-4 if name == "mesa" else 1e-5
  assert_close(found, {part: arrays[part] for part in found}, limit)
