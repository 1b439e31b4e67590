"""The matrix memories as entries of the registry."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from atlas_jax.layers.delta_mixer import DeltaNetMixer, GatedDeltaNetMixer
from atlas_jax.layers.gla_mixer import GLAMixer
from atlas_jax.layers.initial import Source
from atlas_jax.layers.linear_attention_mixer import LinearAttentionMixer
from atlas_jax.layers.longhorn_mixer import LonghornMixer
from atlas_jax.layers.mamba2_mixer import Mamba2Mixer
from atlas_jax.layers.mesa_mixer import MesaMixer
from atlas_jax.layers.mixer import Mixer
from atlas_jax.layers.retnet_mixer import RetNetMixer
from atlas_jax.layers.rwkv7_mixer import RWKV7Mixer
from atlas_jax.models.entry import Entry, common, given

if TYPE_CHECKING:
  from atlas_jax.models.config import ModelConfig


def _entry(
  mixer: Callable[..., Mixer],
  *,
  heads: int | None = None,
  options: tuple[str, ...] = (),
  shared: tuple[str, ...] = (),
  objective: str,
  optimizer: str = "GD at M_(t-1)",
  **cells: str,
) -> Entry:
  """One line.

  Args:
    mixer: The layer.
    heads: Its own number of heads; None: that of the model.
    options: Fields of `MatrixOptions` that it takes.
    shared: Fields of `ModelConfig` that it takes, besides those all mixers do.
    objective, optimizer, cells: See `Entry`.
  """

  def make(config: "ModelConfig", rngs: Source) -> Mixer:
    arguments = {name: getattr(config, name) for name in shared}
    arguments |= common(config)
    if heads is not None:
      arguments["heads"] = heads
    return mixer(rngs=rngs, **arguments | given(config.matrix, options))

  return Entry(
    family="matrix",
    make=make,
    options=(*(f"matrix.{name}" for name in options), *shared),
    objective=objective,
    network="matrix",
    optimizer=optimizer,
    window="1 token",
    **cells,
  )


_DOT = "-⟨M k, v⟩"
_L2 = "½‖M k - v‖²"
_CONVOLVED = ("conv_width", "qk_epsilon")

ENTRIES: Mapping[str, Entry] = {
  "linear_attention": _entry(
    LinearAttentionMixer,
    options=("heads", "normalised"),
    equation="M_t = M_(t-1) + v_t k_tᵀ; y_t = RMSNorm(M_t q_t / √K). "
    "With normalised: y_t = M_t φ(q_t) / z_t·φ(q_t), φ = elu + 1, "
    "z_t = z_(t-1) + φ(k_t)",
    objective=_DOT,
    retention="none",
    state="H K V",
    cost="T D (C + K)",
    source="arXiv 2006.16236, Eq. 18-20; a norm in place of z: 2210.10340",
  ),
  "retnet": _entry(
    RetNetMixer,
    options=("heads", "expand_value", "rope_base"),
    equation="M_t = (1 - 2^(-5-h)) M_(t-1) + v_t k_tᵀ",
    objective=_DOT,
    retention="fixed scalar per head",
    state="H K V, V = 2 K",
    cost="T D (C + K)",
    source="arXiv 2307.08621, Eq. 5-8",
  ),
  "gla": _entry(
    GLAMixer,
    options=("heads", "expand_key", "expand_value", "gate_rank"),
    equation="M_t = M_(t-1) Diag(α_t) + v_t k_tᵀ",
    objective=_DOT,
    retention="per key channel",
    state="H K V, K = V / 2",
    cost="T D (C + K)",
    source="arXiv 2312.06635, Eq. 3",
  ),
  "mamba2": _entry(
    Mamba2Mixer,
    options=("expand", "head_width", "state_width"),
    shared=("conv_width",),
    equation="M_t = exp(-Δ_t A) M_(t-1) + Δ_t x_t B_tᵀ; y_t = M_t C_t + D x_t",
    objective=_DOT,
    retention="scalar per head, by the step",
    state="2 D N + 3 (2 D + 2 N), N = 128",
    cost="T D (C + N)",
    source="arXiv 2405.21060, Eq. 2",
  ),
  "deltanet": _entry(
    DeltaNetMixer,
    options=("heads", "expand_key", "expand_value", "gated"),
    shared=_CONVOLVED,
    equation="M_t = M_(t-1) (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    objective=_L2,
    retention="none",
    state="H K V + 9 D",
    cost="T D (C + K)",
    source="arXiv 2406.06484, Eq. 3",
  ),
  "gated_deltanet": _entry(
    GatedDeltaNetMixer,
    options=("heads", "expand_key", "expand_value", "gated"),
    shared=_CONVOLVED,
    equation="M_t = α_t M_(t-1) (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    objective=_L2,
    optimizer="GD at α_t M_(t-1)",
    retention="scalar per head",
    state="H K V + 3 (widths of q, k, v)",
    cost="T D (C + K)",
    source="arXiv 2412.06464, Eq. 10",
  ),
  "longhorn": _entry(
    LonghornMixer,
    heads=1,
    options=("heads", "expand", "state_width"),
    shared=("conv_width",),
    equation="M_t = M_(t-1) - δ_t ⊙ (M_(t-1) k_t - v_t) k_tᵀ, "
    "δ = β / (1 + β k·k)",
    objective="‖M - M_(t-1)‖² + ‖M k - v‖²_β",
    optimizer="implicit GD",
    retention="none",
    state="2 D K + 6 D, K = 16",
    cost="T D (C + K)",
    source="arXiv 2407.14207, Theorem 3.1 and Eq. 6",
  ),
  "rwkv7": _entry(
    RWKV7Mixer,
    options=("heads", "decay_rank", "rate_rank", "gate_rank"),
    equation="M_t = M_(t-1) (Diag(w_t) - κ_t (a_t ⊙ κ_t)ᵀ) + v_t k̃_tᵀ",
    objective=_L2,
    retention="per key channel",
    state="H K V + D",
    cost="T D (C + K)",
    source="arXiv 2503.14456, Eq. 17",
  ),
  "mesa": _entry(
    MesaMixer,
    options=("heads", "gated"),
    shared=_CONVOLVED,
    equation="G_t = α_t G_(t-1) + β_t k_t k_tᵀ; "
    "H_t = α_t H_(t-1) + β_t v_t k_tᵀ; y_t = H_t (G_t + Λ)^(-1) q_t",
    objective="Σ_i ζ_i ‖M k_i - v_i‖² + ‖M‖²_Λ",
    optimizer="exact solve (conjugate gradients)",
    retention="scalar per head",
    state="H (K V + K²) + 6 D",
    cost="T D (C + K) x iterations of the solver",
    source="arXiv 2506.05233, Eq. 7-8",
  ),
}
