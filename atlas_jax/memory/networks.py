"""Memory networks, each written once over an abstract `linear`.

A network is a table of matrices (`entries`) and one function `apply(linear,
x)` that uses each matrix once, as `linear(name, x)`, and never mixes tokens.
What `linear` does decides what is computed: the plain product gives the
forward pass, a recording product with an added zero gives every token's
gradient as a rank-one factor pair, and a product with the chunk's sums gives
the read-out at the weights of each token (see `chunk.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.errors import UserError
from atlas_jax.memory import checks
from atlas_jax.memory.features import Features, Identity, narrow

Linear = Callable[[str, Array], Array]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  # The tanh form: a TPU kernel has no error function.
  "gelu": lambda x: jax.nn.gelu(x, approximate=True),
  "silu": jax.nn.silu,
  "relu": jax.nn.relu,
  "tanh": jnp.tanh,
}

# Every matrix is compiled by itself.
LARGEST_DEPTH = 64

# Of the width of values.
LARGEST_EXPANSION = 256

_NORM_EPSILON = 1e-6


class Entry(NamedTuple):
  """One matrix [rows, lift.size(inputs)] of a memory network."""

  inputs: int
  rows: int
  lift: Features

  @property
  def shape(self) -> tuple[int, int]:
    return self.rows, self.lift.size(self.inputs)


@dataclasses.dataclass(frozen=True)
class Matrix:
  """`y = W map(x)`: a linear memory over the features, without residual."""

  def entries(
    self, features: Features, key_width: int, value_width: int
  ) -> dict[str, Entry]:
    width = features.key_width or key_width
    return {"matrix": Entry(width, value_width, features)}

  def apply(
    self, linear: Linear, x: Float[Array, "n k"], features: Features, shared
  ) -> Float[Array, "n v"]:
    return linear("matrix", narrow(features, x, shared["features"]))


@dataclasses.dataclass(frozen=True)
class MLP:
  """`y = x + norm(W_out act(W ... act(W_in map(x))))` (Eq. 42).

  Attributes:
    depth: number of matrices, at least 1.
    expansion: hidden width as a multiple of the value width.
    activation: a key of `ACTIVATIONS`.
    residual: add the raw key or query; needs equal key and value widths.
    layer_norm: normalise before the residual is added; its scale and offset
      are learned outside the memory.
    bias: give every matrix after the first a bias (the first one has a
      constant feature when its features have one).
  """

  depth: int = 2
  expansion: float = 4.0
  activation: str = "gelu"
  residual: bool = True
  layer_norm: bool = False
  bias: bool = False

  def __post_init__(self):
    checks.count("memory depth", self.depth, " matrices", most=LARGEST_DEPTH)
    _check_hidden(self)

  def entries(
    self, features: Features, key_width: int, value_width: int
  ) -> dict[str, Entry]:
    width = features.key_width or key_width
    hidden = max(1, round(self.expansion * value_width))
    lift = Identity(bias=self.bias)
    names = _layer_names(self.depth)
    table = {}
    for i, name in enumerate(names):
      table[name] = Entry(
        width if i == 0 else hidden,
        value_width if i == len(names) - 1 else hidden,
        features if i == 0 else lift,
      )
    return table

  def apply(
    self, linear: Linear, x: Float[Array, "n k"], features: Features, shared
  ) -> Float[Array, "n v"]:
    activation = ACTIVATIONS[self.activation]
    names = _layer_names(self.depth)
    h = linear(names[0], narrow(features, x, shared["features"]))
    for name in names[1:]:
      h = linear(name, activation(h))
    return _finish(self, h, x, shared)


@dataclasses.dataclass(frozen=True)
class GatedMLP:
  """`y = x + norm(W_out (act(W_in map(x)) * (W_gate map(x))))` (Eq. 43).

  All three matrices are memory. Attributes as in `MLP`.
  """

  expansion: float = 4.0
  activation: str = "gelu"
  residual: bool = True
  layer_norm: bool = False
  bias: bool = False

  def __post_init__(self):
    _check_hidden(self)

  def entries(
    self, features: Features, key_width: int, value_width: int
  ) -> dict[str, Entry]:
    width = features.key_width or key_width
    hidden = max(1, round(self.expansion * value_width))
    return {
      "in": Entry(width, hidden, features),
      "gate": Entry(width, hidden, features),
      "out": Entry(hidden, value_width, Identity(bias=self.bias)),
    }

  def apply(
    self, linear: Linear, x: Float[Array, "n k"], features: Features, shared
  ) -> Float[Array, "n v"]:
    z = narrow(features, x, shared["features"])
    hidden = ACTIVATIONS[self.activation](linear("in", z)) * linear("gate", z)
    return _finish(self, linear("out", hidden), x, shared)


Network = Matrix | MLP | GatedMLP


def layer_norm(
  x: Float[Array, "n v"], shared: dict[str, Any]
) -> Float[Array, "n v"]:
  """Layer norm over channels with the outer parameters `scale`, `offset`."""
  centred = x - jnp.mean(x, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
  normal = centred * jax.lax.rsqrt(variance + _NORM_EPSILON)
  return normal * shared["scale"][None] + shared["offset"][None]


def _layer_names(depth: int) -> list[str]:
  if depth == 1:
    return ["out"]
  return ["in", *(f"hidden_{i}" for i in range(1, depth - 1)), "out"]


def _finish(network: MLP | GatedMLP, h: Array, x: Array, shared) -> Array:
  if network.layer_norm:
    h = layer_norm(h, shared["norm"])
  return x + h if network.residual else h


def _check_hidden(network: MLP | GatedMLP) -> None:
  if network.activation not in ACTIVATIONS:
    raise UserError(
      f"memory activation {network.activation!r}: use one of "
      f"{', '.join(sorted(ACTIVATIONS))}"
    )
  checks.positive("memory expansion", network.expansion, most=LARGEST_EXPANSION)
