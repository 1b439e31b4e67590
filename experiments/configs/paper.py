"""What all presets of the paper's sizes share: Table 7 and Appendix E.

AdamW with weight decay 0.1, a cosine schedule, batches of 0.5 million tokens,
a training context of 4,096 tokens. The betas, the clip, the warm-up and the
last learning rate are not stated there; those of `TrainConfig` and a warm-up of
2 % of the steps are used. Activations are bfloat16; memories, norms and gates
stay float32.
"""

from atlas_jax.data.config import DataConfig
from atlas_jax.models.config import ModelConfig
from atlas_jax.training.config import ExperimentConfig, TrainConfig

_CONTEXT = 4096
_BATCH = 128  # 524,288 tokens a step


def paper_size(
  mixer: str,
  *,
  layers: int,
  dim: int,
  heads: int,
  learning_rate: float,
  tokens: float,
) -> ExperimentConfig:
  """One row of Table 7.

  Args:
    mixer: The memory of every block, by its name in `ModelConfig.mixer`.
    layers: Blocks.
    dim: Width of the residual stream.
    heads: Memories per block.
    learning_rate: Peak learning rate.
    tokens: Training tokens in all.
  """
  steps = round(tokens / (_BATCH * _CONTEXT))
  return ExperimentConfig(
    model=ModelConfig(
      mixer=mixer, layers=layers, dim=dim, heads=heads, dtype="bfloat16"
    ),
    data=DataConfig(window=_CONTEXT),
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
