"""Options of attention, flat so that each is one flag."""

import dataclasses

from atlas_jax.config import field


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
  """Changes to the attention that `ModelConfig.mixer` names, or contains.

  Every field is None by default: the mixer's own value. An option that the
  mixer has no use for is an error.
  """

  kv_heads: int | None = field(
    None, "Heads of keys and values, which divide the others; 0: as many."
  )
  rope_base: float | None = field(
    None, "Base of the rotary position embedding; 0: none."
  )
  qk_norm: bool | None = field(None, "RMSNorm of each query and key.")
  window: int | None = field(
    None, "Tokens a token sees, itself included, in windowed attention."
  )
  global_tokens: int | None = field(
    None, "First tokens of a document that all later ones see (longformer)."
  )
  persistent: int | None = field(
    None, "Learned tokens before every text that attention always sees."
  )
  buckets: int | None = field(
    None, "Hash buckets of keys (reformer): 1, or an even number."
  )
  rounds: int | None = field(None, "Independent hashings of keys (reformer).")
