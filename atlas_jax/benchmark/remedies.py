"""What is compared: ways to keep the inner descent finite."""

import dataclasses

from atlas_jax import memory as am

DEFAULT = "default bound"


def memory_of(
  remedy: str, *, depth: int = 2, window: int = 16, chunk: int = 64
) -> am.Memory:
  """Titans' rule over a window, kept finite in one of the ways of `REMEDIES`.

  Args:
    remedy: a key of `REMEDIES`.
    depth: matrices of the memory.
    window, chunk: as in `atlas_jax.memory.Memory`.
  """
  memory = am.Memory(
    features=am.Identity(),
    network=am.MLP(depth=depth),
    optimizer=am.Momentum(),
    window=window,
    chunk=chunk,
  )
  changes = dict(REMEDIES[remedy])
  if changes.pop("layer_norm", False):
    network = dataclasses.replace(memory.network, layer_norm=True)
    changes["network"] = network
  return dataclasses.replace(memory, **changes)


# What each way changes in the memory with the default bound.
REMEDIES = {
  DEFAULT: {},
  "budget of the diagonal": {"bound": am.Bound(budget="diagonal")},
  "none": {"bound": None},
  "Huber objective, no bound": {"objective": am.Huber(), "bound": None},
  "layer norm inside, no bound": {"layer_norm": True, "bound": None},
  "clip of each token only": {
    "bound": am.Bound(damp_momentum=False, budget=None, weight_cap=None)
  },
}
