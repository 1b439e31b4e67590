"""Every kind of attention is its definition, in values and gradients."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import attention as aa
from tests.attention.cases import (
  BATCH,
  CASES,
  LENGTH,
  differentiated,
  empty,
  fast,
  inputs,
  slow,
  step,
)
from tests.layers.helpers import assert_close

# Those with the most parts; the others in `make test-full`.
_SOME = ("full", "window", "wide_global", "hashed")
every_case = pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in _SOME else pytest.mark.full)
    for name in CASES
  ],
)

# Documents that start in and between pieces; the second row has padding.
RESTART = jnp.asarray(np.isin(np.arange(LENGTH), (6, 8, 19))[None]) & jnp.array(
  [[True], [False]]
)
LENGTHS = jnp.array([LENGTH, LENGTH - 3], jnp.int32)
VALID = jnp.arange(LENGTH)[None] < LENGTHS[:, None]


@pytest.fixture
def x64():
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


def before(case, dtype, length=6):
  """A cache after some tokens."""
  return slow(case, inputs(case, 1, dtype, length), empty(case, dtype))[1]


@every_case
@pytest.mark.usefixtures("x64")
def test_values_gradients_and_cache_in_float64(name):
  case, dtype = CASES[name], jnp.float64
  given, past = inputs(case, 0, dtype), before(case, dtype)
  more = (RESTART, LENGTHS)
  weight = VALID.astype(dtype)
  out, slopes = differentiated(fast, case, given, past, *more, weight=weight)
  wanted, expected = differentiated(
    slow, case, given, past, *more, weight=weight
  )
  y, expected_y = (
    jnp.where(VALID[..., None, None], x, 0.0) for x in (out[0], wanted[0])
  )
  assert_close(y, expected_y, 1e-12)
  assert_close(out[1], wanted[1], 1e-12)
  assert_close(slopes, expected, 1e-10)
  assert not jnp.array_equal(out[0], wanted[0])


@every_case
def test_values_in_float32_and_of_a_fresh_start(name):
  case = CASES[name]
  given = inputs(case)
  y, after = fast(case, given)
  wanted, cache = slow(case, given, empty(case))
  assert_close(y, wanted, 1e-5)
  assert_close(after, cache, 1e-6)


@every_case
def test_bfloat16_stays_near_float32_and_so_do_its_gradients(name):
  # 5 % of the root mean square, although gradients are sums over all pieces.
  case = CASES[name]
  given = inputs(case)
  narrow = jax.tree.map(
    lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.bfloat16), given
  )
  weight = jnp.ones((BATCH, LENGTH))
  out, slopes = differentiated(fast, case, given, None, weight=weight)
  rounded, others = differentiated(
    fast, case, narrow, None, weight=weight.astype(jnp.bfloat16)
  )
  assert rounded[0].dtype == jnp.bfloat16
  for exact, x in zip(
    jax.tree.leaves((out[0], slopes)),
    jax.tree.leaves((rounded[0], others)),
    strict=True,
  ):
    error = jnp.sqrt(jnp.mean((x.astype(jnp.float32) - exact) ** 2))
    assert error < 0.05 * jnp.sqrt(jnp.mean(exact**2))


@every_case
def test_any_split_is_one_call(name):
  case = CASES[name]
  given = inputs(case)
  whole, wanted = fast(case, given)
  parts, cache = [], empty(case)
  for first, end in ((0, 7), (7, 8), (8, 21)):
    y, cache = fast(case, given.part(first, end), cache)
    parts.append(y)
  if not case.window:
    cache = aa.resize(cache, LENGTH)
  for t in (21, 22):
    y, cache = step(given.part(t, t + 1), cache)
    parts.append(y)
  assert_close(jnp.concatenate(parts, axis=1), whole, 1e-5)
  assert_close(cache, wanted, 1e-6)


@every_case
def test_no_token_sees_later_ones_or_other_documents(name):
  case = CASES[name]
  given, past = inputs(case), before(case, jnp.float32)
  y, _ = fast(case, given, past, RESTART)
  for t in (3, 10, 20):
    other = given._replace(
      key=given.key.at[0, t].add(1.0),
      value=given.value.at[0, t].add(1.0),
      query=given.query.at[0, t].add(1.0),
    )
    moved, _ = fast(case, other, past, RESTART)
    same = np.all(np.asarray(moved == y), axis=(2, 3))
    assert same[1].all()
    assert same[0, :t].all()
    end = min(place for place in (6, 8, 19, LENGTH) if place > t)
    assert same[0, end:].all()
    assert not same[0, t]


@pytest.mark.parametrize("name", ["full", "wide_window", "hashed"])
def test_huge_and_equal_scores_have_finite_gradients(name):
  case = CASES[name]
  given = inputs(case)
  for x in (
    jax.tree.map(lambda x: x * 100000, given),
    jax.tree.map(lambda x: x * 0, given),
    jax.tree.map(lambda x: jnp.broadcast_to(x[:, :1], x.shape), given),
  ):
    out, slopes = differentiated(
      fast, case, x, None, weight=jnp.ones((BATCH, LENGTH))
    )
    for leaf in jax.tree.leaves((out[0], slopes)):
      assert jnp.all(jnp.isfinite(leaf))


def test_a_window_that_sees_all_is_full_attention():
  case = CASES["full"]
  given = inputs(case)
  wide = case._replace(window=LENGTH)
  assert_close(fast(wide, given)[0], fast(case, given)[0], 1e-6)
  one_less = fast(case._replace(window=LENGTH - 1), given)[0]
  assert jnp.any(one_less[:, -1] != fast(case, given)[0][:, -1])


def test_more_global_tokens_than_there_are_make_full_attention():
  case = CASES["full"]
  given = inputs(case)
  everywhere = case._replace(window=2, global_tokens=LENGTH)
  assert_close(fast(everywhere, given)[0], fast(case, given)[0], 1e-6)


def test_grouped_queries_share_repeated_keys():
  case = CASES["full"]._replace(kv_heads=2, persistent=0)
  given = inputs(case)
  repeated = given._replace(
    key=jnp.repeat(given.key, 2, axis=2),
    value=jnp.repeat(given.value, 2, axis=2),
  )
  assert_close(fast(case, repeated)[0], fast(case, given)[0], 1e-6)


def test_one_bucket_is_attention_to_all_others():
  case = CASES["hashed"]
  given = inputs(case)
  given = given._replace(bucket=jnp.zeros_like(given.bucket))
  y, _ = fast(case, given)
  query, key, value = (np.asarray(x, np.float64) for x in given[:3])
  scores = np.einsum("bthk,bshk->bhts", query, key) / key.shape[-1] ** 0.5
  weight = np.exp(scores) * np.tri(LENGTH, k=-1)
  weight[:, :, 0, 0] = 1.0
  weight /= weight.sum(axis=-1, keepdims=True)
  assert_close(y, np.einsum("bhts,bshk->bthk", weight, value), 1e-5)


def test_a_key_that_shares_two_buckets_counts_once():
  case = CASES["hashed"]
  given = inputs(case)
  twice = jnp.repeat(given.bucket[..., :1], 2, axis=-1)
  once = given._replace(bucket=given.bucket[..., :1])
  one_round = case._replace(rounds=1)
  assert_close(
    fast(case, given._replace(bucket=twice))[0], fast(one_round, once)[0], 1e-6
  )


@pytest.mark.parametrize("name", ["full", "hashed"])
def test_long_sequences_are_cut_into_parts_that_see_all_before(name):
  case, length = CASES[name], 1100
  given, past = inputs(case, length=length), before(case, jnp.float32)
  # In the first part and in the second; the other row only goes on.
  begins = np.isin(np.arange(length), (300, 900))[None]
  restart = jnp.asarray(begins & np.array([[True], [False]]))
  y, _ = fast(case, given, past, restart, piece=128)
  wanted, _ = slow(case, given, past, restart)
  assert_close(y, wanted, 1e-5)


@pytest.mark.parametrize("name", ["full", "global", "hashed"])
def test_memory_grows_with_the_length_not_its_square(name):
  case = CASES[name]

  def largest(length):
    """Elements of the largest array of a gradient."""
    given = jax.eval_shape(lambda: inputs(case, length=length))

    def total(query, given):
      given = given._replace(query=query)
      return jnp.sum(fast.__wrapped__(case, given, piece=64)[0])

    text = jax.jit(jax.grad(total)).lower(given.query, given).as_text()
    shapes = re.findall(r"tensor<([0-9x]+)x[a-z]", text)
    return max(math.prod(map(int, shape.split("x"))) for shape in shapes)

  assert largest(2048) <= 2.1 * largest(1024)
