"""Every mistake that a caller can make: one line that names the remedy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from atlas_jax.errors import UserError
from tests.memory.cases import make_params, make_tokens
from tests.memory.memories import MEMORIES

MEMORY = MEMORIES["linear_attention"]
IDENTITY, MATRIX = am.Identity(), am.Matrix()


def build(memory, key_width=4, value_width=4):
  key = jax.random.key(0)
  return am.init_params(
    key, memory, heads=1, key_width=key_width, value_width=value_width
  )


WRONG_VALUES = [
  (lambda: am.Memory(window=0), "window 0: use 1 or more"),
  (lambda: am.Memory(chunk=0), "chunk 0: use 1 or more"),
  (lambda: am.Memory(read="late"), "read 'late': use after, before or start"),
  (lambda: am.Memory(read="start"), "set read to after, or the optimizer"),
  (
    lambda: am.Memory(optimizer=am.ChunkMuon(), window=1),
    "set window to 1 and read to start",
  ),
  (
    lambda: am.Memory(optimizer=am.ChunkMuon(), window=2, read="start"),
    "set window to 1 and read to start",
  ),
  (
    lambda: am.Memory(objective=am.SwitchedHuber(), window=3),
    "not 3: set window to 1",
  ),
  (
    lambda: am.Memory(retention=am.KLRetention()),
    "KLRetention does not go with Muon",
  ),
  (lambda: am.Memory(rate_by_position=True), "is for plain descent"),
  (lambda: am.L2(factor=0.0), "l2 factor 0.0: use a positive"),
  (lambda: am.Lp(1.0), "lp power 1.0: use 2 or more"),
  (lambda: am.Lp(5.0), "lp power 5.0: use a positive number, at most 4"),
  (lambda: am.LqRetention(1.5), "retention power 1.5: use 2 or more"),
  (lambda: am.LqRetention(floor=0.0), "retention floor 0.0: use a positive"),
  (lambda: am.KLRetention(size=-1.0), "retention size -1.0: use a positive"),
  (lambda: am.KLRetention(groups=0), "groups 0: use 1 or more"),
  (lambda: am.ChunkMuon(steps=0), "steps 0: use 1 or more"),
  (
    lambda: am.Memory(optimizer=am.Muon(every=3), chunk=8),
    "every 3 does not divide the chunk 8: use a divisor",
  ),
  (lambda: am.Polynomial(degree=0), "degree 0: use 1 or more"),
  (lambda: am.Polynomial(sketch=0), "sketch 0: use 1 or more features"),
  (lambda: am.MLP(depth=0), "depth 0: use 1 or more"),
  (lambda: am.MLP(activation="swish"), "activation 'swish': use one of gelu"),
  (lambda: am.GatedMLP(activation="x"), "activation 'x': use one of gelu"),
  (lambda: am.MLP(expansion=0), "expansion 0: use a positive"),
  (lambda: am.GatedMLP(expansion=-1), "expansion -1: use a positive"),
  (lambda: am.Huber(0), "delta 0: use a positive"),
  (lambda: am.Muon(every=0), "every 0: use 1 or more"),
  (lambda: am.Muon(steps=0), "steps 0: use 1 or more"),
  (lambda: am.Muon(epsilon=0), "epsilon 0: use a positive"),
  (lambda: am.Muon(coefficients=()), "give one or more"),
  (lambda: am.Muon(coefficients=((1.0, 2.0),)), "triples"),
  (lambda: am.ChannelRetention(0), "groups 0: use 1 or more"),
  (
    lambda: am.Bound(budget="half"),
    "budget 'half': use full, diagonal or none",
  ),
  (lambda: am.Bound(error_clip=0.0), "error_clip 0.0: use a positive"),
  (lambda: am.Bound(weight_cap=-1.0), "weight_cap -1.0: use a positive"),
  (lambda: am.Bound(gradient_clip=0.0), "gradient_clip 0.0: use a positive"),
  (lambda: am.Bound(weight_cap=float("inf")), "weight_cap inf: use a positive"),
  (lambda: am.Muon(epsilon=1e300), "epsilon 1e.300: use a positive"),
  (lambda: am.Muon(dtype="int8"), "dtype 'int8': use bfloat16, float32"),
  (lambda: am.Huber(float("nan")), "delta nan: use a positive"),
  (lambda: am.MLP(expansion=float("inf")), "expansion inf: use a positive"),
  (lambda: am.MLP(expansion=1e6), "expansion 1000000.0: use a positive .* 256"),
  (lambda: am.MLP(depth=1.5), "depth 1.5: use 1 or more matrices"),
  (lambda: am.MLP(depth=3000), "depth 3000: use 64 or less"),
  (lambda: am.Memory(window="3"), "window 3: use 1 or more tokens"),
  (lambda: am.Memory(window=2**21), "use 1048576 or less"),
  (lambda: am.Identity(key_width=0), "key_width 0: use 1 or more"),
  (lambda: am.Polynomial(key_width=-3), "key_width -3: use 1 or more"),
  (lambda: am.Polynomial(degree=200, sketch=1), "use 32 or less"),
  (
    lambda: am.Memory(optimizer="muon"),
    "optimizer 'muon': use a value of GradientDescent, Momentum, Muon, Ch",
  ),
  (lambda: am.Memory(features="poly"), "of Identity, Polynomial"),
  (lambda: am.Memory(network=None), "of Matrix, MLP, GatedMLP"),
  (lambda: am.Memory(objective=am.MLP()), "of L2, DotProduct, Huber, Lp"),
  (lambda: am.Memory(retention=True), "NoRetention, ScalarRetention"),
  (lambda: am.Memory(bound=4.0), "bound 4.0: use a value of Bound, None"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_VALUES)
def test_wrong_values(make, message):
  with pytest.raises(UserError, match=message) as caught:
    make()
  assert "\n" not in str(caught.value)


def test_residual_between_unequal_widths():
  with pytest.raises(UserError, match=r"4 and 6.*set residual to false"):
    build(am.Memory(IDENTITY, am.MLP()), 4, 6)
  build(am.Memory(IDENTITY, am.MLP(residual=False)), 4, 6)
  build(am.Memory(IDENTITY, MATRIX), 4, 6)


def test_groups_that_do_not_divide_the_rows():
  memory = am.Memory(IDENTITY, MATRIX, retention=am.ChannelRetention(3))
  with pytest.raises(UserError, match=r"3 decay groups.*4 rows.*'matrix'"):
    build(memory)


def test_key_width_wider_than_the_keys():
  with pytest.raises(UserError, match="key_width 8 is wider than the keys"):
    build(am.Memory(am.Identity(key_width=8), MATRIX))


@pytest.fixture(scope="module")
def inputs():
  jax.config.update("jax_enable_x64", True)
  params = make_params(MEMORY)
  tokens = make_tokens(MEMORY, length=3)
  to_single = lambda x: x.astype(jnp.float32)
  single = jax.tree.map(to_single, (params, tokens))
  jax.config.update("jax_enable_x64", False)
  return single


def refuse(inputs, message, *, memory=MEMORY, state=None, options=None, **new):
  params, tokens = inputs
  with pytest.raises(UserError, match=message) as caught:
    am.apply(memory, params, *tokens._replace(**new), state, **options or {})
  assert "\n" not in str(caught.value)


def test_shapes_that_do_not_fit(inputs):
  params, tokens = inputs
  refuse(inputs, r"must both be \[B, T, H, K\]", query=tokens.query[:, 0])
  refuse(inputs, r"must both be", key=tokens.key[..., :2])
  refuse(inputs, r"must be \[B, T, H, V\] like key", value=tokens.value[:, :2])
  refuse(
    inputs, "need .*make them with init_params", value=tokens.value[..., :2]
  )
  two = lambda x: x[:, :, :1]
  refuse((params, jax.tree.map(two, tokens)), "but 1 heads of this memory need")
  empty = jax.tree.map(lambda x: x[:, :0], tokens)
  refuse((params, empty), "one token or more")
  other = am.Memory(IDENTITY, am.MLP(residual=False))
  refuse(inputs, "start weights 'in' are None", memory=other)


def test_a_state_of_another_memory(inputs):
  params, tokens = inputs
  state = am.apply(MEMORY, params, *tokens).state
  for change, part in (
    ({"chunk": MEMORY.chunk + 1}, "pending"),
    ({"window": MEMORY.window + 1}, "pending.gates.window"),
  ):
    other = dataclasses.replace(MEMORY, **change)
    wrong = am.init_state(other, params, 2)
    refuse(inputs, rf"does not belong to this memory.*{part}", state=wrong)
  refuse(inputs, "does not belong", state=am.init_state(MEMORY, params, 3))
  refuse(inputs, "does not belong", state=state._replace(momentum={"x": 0.0}))
  token = jax.tree.map(lambda x: x[:, 0], tokens)
  with pytest.raises(UserError, match="does not belong"):
    am.step(MEMORY, params, *token, am.init_state(MEMORY, params, 3))


def test_documents_that_are_not_aligned(inputs):
  ids = jnp.array([[1, 1, 1], [1, 2, 2]], jnp.int32)
  aligned = {"segment_ids": ids, "aligned": True}
  refuse(inputs, "starts at token 1 of row 1", options=aligned)
  mask = jnp.ones((2, 3), bool)
  refuse(inputs, "give no mask", options={**aligned, "mask": mask})


def test_too_many_documents_inside_jit_give_no_number(inputs):
  """Rows that fit are as they are alone."""
  params, tokens = inputs
  ids = jnp.array([[1, 1, 1], [1, 2, 3]], jnp.int32)
  run = lambda ids: am.apply(
    MEMORY, params, *tokens, segment_ids=ids, max_segments=2
  )
  y = jax.jit(run)(ids).y
  assert jnp.all(jnp.isnan(y[1]))
  fitting = jax.jit(run)(ids.at[1, 2].set(2)).y
  np.testing.assert_array_equal(y[0], fitting[0])
  assert jnp.all(jnp.isfinite(fitting))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_integers_are_refused(inputs, name):
  whole = getattr(inputs[1], name).astype(jnp.int32)
  refuse(inputs, f"{name} is int32: give floating", **{name: whole})


@pytest.mark.parametrize("gate", am.Gates._fields)
def test_gates_of_another_shape(inputs, gate):
  gates = inputs[1].gates
  wrong = jnp.zeros((2, 3, 5, 7))
  refuse(inputs, f"gate {gate} is", gates=gates._replace(**{gate: wrong}))


def test_no_retention_wants_no_decay(inputs):
  """Nothing falls back in silence."""
  gates = inputs[1].gates._replace(log_decay=jnp.zeros((2, 3, 2, 1)))
  refuse(inputs, r"log_decay is .* but must be \(2, 3, 2, 0\)", gates=gates)


def test_contradictory_arguments(inputs):
  params, _ = inputs
  state = am.init_state(MEMORY, params, 2, key_width=4)
  ids = jnp.ones((2, 3), jnp.int32)
  mask = jnp.ones((2, 3), bool)
  layout = am.layout.plan(3, MEMORY.chunk, 2)
  refuse(inputs, "form 'fast'", options={"form": "fast"})
  refuse(
    inputs,
    "implementation 'cuda': use one of auto, reference, xla",
    options={"implementation": "cuda"},
  )
  for more in ({"mask": mask}, {"segment_ids": ids}, {"aligned": True}):
    refuse(inputs, "give it alone", options={"layout": layout} | more)
  refuse(
    inputs,
    "give no state",
    state=state,
    options={"aligned": True, "segment_ids": ids},
  )
  refuse(inputs, "need segment_ids", options={"aligned": True})
  refuse(
    inputs,
    "segment id is 0",
    options={"mask": mask, "segment_ids": ids.at[0, 0].set(0)},
  )
  many = jnp.arange(1, 7, dtype=jnp.int32).reshape(2, 3)
  refuse(
    inputs,
    "3 documents, more than max_segments 2",
    options={"segment_ids": many, "max_segments": 2},
  )


def test_a_step_of_an_unknown_implementation(inputs):
  params, tokens = inputs
  state = am.init_state(MEMORY, params, 2, key_width=4)
  now = jax.tree.map(lambda x: x[:, 0], tokens)
  with pytest.raises(UserError, match="implementation 'pallas'"):
    am.step(MEMORY, params, *now, state, implementation="pallas")
