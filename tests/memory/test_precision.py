"""What the traced programs hold: named precisions, kernel operations, sizes.

A TPU rounds float32 operands of an unnamed matmul to bfloat16 and no test on
another machine would see it, so the programs themselves are read.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from atlas_jax import memory as am
from atlas_jax.memory.chunk import chunk
from atlas_jax.memory.factors import (
  Carry,
  Tokens,
  prepare,
  prepare_heads,
)
from tests.memory.cases import BATCH, HEADS, WIDTH, value_width
from tests.memory.memories import MEMORIES, MORE_MEMORIES

ALL = {**MEMORIES, **MORE_MEMORIES}
LENGTH = 8


def equations(jaxpr):
  """All equations of a program and of every program inside it."""
  for equation in jaxpr.eqns:
    yield equation
    for value in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
      if hasattr(value, "eqns"):
        yield from equations(value)
      elif hasattr(value, "jaxpr"):
        yield from equations(value.jaxpr)


def wrongly_rounded(jaxpr) -> list[str]:
  """Matmuls without a named precision, or float32 ones below the highest."""
  found = []
  for equation in equations(jaxpr):
    if equation.primitive.name == "dot_general":
      precision = equation.params["precision"]
      narrow = all(x.aval.dtype.itemsize < 4 for x in equation.invars)
      highest = (jax.lax.Precision.HIGHEST,) * 2
      if precision is None or not (narrow or precision == highest):
        found.append(str(equation))
  return found


def shapes(memory, length=LENGTH, dtype=jnp.float32, batch=BATCH, heads=HEADS):
  """Abstract parameters, tokens and state."""
  make = functools.partial(
    am.init_params,
    memory=memory,
    heads=heads,
    key_width=WIDTH,
    value_width=value_width(memory),
    dtype=dtype,
  )
  params = jax.eval_shape(make, jax.random.key(0))
  of = lambda *shape: jax.ShapeDtypeStruct(
    (batch, length, heads, *shape), dtype
  )
  matrices = len(memory.entries(WIDTH, value_width(memory)))
  gates = am.Gates(
    of(memory.retention.groups),
    of(),
    of(),
    of(memory.window),
    of() if memory.objective.gated else None,
    of(matrices) if memory.steps_once else None,
  )
  tokens = (of(WIDTH), of(WIDTH), of(value_width(memory)), gates)
  state = jax.eval_shape(
    lambda params: am.init_state(memory, params, batch, key_width=WIDTH), params
  )
  return params, tokens, state


def gradient_program(memory, arguments, **options):
  """The program of a call with its gradients."""

  def loss(params, tokens, state):
    out = am.apply(memory, params, *tokens, state, **options)
    total = jnp.sum(out.y.astype(jnp.float32)) + jnp.sum(out.inner_loss)
    weights = jax.tree.leaves(out.state.weights)
    return total + sum(jnp.sum(w) for w in weights)

  gradient = jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)
  return jax.make_jaxpr(gradient)(*arguments).jaxpr


def step_program(memory, arguments):
  params, tokens, state = arguments
  token = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype), tokens
  )
  run = functools.partial(am.step, memory)
  return jax.make_jaxpr(run)(params, *token, state).jaxpr


@pytest.mark.parametrize("name", MEMORIES)
def test_every_matmul_names_its_precision(name):
  memory = ALL[name]
  arguments = shapes(memory)
  ids = jnp.ones((BATCH, LENGTH), jnp.int32)
  options = {"segment_ids": ids, "max_segments": 2}
  program = gradient_program(memory, arguments, **options)
  count = sum(e.primitive.name == "dot_general" for e in equations(program))
  assert count > 10
  assert not wrongly_rounded(program)
  assert not wrongly_rounded(step_program(memory, arguments))


@pytest.mark.parametrize("implementation", ["associative", "reference"])
def test_other_forms_name_their_precision(implementation):
  memory = MEMORIES["atlas_pp_sketch_channels"]
  options = {"form": "associative"}
  if implementation == "reference":
    options = {"implementation": "reference"}
  assert not wrongly_rounded(
    gradient_program(memory, shapes(memory), **options)
  )


def test_bfloat16_inputs_and_operands_name_their_precision():
  memory = am.Memory(
    am.Polynomial(2, key_width=2),
    am.MLP(expansion=1.5),
    optimizer=am.Muon(every=2, dtype="bfloat16"),
    window=3,
    chunk=4,
  )
  program = gradient_program(memory, shapes(memory, dtype=jnp.bfloat16))
  assert not wrongly_rounded(program)
  assert any(
    e.primitive.name == "dot_general" and e.invars[0].aval.dtype == jnp.bfloat16
    for e in equations(program)
  )


def test_an_unnamed_matmul_is_found(monkeypatch):
  """Deep inside: in a gradient of a rematerialised scan body."""
  memory = MEMORIES["omeganet"]
  arguments = shapes(memory)
  assert not wrongly_rounded(gradient_program(memory, arguments))
  unnamed = lambda a, b: jnp.matmul(a, b)
  monkeypatch.setattr("atlas_jax.memory.coefficients.matmul", unnamed)
  assert len(wrongly_rounded(gradient_program(memory, arguments))) > 3
  one = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2)))
  assert len(wrongly_rounded(one.jaxpr)) == 1
  named = functools.partial(jnp.dot, precision="default")
  two = jax.make_jaxpr(named)(jnp.ones((2, 2)), jnp.ones((2, 2)))
  assert len(wrongly_rounded(two.jaxpr)) == 1


# What Mosaic, the compiler of TPU kernels, takes, as far as a chunk uses it.
KERNEL_OPERATIONS = {
  "abs", "add", "add_any", "and", "broadcast_in_dim", "concatenate",
  "convert_element_type", "div", "dot_general", "eq", "exp", "ge", "gt",
  "integer_pow", "iota", "le", "log", "logistic", "lt", "max", "min", "mul",
  "ne", "neg", "not", "one_minus_square", "or", "pad", "pow", "reduce_max",
  "reduce_sum", "rem",
  "reshape", "rsqrt", "select_n", "sign", "slice", "split", "sqrt", "square",
  "squeeze", "stop_gradient", "sub", "tanh", "transpose",
}  # fmt: skip
CALLS = {
  "pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call",
  "custom_vjp_call_jaxpr", "remat", "checkpoint", "remat2",
}  # fmt: skip


def refused(jaxpr) -> set[str]:
  """What a TPU kernel could not hold."""
  found = set()
  for equation in equations(jaxpr):
    name, params = equation.primitive.name, equation.params
    if name not in KERNEL_OPERATIONS | CALLS:
      found.add(name)
    if name == "slice" and any(s != 1 for s in params["strides"] or ()):
      found.add("slice with strides")
    if name == "pad" and any(
      low < 0 or high < 0 or inside
      for low, high, inside in params["padding_config"]
    ):
      found.add("pad that cuts or spreads")
    if name == "reshape" and flattens(equation):
      found.add("reshape that flattens a matrix")
    # The gradient of an empty input is made, but not by the chunk.
    if name != "broadcast_in_dim" and any(
      0 in x.aval.shape for x in equation.outvars
    ):
      found.add("empty array")
  return found


def flattens(equation) -> bool:
  """Whether all rows of a matrix are joined to one."""
  before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
  long = lambda shape: sum(n > 1 for n in shape)
  return long(before) > 1 and long(after) == 1


def chunk_program(memory, backward: bool):
  """The program of one chunk of one head, or of its pull-back."""
  params, tokens, state = shapes(memory, memory.chunk, batch=1, heads=1)

  def one_head(params, tokens, state):
    tokens = jax.tree.map(lambda x: x[0, :, 0], Tokens(*tokens))
    carry = Carry(
      jax.tree.map(lambda w: w[0, 0], state.weights),
      jax.tree.map(lambda w: w[0, 0], state.momentum),
      state.tail_key[0, :, 0],
      state.tail_value[0, :, 0],
      state.seen[0],
    )
    own = prepare_heads(memory, params, jnp.float32)
    shared = prepare(memory, params, WIDTH, jnp.float32)
    shared |= jax.tree.map(lambda p: p[0], own)
    return shared, carry, tokens

  shared, carry, tokens = jax.eval_shape(one_head, params, tokens, state)
  seen = carry.seen

  def forward(shared, carry, tokens, seen):
    after, out = chunk(memory, shared, carry._replace(seen=seen), tokens)
    return after._replace(seen=None), out

  if not backward:
    return jax.make_jaxpr(forward)(shared, carry, tokens, seen)

  def pull(shared, carry, tokens, seen, cotangent):
    run = lambda *x: forward(*x, seen)
    return jax.vjp(run, shared, carry, tokens)[1](cotangent)

  carry = carry._replace(seen=None)
  cotangent = jax.eval_shape(forward, shared, carry, tokens, seen)
  return jax.make_jaxpr(pull)(shared, carry, tokens, seen, cotangent)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", MEMORIES)
def test_a_chunk_holds_only_what_a_kernel_takes(name, backward):
  program = chunk_program(ALL[name], backward)
  assert not program.consts, "a kernel may not capture constants"
  assert not refused(program.jaxpr)


@pytest.mark.parametrize(
  ("function", "why"),
  [
    (lambda x: jnp.cumsum(x, axis=0), "cumsum"),
    (lambda x: x[::-1], "rev"),
    (lambda x: x[1::2], "slice with strides"),
    (lambda x: x.reshape(-1), "reshape that flattens a matrix"),
    (lambda x: x[:0], "empty array"),
    (lambda x: jnp.take(x, jnp.arange(2), axis=0), "gather"),
    (lambda x: jnp.sort(x, axis=0), "sort"),
    (lambda x: jax.nn.gelu(x, approximate=False), "erfc"),
  ],
)
def test_what_a_kernel_refuses_is_found(function, why):
  program = jax.make_jaxpr(function)(jnp.ones((4, 6)))
  assert why in refused(program.jaxpr)


def largest(program) -> int:
  """Number of elements of the largest array that a program makes."""
  return max(
    math.prod(getattr(out.aval, "shape", ()))
    for equation in equations(program)
    for out in equation.outvars
  )


@pytest.mark.parametrize(
  "memory",
  [
    am.Memory(
      am.Identity(),
      am.MLP(expansion=64),
      optimizer=optimizer,
      window=3,
      chunk=32,
    )
    for optimizer in (
      am.Muon(every=32),
      am.GradientDescent(),
      am.Momentum(),
    )
  ],
  ids=["atlas", "omeganet", "titans"],
)
def test_no_array_holds_the_weights_of_every_token(memory):
  """Two matrices of 1,024 numbers, 64 tokens in chunks of 32."""
  arguments = shapes(memory, 64, batch=1, heads=1)
  weights = WIDTH * 64 * WIDTH
  assert weights == 1024
  # Inputs and b x hidden arrays are smaller than the carries kept per chunk.
  dual = largest(gradient_program(memory, arguments))
  assert dual <= 40 * 64 * WIDTH
  textbook = gradient_program(memory, arguments, form="associative")
  assert largest(textbook) >= 32 * weights
  assert dual < 32 * weights / 3
