"""One small instance of every mixer of the registry, and calls that compile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlas_jax import config as configs
from atlas_jax import models
from atlas_jax.layers.initial import Draws
from atlas_jax.models.registry import REGISTRY
from tests.layers.helpers import jit, made, randomised

DIM = 16
BASE = models.ModelConfig(dim=DIM, layers=1, heads=2, mlp_hidden=16)

_MUON = {"muon_every": 8, "muon_steps": 1, "muon_epsilon": 1e-2}
_WINDOWED = {"key_width": 4, "expansion": 2.0, "chunk": 8, "window": 5}
_PLAIN = {"expansion": 2.0, "chunk": 8}

# Options that make a mixer small; those of a family are under its name.
OPTIONS = {
  "atlas": {"memory": _MUON | _WINDOWED},
  "atlas_pp": {"memory": _MUON | _WINDOWED},
  "omeganet": {"memory": _WINDOWED},
  "titans": {"memory": _PLAIN},
  "titans_nomom": {"memory": _PLAIN},
  "dla": {"memory": _PLAIN | {"key_width": 4}},
  "swla": {"memory": _PLAIN | {"key_width": 4}},
  "ttt_linear": {"memory": {"chunk": 8}},
  "ttt_mlp": {"memory": {"chunk": 8, "expansion": 2.0}},
  "moneta": {"memory": _PLAIN},
  "yaad": {"memory": _PLAIN},
  "memora": {"memory": _PLAIN},
  "lact": {"memory": {"chunk": 8, "muon_steps": 1, "muon_epsilon": 1e-2}},
  "mamba2": {"matrix": {"head_width": 8, "state_width": 8}},
  "longhorn": {"matrix": {"state_width": 8}},
  "deep_transformer": {"kernel": {"lam": 0.5, "expansion": 2.0}},
  "swdt": {"kernel": {"expansion": 2.0, "window": 3, "chunk": 8}},
  "dot": {"kernel": {"expansion": 2.0, "window": 3, "chunk": 8}},
  "mac": {
    "hybrid": {"memory": "titans", "segment": 16},
    "attention": {"persistent": 2},
    "memory": _PLAIN,
  },
  "mag": {
    "hybrid": {"memory": "omeganet"},
    "attention": {"persistent": 2, "window": 9},
    "memory": _WINDOWED,
  },
  "mal": {
    "hybrid": {"memory": "gated_deltanet"},
    "attention": {"persistent": 2, "window": 9},
  },
  "hyena": {"hyena": {"max_length": 96, "filter_width": 8}},
  "transformer": {"attention": {"kv_heads": 1, "persistent": 2}},
  "swa": {"attention": {"window": 9, "persistent": 2}},
  "longformer": {"attention": {"window": 9, "global_tokens": 3}},
  "reformer": {"attention": {"buckets": 4, "rounds": 2}},
}


def config_of(name: str, **changes) -> models.ModelConfig:
  """A small model around one mixer."""
  options = {
    f"{branch}.{option}": value
    for branch, values in OPTIONS.get(name, {}).items()
    for option, value in values.items()
  }
  return configs.replace(BASE, {"mixer": name, **options, **changes})


@functools.cache
def mixer_of(name: str, **changes):
  """A small mixer whose parameters are all somewhere in general.

  Changes leave the parameters as they are: they are drawn, which takes long to
  compile, but once.
  """
  config = config_of(name, **changes)
  make = lambda rngs: REGISTRY[name].make(config, rngs)
  if not changes:
    return randomised(made(make), 0.2)
  shapes = nnx.eval_shape(lambda: make(Draws(jax.random.key(0))))
  params = nnx.state(mixer_of(name))
  return nnx.merge(nnx.graphdef(shapes), params)


def inputs(length: int, batch: int = 2):
  """Random inputs [B, T, D]."""
  random = np.random.default_rng(2)
  return jnp.asarray(random.standard_normal((batch, length, DIM)), jnp.float32)


@jit
def call(mixer, x, state=None, mask=None):
  """A mixer's output; one function, so that equal shapes compile once."""
  return mixer(x, state=state, mask=mask)


@functools.partial(jit, static_argnames=("max_segments", "aligned"))
def packed(mixer, x, segment_ids, max_segments=None, aligned=False):
  """A mixer's output for documents."""
  return mixer(
    x, segment_ids=segment_ids, max_segments=max_segments, aligned=aligned
  )


@jit
def step(mixer, x, state, valid=None):
  """A mixer's step."""
  return mixer.step(x, state, valid=valid)


@jit
def prepare(mixer, state):
  """A state with what steps need; one by one, its many products take long."""
  return mixer.prepare(state)


@jit
def slopes(mixer, x, state=None):
  """Gradients by parameter, input and state, and the outputs."""
  leaves, tree = jax.tree.flatten(state)
  floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
  moved = [leaf for leaf, real in zip(leaves, floats, strict=True) if real]

  def total(mixer, x, moved):
    parts = iter(moved)
    whole = [
      next(parts) if real else leaf
      for leaf, real in zip(leaves, floats, strict=True)
    ]
    out = mixer(x, state=tree.unflatten(whole))
    return jnp.sum(jnp.sin(out.y.astype(jnp.float32))), out

  return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(mixer, x, moved)


def sized(mixer, state, capacity: int):
  """A state as it is from a call, a growing one with this room."""
  state = mixer.unprepare(state)
  if mixer.capacity(state) is None:
    return state
  return mixer.resize(state, capacity)
