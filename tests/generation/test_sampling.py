"""Sampling: which tokens are drawn, how often, and by what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.errors import UserError
from atlas_jax.generation import sampling
from atlas_jax.generation.sampling import GREEDY, Sampling, controls

DRAWS = 4000
PROBABILITIES = np.array([0.4, 0.05, 0.3, 0.05, 0.2])

sample = jax.jit(sampling.sample)


def draw(settings, logits=None, seed=0):
  """Tokens of many rows with equal logits, each with a seed of its own."""
  logits = np.log(PROBABILITIES) if logits is None else np.array(logits)
  rows = jnp.asarray(np.tile(logits, (DRAWS, 1)), jnp.float32)
  zeros = jnp.zeros((DRAWS,), jnp.uint32)
  return np.asarray(sample(rows, controls(DRAWS, settings, seed), zeros))


def shares(tokens, size=5):
  return np.bincount(tokens, minlength=size) / len(tokens)


# Four standard deviations of a share among 4000 draws are at most 0.032.
NEAR = functools.partial(np.testing.assert_allclose, rtol=0, atol=0.032)


def test_greedy_takes_the_most_likely():
  assert (draw(GREEDY) == 0).all()


def test_temperature_1_draws_as_the_model_says():
  NEAR(shares(draw(Sampling())), PROBABILITIES)


def test_temperature_is_an_exponent():
  expected = PROBABILITIES**2 / np.sum(PROBABILITIES**2)
  NEAR(shares(draw(Sampling(temperature=0.5))), expected)


@pytest.mark.parametrize("temperature", [1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature):
  settings = Sampling(temperature=temperature)
  assert (draw(settings, [1e4, 0, 1e4 - 1, -1e4, 0.0]) == 0).all()


def test_a_huge_temperature_is_uniform():
  NEAR(shares(draw(Sampling(temperature=1e30))), np.full(5, 0.2))


@pytest.mark.parametrize(
  ("settings", "kept"),
  [
    (Sampling(top_k=1), [0]),
    (Sampling(top_k=2), [0, 2]),
    (Sampling(top_k=99), [0, 1, 2, 3, 4]),
    # Tokens 1 and 3 are equal: both or neither.
    (Sampling(top_k=4), [0, 1, 2, 3, 4]),
    (Sampling(top_p=0.39), [0]),
    (Sampling(top_p=0.41), [0, 2]),
    (Sampling(top_p=0.69), [0, 2]),
    (Sampling(top_p=0.71), [0, 2, 4]),
    (Sampling(top_p=1e-9), [0]),
    (Sampling(top_p=1e-40), [0]),  # 0 in float32
    # 0.4 of the 0.7 that are left is more than a half.
    (Sampling(top_k=2, top_p=0.5), [0]),
  ],
)
def test_truncation_keeps_exactly_these(settings, kept):
  expected = np.zeros(5)
  expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
  found = shares(draw(settings))
  NEAR(found, expected)
  assert set(np.flatnonzero(found)) == set(kept)


def test_top_p_of_1_drops_nothing_however_many_tokens():
  logits = np.full(50_000, 0.0)
  rows = jnp.asarray(logits[None], jnp.float32)
  settings = controls(1, Sampling(top_k=50_000, top_p=1.0), 0)
  tokens = {
    int(sample(rows, settings, jnp.array([i], jnp.uint32))[0])
    for i in range(50)
  }
  # The least likely of fifty uniform draws would all be in a small part.
  assert max(tokens) > 45_000
  assert min(tokens) < 5_000


def test_equal_seeds_draw_equally_and_others_do_not():
  first = draw(Sampling(), seed=7)
  assert (first == draw(Sampling(), seed=7)).all()
  assert (first[1:] == draw(Sampling(), seed=8)[:-1]).all()
  assert (first != draw(Sampling(), seed=DRAWS + 7)).any()


def test_each_draw_of_a_row_is_new():
  logits = jnp.zeros((1, 1000), jnp.float32)
  settings = controls(1, Sampling(), 3)
  tokens = {
    int(sample(logits, settings, jnp.array([i], jnp.uint32))[0])
    for i in range(20)
  }
  assert len(tokens) > 15


def test_a_row_does_not_depend_on_its_batch():
  random = np.random.default_rng(0)
  logits = jnp.asarray(random.standard_normal((4, 30)), jnp.float32)
  settings = sampling.Controls(
    seed=jnp.array([5, 6, 7, 8], jnp.uint32),
    temperature=jnp.array([0.0, 0.7, 1.0, 2.0]),
    top_k=jnp.array([0, 0, 3, 0], jnp.int32),
    top_p=jnp.array([1.0, 1.0, 1.0, 0.8]),
  )
  drawn = jnp.array([0, 9, 1, 2], jnp.uint32)
  together = sample(logits, settings, drawn)
  for row in range(4):
    take = functools.partial(jnp.take, indices=jnp.array([row]), axis=0)
    one = jax.tree.map(take, (logits, settings, drawn))
    assert sample(*one)[0] == together[row]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("settings", [GREEDY, Sampling(), Sampling(top_k=2)])
def test_a_logit_that_is_no_number_is_told(bad, settings):
  logits = jnp.array([[0.0, 1.0, 0.5], [0.0, bad, 0.5]])
  drawn = jnp.zeros((2,), jnp.uint32)
  tokens = sample(logits, controls(2, settings, 0), drawn)
  assert tokens[0] >= 0
  assert tokens[1] == sampling.NOT_FINITE


@pytest.mark.parametrize(
  "settings",
  [
    {"temperature": -0.1},
    {"temperature": float("inf")},
    {"temperature": float("nan")},
    {"top_k": -1},
    {"top_k": 2**31},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_p": float("nan")},
  ],
)
def test_settings_out_of_range_are_refused(settings):
  with pytest.raises(UserError, match=next(iter(settings))):
    Sampling(**settings)


@pytest.mark.parametrize("seed", [[1], [1, 2, 3], [0, -1], -1, 2**32])
def test_seeds_that_do_not_fit_are_refused(seed):
  with pytest.raises(UserError, match="seed"):
    controls(2, GREEDY, seed)
