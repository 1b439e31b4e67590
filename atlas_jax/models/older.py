"""Recurrent cells and the long convolution as entries of the registry."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from atlas_jax.layers.hyena_mixer import HyenaMixer
from atlas_jax.layers.initial import Source
from atlas_jax.layers.mixer import Mixer
from atlas_jax.layers.recurrent_cell_mixer import RecurrentCellMixer
from atlas_jax.models.entry import Entry, common, given

if TYPE_CHECKING:
  from atlas_jax.models.config import ModelConfig


def _make_cell(config: "ModelConfig", rngs: Source, *, cell: str) -> Mixer:
  return RecurrentCellMixer(cell=cell, rngs=rngs, **common(config))


def _make_hyena(config: "ModelConfig", rngs: Source) -> Mixer:
  options = given(config.hyena, ("max_length", "filter_width"))
  return HyenaMixer(**options, rngs=rngs, **common(config))


ENTRIES: Mapping[str, Entry] = {
  "lstm": Entry(
    family="older",
    make=functools.partial(_make_cell, cell="lstm"),
    options=(),
    equation="c_t = f_t ⊙ c_(t-1) + i_t ⊙ tanh(W x_t + U h_(t-1)); "
    "h_t = o_t ⊙ tanh(c_t)",
    objective="none",
    network="vectors c, h",
    optimizer="none",
    retention="gate f_t per channel",
    window="1 token",
    state="2 D",
    cost="T D², token by token",
    source="Hochreiter & Schmidhuber 1997 (doi 10.1162/neco.1997.9.8.1735)",
  ),
  "gru": Entry(
    family="older",
    make=functools.partial(_make_cell, cell="gru"),
    options=(),
    equation="h_t = (1 - z_t) ⊙ tanh(W x_t + r_t ⊙ U h_(t-1)) + z_t ⊙ h_(t-1)",
    objective="none",
    network="vector h",
    optimizer="none",
    retention="gate z_t per channel",
    window="1 token",
    state="D",
    cost="T D², token by token",
    source="arXiv 1406.1078, Eq. 5-8, but r_t on U h_(t-1), as in Flax",
  ),
  "hyena": Entry(
    family="older",
    make=_make_hyena,
    options=("hyena",),
    equation="u = x1 ⊙ v; y = W_o (x2 ⊙ (h * u + D ⊙ u)), "
    "h_t = MLP_sin(t) exp(-|δ| t)",
    objective="none",
    network="filter of max_length taps",
    optimizer="none",
    retention="exp(-|δ| t) per channel",
    window="max_length tokens",
    state="T D + 6 D",
    cost="T log T D; packed documents T log² T D",
    source="arXiv 2302.10866, Def. 3.1",
  ),
}
