"""The contract of the delta family's recurrences, as pure functions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.errors import UserError
from tests.layers.helpers import assert_close, finite, jit
from tests.recurrences.delta_cases import (
  CHUNK,
  LENGTH,
  MORE_OPS,
  OPS,
  TIMELESS,
  along,
  compiled,
  documents,
  over_time,
  slopes,
  tokens_of,
)

every_op = pytest.mark.parametrize("name", OPS)


@pytest.fixture(scope="module", autouse=True)
def x64():
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(
  "name",
  [
    *OPS,
    "rwkv7_bounded",
    *(
      pytest.param(name, marks=pytest.mark.full)
      for name in MORE_OPS
      if name != "rwkv7_bounded"
    ),
  ],
)
def test_chunks_are_the_recurrence_in_values_and_slopes(name):
  want_slope, want = slopes(name, "reference")(tokens_of(name), *documents())
  for path, leaf in jax.tree_util.tree_leaves_with_path(want_slope):
    assert jnp.any(leaf != 0), path
  for kind, limit in ((jnp.float64, 1e-8), (jnp.float32, 1e-5)):
    slope, out = slopes(name)(tokens_of(name, kind), *documents())
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(kind)}
    assert_close(out, want, limit)
    assert_close(slope, want_slope, limit)


@every_op
def test_any_split_and_any_steps_are_one_call(name):
  args = tokens_of(name)
  y, state = compiled(name)(args)
  parts, after = [], args["state"]
  borders = (*range(0, LENGTH, CHUNK + 1), *range(69, LENGTH + 1))
  assert {*np.diff(borders)} == {1, CHUNK + 1}
  for start, stop in itertools.pairwise(borders):
    part = over_time(lambda x, a=start, b=stop: x[:, a:b], args)
    out, after = compiled(name)(part | {"state": after})
    parts.append(out)
  assert_close((jnp.concatenate(parts, axis=1), after), (y, state), 1e-8)


@pytest.mark.parametrize("name", [*OPS, "rwkv7_bounded"])
def test_documents_and_padding_do_not_see_each_other(name):
  args, (restart, valid) = tokens_of(name), documents()
  broken = lambda x: jnp.where(along(valid, x), x, jnp.nan)
  slope, out = slopes(name)(over_time(broken, args), restart, valid)
  assert finite((slope, out))
  assert jnp.all(out[0][~valid] == 0)
  for leaf in (slope[k] for k in slope if k not in TIMELESS):
    assert jnp.all(leaf[~valid] == 0)
  # In row 0 the state goes on up to token 20; in row 1 nothing sees it.
  by_state = jax.tree.leaves(slope["state"])
  assert all(jnp.any(x[0] != 0) and jnp.all(x[1] == 0) for x in by_state)
  fresh = jax.tree.map(jnp.zeros_like, args["state"])
  index = jnp.arange(LENGTH)[None]
  for start, stop, state in ((0, 20, args["state"]), (50, LENGTH, fresh)):
    own = valid & (index >= start) & (index < stop)
    hidden = lambda x, own=own: jnp.where(along(own, x), x, jnp.nan)
    alone = over_time(hidden, args) | {"state": state}
    _, (y, last) = slopes(name)(alone, jnp.zeros_like(restart), own)
    assert_close(jnp.where(along(own, y), out[0], 0.0)[:1], y[:1], 1e-8)
  first = lambda tree: jax.tree.map(lambda x: x[:1], tree)
  assert_close(first(out[1]), first(last), 1e-8)


@every_op
def test_outputs_do_not_depend_on_later_tokens_or_other_rows(name):
  args, other = (tokens_of(name, jnp.float32, seed) for seed in (0, 1))
  other["ridge"] = args.get("ridge")
  call = lambda args: slopes(name)(args, *documents())[1][0]
  y = call(args)
  later = {
    k: x if k in TIMELESS else x.at[:, 40:].set(other[k][:, 40:])
    for k, x in args.items()
  }
  np.testing.assert_array_equal(call(later)[:, :40], y[:, :40])
  assert not jnp.array_equal(call(later)[:, 40], y[:, 40])
  below = {
    k: jax.tree.map(lambda a, b: a.at[1:].set(b[1:]), x, other[k])
    for k, x in args.items()
    if k != "ridge"
  }
  np.testing.assert_array_equal(call(args | below)[0], y[0])
  assert not jnp.array_equal(call(args | below)[1], y[1])


@pytest.mark.parametrize("name", [*OPS, "rwkv7_bounded"])
def test_hostile_tokens_stay_finite(name):
  plain = tokens_of(name, jnp.float32)
  plain["value"] = 1e4 * plain["value"]
  same = lambda x: jnp.broadcast_to(x[:, :1], x.shape)
  for rate, log_decay in ((0, 0), (1, 0), (1, -jnp.inf), (1, -30)):
    args = dict(plain, rate=jnp.full_like(plain["rate"], rate))
    if "log_decay" in args:
      args["log_decay"] = jnp.full_like(args["log_decay"], log_decay)
    for key in (args["key"], jnp.zeros_like(args["key"]), same(args["key"])):
      if name == "longhorn":
        key = 1e4 * key
      out = slopes(name)(args | {"key": key}, *documents())
      assert finite(out), (rate, log_decay)


@pytest.mark.parametrize(
  "name",
  [
    "gated_deltanet",
    *(
      pytest.param(name, marks=pytest.mark.full)
      for name in OPS
      if name != "gated_deltanet"
    ),
  ],
)
def test_narrow_tokens_have_a_wide_state(name):
  args = tokens_of(name, jnp.float32)
  narrow = {
    k: x.astype(jnp.bfloat16) if k in ("query", "key", "value") else x
    for k, x in args.items()
  }
  restart, valid = documents()
  y, state = jit(OPS[name])(**narrow, restart=restart, valid=valid)
  _, (exact, last) = slopes(name)(args, restart, valid)
  assert y.dtype == jnp.bfloat16
  for got, want in zip(
    jax.tree.leaves((y.astype(jnp.float32), state)),
    jax.tree.leaves((exact, last)),
    strict=True,
  ):
    assert got.dtype == jnp.float32
    error = jnp.sqrt(jnp.mean((got - want) ** 2))
    assert error < 0.05 * jnp.sqrt(jnp.mean(want**2))


@every_op
def test_wrong_arguments_are_refused(name):
  args = tokens_of(name)
  with pytest.raises(UserError, match=r"key is .* must be"):
    OPS[name](**{**args, "key": args["key"][..., 1:]})
  with pytest.raises(UserError, match="use 1 or more tokens"):
    OPS[name](**args, chunk=0)
  with pytest.raises(UserError, match="implementation 'cuda'"):
    OPS[name](**args, implementation="cuda")
  args["state"] = jax.tree.map(lambda x: x[:1], args["state"])
  with pytest.raises(UserError, match=r"state.* must be"):
    OPS[name](**args)
