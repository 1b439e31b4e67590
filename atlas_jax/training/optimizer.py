"""The outer optimizer: AdamW under a warm-up and a cosine, with a decay mask.

Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (AdamW)
and "SGDR" (the cosine), both as in optax.
"""

import re
from typing import Any

import jax
import optax

from atlas_jax.training.config import TrainConfig
from atlas_jax.training.paths import is_stacked, path_name

# Parameters that weight decay must leave alone although they are matrices:
# gates, what every head or channel has one of, persistent tokens, and the
# network that makes Hyena's filter. The memory's learned start weights are
# among them: they are the state in which the inner descent begins, its own
# retention gate already decays them, and a start pulled to zero is a saddle of
# a deep memory.
_NEVER_DECAYED = re.compile(
  r"(^|/)(bias|scale|offset|gates|decay|rate|bonus|ridge|persistent|start"
  r"|filter|gate/down|gate/up|memory/features)(/|$)"
)


def schedule(config: TrainConfig) -> optax.Schedule:
  """Returns the learning rate as a function of the steps already taken.

  Step number n (the first is 1) has `n / warmup` of `learning_rate` while it is
  not above `warmup`, then a half cosine that reaches `floor * learning_rate`
  at step `decay_steps` (0: `steps`), and that from there on.
  """
  horizon = config.decay_steps or config.steps
  warmup = min(config.warmup, horizon)
  by_number = optax.warmup_cosine_decay_schedule(
    init_value=0.0 if warmup else config.learning_rate,
    peak_value=config.learning_rate,
    warmup_steps=warmup,
    # optax refuses a cosine of no steps.
    decay_steps=max(horizon, warmup + 1),
    end_value=config.floor * config.learning_rate,
  )
  return lambda taken: by_number(taken + 1)


def decay_mask(params: Any) -> Any:
  """Says for each parameter whether weight decay applies: a tree of bools.

  Matrices decay (projections, embeddings, convolutions). Vectors and scalars
  (norms, biases, per-head coefficients), gates and the memory's start weights
  do not. A leading axis of layers does not count as an axis.
  """

  def decays(path: Any, leaf: Any) -> bool:
    name = path_name(path)
    rank = leaf.ndim - is_stacked(name)
    return rank >= 2 and not _NEVER_DECAYED.search(name)

  return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
  """Returns global-norm clipping followed by AdamW, as the config says."""
  return optax.chain(
    optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
    optax.adamw(
      schedule(config),
      b1=config.beta1,
      b2=config.beta2,
      eps=config.epsilon,
      weight_decay=config.weight_decay,
      mask=decay_mask,
    ),
  )
