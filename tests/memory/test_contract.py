"""The contract of the memory, for every memory of the table.

The fast forms are the token-by-token definition; any split is one call;
padding and packing are invisible; nothing looks ahead; rows are independent;
every parameter matters.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import memory as am
from tests.memory.cases import (
  BATCH,
  LENGTH,
  Made,
  Result,
  assert_close,
  cached,
  differentiated,
  fresh_state,
  join_state,
  make_params,
  make_probe,
  make_tokens,
  same_bits,
  split_state,
  stepped,
)
from tests.memory.memories import MEMORIES, MORE_MEMORIES

pytestmark = pytest.mark.usefixtures("x64")

LIMIT = 1e-8
ALL = {**MEMORIES, **MORE_MEMORIES}
# The textbook form shares all but `associative.py` with the dual form.
ASSOCIATIVE = ("atlas_pp_sketch_channels", "titans")

every_memory = pytest.mark.parametrize(
  "name",
  [
    *MEMORIES,
    *(pytest.param(name, marks=pytest.mark.full) for name in MORE_MEMORIES),
  ],
)


class Case(NamedTuple):
  """A memory with inputs, and a state whose rows are at different places."""

  memory: am.Memory
  params: Any
  tokens: Any
  state: am.MemoryState
  probe: Made


@functools.cache
def case_of(name) -> Case:
  memory = ALL[name]
  params = make_params(memory)
  probe = make_probe(memory, params)
  before = make_tokens(memory, seed=3)
  mask = np.arange(LENGTH)[None] < np.array([[6], [3]])
  run = differentiated(memory)
  fresh = fresh_state(memory, params)
  state = run(params, before, fresh, mask, ONE_DOCUMENT, probe).made.state
  return Case(memory, params, make_tokens(memory), state, probe)


ALL_VALID = np.ones((BATCH, LENGTH), bool)
ONE_DOCUMENT = np.ones((BATCH, LENGTH), np.int32)
LEFT = np.arange(LENGTH)[None] >= np.array([[4], [9]])
RIGHT = np.arange(LENGTH)[None] < np.array([[11], [1]])
BETWEEN = np.array(
  [
    [1, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0],
    [0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1],
  ]
).astype(bool)
NONE_IN_ONE_ROW = np.stack([np.zeros(LENGTH, bool), LEFT[0]])
# Documents of one token, inside a chunk, over several; ids in any order.
DOCUMENTS = np.array(
  [
    [7, 7, 7, 7, 7, 2, 3, 3, 3, 3, 3, 3, 3],
    [1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 9, 9, 9],
  ],
  np.int32,
)
PADDED_DOCUMENTS = np.array(
  [
    [0, 0, 5, 5, 5, 0, 5, 2, 0, 2, 2, 0, 0],
    [1, 1, 0, 0, 0, 2, 2, 2, 2, 2, 2, 3, 1],
  ],
  np.int32,
)
PADDINGS = {
  "left": (LEFT, ONE_DOCUMENT),
  "right": (RIGHT, ONE_DOCUMENT),
  "between": (BETWEEN, ONE_DOCUMENT),
  "whole_row": (NONE_IN_ONE_ROW, ONE_DOCUMENT),
  "documents": (ALL_VALID, DOCUMENTS),
  "padded_documents": (PADDED_DOCUMENTS > 0, PADDED_DOCUMENTS),
}
every_padding = pytest.mark.parametrize("padding", PADDINGS)


@every_memory
def test_dual_form_is_the_definition(name):
  """Outputs, state, inner loss and all gradients, however it is packed."""
  memory, params, tokens, state, probe = case_of(name)
  for mask, documents in [
    (ALL_VALID, ONE_DOCUMENT),
    (BETWEEN, DOCUMENTS),
  ]:
    for start in (state, fresh_state(memory, params)):
      arguments = (params, tokens, start, mask, documents, probe)
      want = differentiated(memory, "reference")(*arguments)
      got = differentiated(memory)(*arguments)
      assert_close(got, want, LIMIT)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name in ASSOCIATIVE else [pytest.mark.full])
    for name in ALL
  ],
)
def test_associative_form_is_the_dual_form(name):
  memory, params, tokens, state, probe = case_of(name)
  arguments = (params, tokens, state, BETWEEN, DOCUMENTS, probe)
  want = differentiated(memory)(*arguments)
  got = differentiated(memory, form="associative")(*arguments)
  assert_close(got, want, LIMIT)


@every_memory
@every_padding
def test_padding_and_packing_are_invisible(name, padding):
  """As every document alone, with NaN where nothing is."""
  memory, params, tokens, state, probe = case_of(name)
  mask, documents = PADDINGS[padding]
  run = differentiated(memory)
  garbage = jax.tree.map(lambda x: where(mask, x, np.nan), tokens)
  got = run(params, garbage, state, mask, documents, probe)
  assert_close(got, separately(run, case_of(name), mask, documents), LIMIT)
  for gradient in jax.tree.leaves(got.tokens):
    assert np.all(np.asarray(gradient)[~mask] == 0)
  for made in (got.made.y, got.made.inner_loss):
    assert np.all(np.asarray(made)[~mask] == 0)


@every_memory
def test_any_split_is_one_call(name):
  memory, params, tokens, state, probe = case_of(name)
  run = differentiated(memory)
  whole = run(params, tokens, state, ALL_VALID, ONE_DOCUMENT, probe).made
  random = np.random.default_rng(0)
  for pieces in (2, 3, 5):
    cuts = np.sort(random.choice(np.arange(1, LENGTH), pieces - 1, False))
    now, y, loss = state, [], []
    for start, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True):
      place = np.arange(LENGTH)
      mask = np.broadcast_to((place >= start) & (place < stop), (BATCH, LENGTH))
      out = run(params, tokens, now, mask, ONE_DOCUMENT, probe).made
      now = out.state
      y.append(out.y[:, start:stop])
      loss.append(out.inner_loss[:, start:stop])
    got = Made(jnp.concatenate(y, 1), jnp.concatenate(loss, 1), now)
    assert_close(got, whole, LIMIT)


@every_memory
def test_steps_are_one_call(name):
  """Also where some rows have no token and all are at different places."""
  memory, params, tokens, state, probe = case_of(name)
  run, step = differentiated(memory), stepped(memory)
  whole = run(params, tokens, state, BETWEEN, ONE_DOCUMENT, probe).made
  now, y, loss = cached(memory)(params, state), [], []
  for t in range(LENGTH):
    token = jax.tree.map(lambda x, t=t: x[:, t], tokens)
    out = step(params, *token, now, valid=BETWEEN[:, t])
    now = out.state
    y.append(out.y)
    loss.append(out.inner_loss)
  got = Made(jnp.stack(y, 1), jnp.stack(loss, 1), am.without_cache(now))
  assert_close(got, whole, LIMIT)


@every_memory
def test_nothing_looks_ahead(name):
  """Later inputs change no earlier bit, and get no gradient from it."""
  memory, params, tokens, state, probe = case_of(name)
  run = differentiated(memory)
  other = make_tokens(memory, seed=8)
  base = run(params, tokens, state, ALL_VALID, ONE_DOCUMENT, probe).made
  for t in (1, 6, 7, LENGTH - 1):
    early = np.broadcast_to(np.arange(LENGTH) < t, (BATCH, LENGTH))
    mixed = jax.tree.map(functools.partial(where, early), tokens, other)
    before = Made(
      where(early, probe.y, 0.0),
      where(early, probe.inner_loss, 0.0),
      jax.tree.map(jnp.zeros_like, probe.state),
    )
    got = run(params, mixed, state, ALL_VALID, ONE_DOCUMENT, before)
    for made, want in zip(got.made, base, strict=True):
      if isinstance(made, jax.Array):
        assert same_bits(made[:, :t], want[:, :t])
    for gradient in jax.tree.leaves(got.tokens):
      assert np.all(np.asarray(gradient)[:, t:] == 0)


@every_memory
def test_rows_are_independent_and_repeat_to_the_bit(name):
  memory, params, tokens, state, probe = case_of(name)
  run = differentiated(memory)
  first_row = np.array([True, False])
  spoilt = jax.tree.map(lambda x: where(first_row, x, np.nan), tokens)
  base = run(params, tokens, state, ALL_VALID, ONE_DOCUMENT, probe)
  got = run(params, spoilt, state, ALL_VALID, ONE_DOCUMENT, probe)
  again = run(params, tokens, state, ALL_VALID, ONE_DOCUMENT, probe)
  assert same_bits(again, base)
  row = lambda result: jax.tree.map(
    lambda x: x[0], (result.made, result.tokens, result.state)
  )
  assert same_bits(row(got), row(base))
  assert not np.any(np.isfinite(got.made.y[1]))


@every_memory
def test_every_parameter_and_input_matters(name):
  memory, params, tokens, state, probe = case_of(name)
  run = differentiated(memory)
  got = run(params, tokens, state, ALL_VALID, ONE_DOCUMENT, probe)
  carried = (got.state.weights, got.state.momentum)
  # Only a document that starts in the call starts from the parameters.
  fresh = run(params, tokens, state, ALL_VALID, DOCUMENTS, probe)
  for path, gradient in jax.tree.leaves_with_path((fresh.params, carried)):
    assert np.all(np.asarray(gradient) != 0), jax.tree_util.keystr(path)
  gradients = got.tokens._asdict() | got.tokens.gates._asdict()
  del gradients["gates"]
  if not memory.has_momentum:
    del gradients["log_momentum"]
  for name, gradient in gradients.items():
    if gradient is None or not gradient.size:
      continue
    # Some gates act on what is not there yet at the start of a row, thresholds
    # on tokens beyond them, and tokens of a large chunk when it is whole.
    least = 0.3 if name == "threshold" or memory.steps_once else 0.6
    used = np.mean(np.asarray(gradient) != 0)
    assert used > least, f"{name}: only {used:.0%} matter"


@every_memory
def test_gradients_are_slopes(name):
  """Along a random direction of everything at once, by central difference."""
  memory, params, tokens, state, probe = case_of(name)
  run = differentiated(memory)
  random = np.random.default_rng(4)
  floats, counts = split_state(state)
  point = (params, tokens, floats)
  direction = jax.tree.map(
    lambda x: jnp.asarray(random.normal(size=x.shape)), point
  )

  def value(step):
    moved = jax.tree.map(lambda x, d: x + step * d, point, direction)
    out = run(
      *moved[:2], join_state(moved[2], counts), ALL_VALID, DOCUMENTS, probe
    ).made
    return dot(probe, out._replace(state=split_state(out.state)[0]))

  step = 1e-6
  slope = (value(step) - value(-step)) / (2 * step)
  got = run(params, tokens, state, ALL_VALID, DOCUMENTS, probe)
  want = dot((got.params, got.tokens, got.state), direction)
  np.testing.assert_allclose(slope, want, rtol=1e-6)


def dot(one, two) -> float:
  """Inner product of two trees of arrays."""
  terms = jax.tree.map(
    lambda a, b: np.vdot(np.asarray(a), np.asarray(b)), one, two
  )
  return sum(jax.tree.leaves(terms))


def where(flags, yes, no):
  """Chooses by leading axes."""
  flags = np.asarray(flags)
  flags = flags.reshape(*flags.shape, *[1] * (np.ndim(yes) - flags.ndim))
  return jnp.where(flags, yes, no)


def separately(run, case: Case, mask, documents) -> Result:
  """What a packed call must give, from one call for each document.

  The k-th call holds the k-th document of every row, at the front.
  """
  memory, params, tokens, state, probe = case
  rows = [places_of(m, d) for m, d in zip(mask, documents, strict=True)]
  y, loss = np.zeros_like(probe.y), np.zeros_like(probe.inner_loss)
  token_gradients = jax.tree.map(np.zeros_like, jax.tree.map(np.array, tokens))
  param_gradients, state_gradients = None, None
  states = [None] * BATCH
  for k in range(max(1, *map(len, rows))):
    places = [row[k] if k < len(row) else [] for row in rows]
    last = np.array([k == max(0, len(row) - 1) for row in rows])
    start = state if k == 0 else fresh_state(memory, params)
    part = Made(
      to_front(probe.y, places),
      to_front(probe.inner_loss, places),
      jax.tree.map(lambda w, last=last: where(last, w, 0.0), probe.state),
    )
    here = np.arange(LENGTH)[None] < np.array([[len(p)] for p in places])
    moved = jax.tree.map(functools.partial(to_front, places=places), tokens)
    got = run(params, moved, start, here, ONE_DOCUMENT, part)
    for r, place in enumerate(places):
      n = len(place)
      y[r, place] = got.made.y[r, :n]
      loss[r, place] = got.made.inner_loss[r, :n]
      for all_, one in zip(
        jax.tree.leaves(token_gradients),
        jax.tree.leaves(got.tokens),
        strict=True,
      ):
        all_[r, place] = one[r, :n]
      if last[r]:
        states[r] = jax.tree.map(lambda x, r=r: x[r], got.made.state)
    if k == 0:
      param_gradients, state_gradients = got.params, got.state
    else:
      through_start = jax.tree.map(lambda g: g.sum(0), got.state.weights)
      param_gradients = jax.tree.map(jnp.add, param_gradients, got.params)
      param_gradients["start"] = jax.tree.map(
        jnp.add, param_gradients["start"], through_start
      )
  return Result(
    Made(
      jnp.asarray(y),
      jnp.asarray(loss),
      jax.tree.map(lambda *x: jnp.stack(x), *states),
    ),
    param_gradients,
    jax.tree.map(jnp.asarray, token_gradients),
    state_gradients,
  )


def places_of(mask, documents) -> list[np.ndarray]:
  """The places of each document of a row; a change of id starts a new one."""
  valid = np.flatnonzero(mask)
  changes = np.flatnonzero(np.diff(documents[valid])) + 1
  return [p for p in np.split(valid, changes) if len(p)]


def to_front(x, places):
  """Moves the named places of each row to its front; zeros behind."""
  out = np.zeros_like(x)
  for r, place in enumerate(places):
    out[r, : len(place)] = np.asarray(x)[r, place]
  return jnp.asarray(out)
