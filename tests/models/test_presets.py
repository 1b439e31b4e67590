"""Mixers by name, and the options that change their memories."""

import dataclasses

import pytest

from atlas_jax import config as configs
from atlas_jax import memory as am
from atlas_jax import models
from atlas_jax.errors import UserError
from atlas_jax.models.presets import MIXERS, memory_of, override


def memory(mixer="atlas", **options):
  return memory_of(
    models.ModelConfig(mixer=mixer, memory=models.MemoryOptions(**options))
  )


def test_mixers_are_rows_of_the_papers_table():
  rows = {
    name: (
      type(m.features).__name__,
      type(m.network).__name__,
      type(m.objective).__name__,
      type(m.optimizer).__name__,
      type(m.retention).__name__,
      m.window,
    )
    for name, m in MIXERS.items()
  }
  scalar, descent = "ScalarRetention", "GradientDescent"
  assert rows == {
    "atlas": ("Polynomial", "MLP", "L2", "Muon", scalar, 16),
    "atlas_pp": ("Polynomial", "GatedMLP", "L2", "Muon", scalar, 16),
    "omeganet": ("Polynomial", "MLP", "L2", descent, scalar, 16),
    "titans": ("Identity", "MLP", "L2", "Momentum", scalar, 1),
    "titans_nomom": ("Identity", "MLP", "L2", descent, scalar, 1),
    "dla": ("Polynomial", "MLP", "DotProduct", descent, scalar, 1),
    "swla": ("Polynomial", "MLP", "DotProduct", descent, scalar, 2),
    "ttt_linear": ("Identity", "MLP", "L2", descent, "NoRetention", 1),
    "ttt_mlp": ("Identity", "MLP", "L2", descent, "NoRetention", 1),
    "moneta": ("Identity", "MLP", "Lp", descent, "LqRetention", 1),
    "yaad": ("Identity", "MLP", "SwitchedHuber", descent, scalar, 1),
    "memora": ("Identity", "MLP", "L2", descent, "KLRetention", 1),
    "lact": (
      "Identity",
      "GatedMLP",
      "DotProduct",
      "ChunkMuon",
      "WeightNorm",
      1,
    ),
  }
  assert MIXERS["atlas"].entries(64, 64)["in"].shape == (256, 153)


def test_test_time_training_is_as_published():
  """Chunks of 16, an inner norm and biases, half the square, the mean step."""
  for name, hidden in (("ttt_linear", None), ("ttt_mlp", 256)):
    ttt = MIXERS[name]
    assert (ttt.chunk, ttt.network.layer_norm, ttt.network.residual) == (
      *(16, True, True),
    )
    assert ttt.rate_by_position
    assert ttt.objective == am.L2(factor=0.5)
    table = ttt.entries(64, 64)
    if hidden is None:
      assert table["out"].shape == (64, 65)
    else:
      assert table["in"].shape == (hidden, 65)
      assert table["out"].shape == (64, hidden + 1)


def test_lact_has_large_chunks_and_is_read_before_they_are_written():
  lact = MIXERS["lact"]
  assert (lact.chunk, lact.read) == (2048, "start")
  table = lact.entries(64, 64)
  assert {name: entry.shape for name, entry in table.items()} == {
    "in": (64, 64),
    "gate": (64, 64),
    "out": (64, 64),
  }


def test_the_powers_of_moneta_are_three_and_four():
  moneta = MIXERS["moneta"]
  assert (moneta.objective.power, moneta.retention.power) == (3, 4)


def test_an_atlas_without_its_additions_is_titans():
  """`c = 1`, momentum in place of Muon and no lift (2505.23735, section 5)."""
  less = models.MemoryOptions(
    features="identity", optimizer="momentum", window=1, key_width=0
  )
  assert override(MIXERS["atlas"], less) == MIXERS["titans"]
  less = dataclasses.replace(less, optimizer="gd")
  assert override(MIXERS["omeganet"], less) == MIXERS["titans_nomom"]


def test_without_options_a_memory_is_its_mixers():
  for name, value in MIXERS.items():
    assert memory(name) == value


