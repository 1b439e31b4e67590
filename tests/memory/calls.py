"""Calls of a memory as users make them, and gates set by hand."""

import functools

import jax
import jax.numpy as jnp

from atlas_jax import memory as am


@functools.cache
def compiled(memory):
  return jax.jit(functools.partial(am.apply, memory))


def call(memory, params, tokens):
  return compiled(memory)(params, *tokens)


def with_gates(tokens, **changes):
  """Replaces gates by constants or arrays."""
  gates = tokens.gates
  full = {
    name: jnp.broadcast_to(
      jnp.asarray(x, jnp.float64), getattr(gates, name).shape
    )
    for name, x in changes.items()
  }
  return tokens._replace(gates=gates._replace(**full))
