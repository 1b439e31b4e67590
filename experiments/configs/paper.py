"""What all presets of the paper's sizes share: Table 7 and Appendix E.

AdamW with weight decay 0.1, a cosine schedule, batches of 0.5 million tokens,
a training context of 4,096 tokens. The betas, the clip, the warm-up and the
last learning rate are not stated there; those of `TrainConfig` and a warm-up of
2 % of the steps are used. Activations are bfloat16; memories, norms and gates
stay float32.

Whatever the mixer, a model has as many parameters, within 2 %, as a
transformer of these sizes whose SwiGLU is 8/3 as wide as the stream: the width
of its own SwiGLU is chosen so.
"""

from atlas_jax.data.config import DataConfig
from atlas_jax.models.config import (
  HybridOptions,
  MemoryOptions,
  ModelConfig,
)
from atlas_jax.models.presets import MIXERS
from atlas_jax.models.registry import mixers_of
from atlas_jax.training.config import ExperimentConfig, TrainConfig

_CONTEXT = 4096
_ALIGN = 64  # The chunk of most memories, so that all read equal batches.
_BATCH = 128  # 524,288 tokens a step


def whole_turns(layers: int, mixer: str, pattern: tuple[str, ...]) -> int:
  """As many layers, or a few more, in which all mixers have equal turns."""
  turn = len(mixers_of(mixer, pattern))
  return -(-layers // turn) * turn


def _memory(mixers: tuple[str, ...], inside: str | None) -> MemoryOptions:
  """A smaller memory where the projections alone nearly fill a block."""
  if "mac" in mixers and (inside is None or inside in MIXERS):
    return MemoryOptions(expansion=1.0)
  return MemoryOptions()


def paper_size(
  mixer: str,
  pattern: tuple[str, ...],
  memory: str | None,
  *,
  layers: int,
  dim: int,
  heads: int,
  learning_rate: float,
  tokens: float,
) -> ExperimentConfig:
  """One row of Table 7.

  Args:
    mixer, pattern: The mixers of the blocks, as in `ModelConfig`.
    memory: The memory inside hybrids; None: their own choice.
    layers: Blocks; rounded up to a multiple of the mixers that take turns.
    dim: Width of the residual stream.
    heads: Memories per block.
    learning_rate: Peak learning rate.
    tokens: Training tokens in all.
  """
  steps = round(tokens / (_BATCH * _CONTEXT))
  return ExperimentConfig(
    model=ModelConfig(
      mixer=mixer,
      pattern=pattern,
      layers=whole_turns(layers, mixer, pattern),
      dim=dim,
      heads=heads,
      match="transformer",
      memory=_memory(mixers_of(mixer, pattern), memory),
      hybrid=HybridOptions(memory=memory),
      dtype="bfloat16",
    ),
    data=DataConfig(window=_CONTEXT, align=_ALIGN),
    train=TrainConfig(
      steps=steps,
      batch=_BATCH,
      learning_rate=learning_rate,
      warmup=steps // 50,
      weight_decay=0.1,
      eval_every=1000,
      checkpoint_every=1000,
    ),
  )