def test_every_option_changes_the_memory():
  given = {
    "features": "identity",
    "degree": 3,
    "key_width": 8,
    "sketch": 7,
    "network": "gated_mlp",
    "depth": 3,
    "expansion": 1.5,
    "activation": "silu",
    "residual": False,
    "layer_norm": True,
    "bias": True,
    "objective": "dot",
    "optimizer": "momentum",
    "muon_every": 8,
    "muon_steps": 3,
    "muon_epsilon": 0.5,
    "muon_dtype": "bfloat16",
    "retention": "off",
    "window": 3,
    "chunk": 32,
    "read": "before",
    "bound": "off",
    "budget": "diagonal",
    "gradient_clip": 2.0,
  }
  needs = {
    "huber_delta": {"objective": "huber"},
    "decay_groups": {"retention": "channel"},
    "lp_power": {"objective": "lp"},
    "lq_power": {"retention": "lq"},
    "rate_by_position": {"optimizer": "gd"},
  }
  names = {spec.name for spec in dataclasses.fields(models.MemoryOptions)}
  assert names == given.keys() | needs.keys()
  for name, value in given.items():
    assert memory(**{name: value}) != MIXERS["atlas"], name
  assert memory(objective="huber", huber_delta=0.5).objective == am.Huber(0.5)
  assert memory(
    retention="channel", decay_groups=2
  ).retention == am.ChannelRetention(2)
  assert memory(objective="lp", lp_power=2.5).objective == am.Lp(2.5)
  chosen = memory("titans", retention="lq", lq_power=3.0, decay_groups=2)
  assert chosen.retention == am.LqRetention(3.0, groups=2)
  assert memory(optimizer="gd", rate_by_position=True).rate_by_position


def test_zero_means_none():
  assert memory(key_width=0).features == am.Polynomial(key_width=None)
  assert memory(sketch=0) == MIXERS["atlas"]
  assert memory(muon_dtype="state") == MIXERS["atlas"]
  assert memory(gradient_clip=0.0).bound.gradient_clip is None


def test_a_change_of_kind_keeps_what_both_have():
  narrow = memory(features="identity")
  assert narrow.features == am.Identity(key_width=16)
  plain = override(
    MIXERS["titans"], models.MemoryOptions(network="gated_mlp", bias=True)
  )
  assert plain.network == am.GatedMLP(bias=True)


def test_a_bound_may_be_off_and_clip_the_gradient_only():
  assert memory(bound="off").bound is None
  only = memory(bound="off", gradient_clip=3.0).bound
  assert only == dataclasses.replace(am.UNBOUNDED, gradient_clip=3.0)
  assert memory(bound="off", gradient_clip=0.0).bound is None


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mixer": "atlass"}, "did you mean atlas"),
    ({"memory.network": "matrix", "memory.depth": 2}, "depth is set"),
    ({"mixer": "titans", "memory.muon_every": 4}, "muon_every is set"),
    ({"memory.huber_delta": 1.0}, "huber_delta is set"),
    ({"memory.bound": "off", "memory.budget": "full"}, "budget is set"),
    ({"memory.decay_groups": 2}, "decay_groups is set"),
    ({"memory.retention": "channel", "memory.decay_groups": 3}, "decay groups"),
    ({"memory.chunk": 24}, "does not divide the chunk 24"),
    ({"memory.window": 0}, "window 0"),
    ({"memory.key_width": 0, "memory.degree": 4}, "sketch"),
    ({"memory.key_width": 64}, "the width of a head, 32"),
    ({"dim": 130}, "make dim a multiple of heads"),
    ({"heads": 0}, "model.heads must lie between 1 and"),
    ({"decay_start": 1.0}, "model.decay_start"),
    ({"rate_max": -1.0}, "model.rate_max"),
    ({"norm_epsilon": 0.0}, "model.norm_epsilon"),
    ({"mlp_hidden": -1}, "model.mlp_hidden"),
  ],
)
def test_mistakes_are_said_in_one_line(changes, message):
  config = configs.replace(models.ModelConfig(), changes)
  with pytest.raises(UserError, match=message) as caught:
    config.validate()
  assert "\n" not in str(caught.value)


def test_every_field_has_a_help_text():
  for name, leaf in configs.leaves(models.ModelConfig).items():
    assert leaf.doc.endswith("."), name
