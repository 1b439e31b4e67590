"""Attention as entries of the registry."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atlas_jax.layers.attention_mixer import AttentionMixer
from atlas_jax.layers.initial import Source
from atlas_jax.layers.mixer import Mixer
from atlas_jax.layers.reformer_mixer import ReformerMixer
from atlas_jax.models.entry import Entry, common, given

if TYPE_CHECKING:
  from atlas_jax.models.config import ModelConfig

# What windowed attention sees (arXiv 2406.07522 and 2412.06464; the paper
# trains on as many tokens).
WINDOW = 2048

_PROJECTED = {"kv_heads": 0, "rope_base": 10000.0, "qk_norm": False}

# By mixer, the options that it reads and their values.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
  "transformer": {**_PROJECTED, "persistent": 0},
  "swa": {**_PROJECTED, "window": WINDOW, "persistent": 0},
  "longformer": {
    **_PROJECTED,
    "window": WINDOW,
    "global_tokens": 64,
    "persistent": 0,
  },
  "reformer": {
    "rope_base": 10000.0,
    "qk_norm": False,
    "buckets": 32,
    "rounds": 4,
  },
}


def options_of(config: "ModelConfig", name: str) -> dict[str, Any]:
  """The options of this mixer, with those of the configuration laid over."""
  defaults = _DEFAULTS[name]
  return {**defaults, **given(config.attention, defaults)}


def make_attention(
  config: "ModelConfig", rngs: Source, *, name: str
) -> AttentionMixer:
  """The attention of this name, with the options applied."""
  options = options_of(config, name)
  return AttentionMixer(**options, rngs=rngs, **common(config))


def _make_reformer(config: "ModelConfig", rngs: Source) -> Mixer:
  return ReformerMixer(
    **options_of(config, "reformer"),
    qk_epsilon=config.qk_epsilon,
    rngs=rngs,
    **common(config),
  )


def _entry(name: str, **cells: str) -> Entry:
  """One line; all attention has the closed form of a kernel estimate."""
  make = functools.partial(make_attention, name=name)
  options = tuple(f"attention.{option}" for option in _DEFAULTS[name])
  if name == "reformer":
    make, options = _make_reformer, (*options, "qk_epsilon")
  return Entry(
    family="attention",
    make=make,
    options=options,
    objective="Σ_i s(k_i, q)‖v_i - y‖²",
    network="list of keys and values",
    optimizer="closed form",
    **cells,
  )


ENTRIES: Mapping[str, Entry] = {
  "transformer": _entry(
    "transformer",
    equation="y_t = Σ_(i≤t) softmax_i(q_t·k_i / √K) v_i",
    retention="none",
    window="all",
    state="2 T K (heads of keys)",
    cost="T² D",
    source="arXiv 1706.03762, Eq. 1; RoPE 2104.09864; grouped 2305.13245",
  ),
  "swa": _entry(
    "swa",
    equation="as transformer, over t-W < i ≤ t",
    retention="drops the oldest",
    window=f"{WINDOW} tokens",
    state="2 W K (heads of keys)",
    cost="T W D",
    source="arXiv 2505.23735, Eq. 18",
  ),
  "longformer": _entry(
    "longformer",
    equation="as swa, and over the first tokens of the document",
    retention="drops the oldest but the first",
    window=f"{WINDOW} tokens and 64 global ones",
    state="2 (W + global) K (heads of keys)",
    cost="T (W + global) D",
    source="arXiv 2004.05150, section 3.1",
  ),
  "reformer": _entry(
    "reformer",
    equation="as transformer with k = q/‖q‖ and no 1/√K, over i < t that "
    "share a bucket of q in any round; i = t if there is none",
    retention="none",
    window="all of the same bucket",
    state="2 T D + T H (rounds) buckets",
    cost="T² D (exact: no buckets are cut)",
    source="arXiv 2001.04451, Eq. 2-6",
  ),
}
