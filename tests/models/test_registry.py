"""Mixers by name: which there are, what they read, stacks and equal sizes."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from atlas_jax import config as configs
from atlas_jax import models
from atlas_jax.errors import UserError
from atlas_jax.models.matching import block_parameters, matched, reference
from atlas_jax.models.registry import PATTERNS, REGISTRY
from experiments.configs import PRESETS
from tests.layers.helpers import assert_close, jit
from tests.models.helpers import VOCAB, batch_of, tokens

ALL = (*REGISTRY, *PATTERNS)


def test_all_names_are_there():
  assert set(ALL) == {
    *("atlas", "atlas_pp", "omeganet", "titans", "titans_nomom", "dla", "swla"),
    *("ttt_linear", "ttt_mlp", "moneta", "yaad", "memora", "lact"),
    *("deep_transformer", "swdt", "dot"),
    *("transformer", "swa", "longformer", "reformer"),
    *("linear_attention", "retnet", "gla", "mamba2", "deltanet"),
    *("gated_deltanet", "longhorn", "rwkv7", "mesa"),
    *("lstm", "gru", "hyena"),
    *("mac", "mag", "mal"),
    *("samba", "gated_deltanet_h1", "gated_deltanet_h2"),
  }


@pytest.mark.parametrize("size", ["demo", "atlas_340m"])
@pytest.mark.parametrize("name", ALL)
def test_one_flag_changes_the_mixer_and_not_the_size(name, size):
  model = PRESETS[size](mixer=name).model
  model.validate()
  own = block_parameters(matched(model))
  assert own == pytest.approx(block_parameters(reference(model)), rel=0.02)
  assert matched(matched(model)) == matched(model)


def test_a_match_that_cannot_be_is_said():
  config = models.ModelConfig(mixer="titans", match="gru", mlp_hidden=1)
  with pytest.raises(UserError, match=r"raise model\.mlp_hidden"):
    matched(config)
  with pytest.raises(UserError, match="did you mean gru"):
    matched(models.ModelConfig(match="gruu"))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mixer": "gla", "memory.chunk": 8}, r"memory\.chunk is set, but gla"),
    ({"mixer": "swa", "attention.rounds": 2}, "rounds is set, but swa"),
    ({"mixer": "mag", "hybrid.segment": 64}, "segment is set, but mag"),
    ({"mixer": "mag", "hybrid.memory": "glaa"}, "did you mean gla"),
    ({"mixer": "mag", "hybrid.memory": "mac"}, "unknown model.hybrid.memory"),
    ({"pattern": ("swa", "nothing")}, "unknown model.pattern 'nothing'"),
    ({"pattern": ("swa", "gla", "lstm")}, "multiple of the 3 mixers"),
    ({"mixer": "samba", "layers": 3}, "multiple of the 2 mixers"),
    ({"mixer": "transformer", "attention.kv_heads": 3}, "do not divide"),
    ({"mixer": "reformer", "attention.buckets": 3}, "even number"),
    ({"mixer": "swa", "attention.window": 2**31}, r"must lie within \+-"),
    ({"mixer": "retnet", "matrix.expand_value": math.inf}, "expand_value=inf"),
    ({"mixer": "gla", "matrix.gate_rank": 2**63}, "gate_rank=9223372036854"),
    ({"mixer": "hyena", "hyena.max_length": 2**31}, "max_length=2147483648"),
    ({"mixer": "atlas", "memory.window": 2**31}, r"memory\.window"),
    ({"mixer": "gla", "token_gate": True}, "token_gate is set, but gla"),
    ({"mixer": "swdt", "decay_start": 0.5}, "decay_start is set, but swdt"),
    ({"mixer": "gla", "conv_width": 2}, "conv_width is set, but gla"),
    ({"mixer": "lstm", "form": "associative"}, "form is set, but lstm"),
    ({"mixer": "mamba2", "matrix.heads": 2}, "heads is set, but mamba2"),
    ({"mixer": "dla", "momentum_start": 0.5}, "momentum_start is set"),
    ({"mixer": "lact", "rate_start": 0.5}, "rate_start is set"),
    ({"mixer": "deep_transformer", "kernel.lam": 0.0, "kernel.chunk": 4},
     "lam=0 leaves the deep part away"),
    ({"mixer": "dot", "kernel.normalised": False, "kernel.temperature": 9.0},
     "temperature"),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes, message):
  config = configs.replace(models.ModelConfig(), changes)
  with pytest.raises(UserError, match=message) as caught:
    config.validate()
  assert "\n" not in str(caught.value)


def test_options_reach_the_mixers_that_have_them():
  changes = {"mixer": "deltanet", "conv_width": 3, "matrix.heads": 1}
  config = configs.replace(models.ModelConfig(), changes)
  config.validate()
  mixer = models.abstract(config, VOCAB).blocks.mixer
  assert mixer.heads == 1
  assert mixer.convolutions.by_name["key"].kernel.shape[-2] == 3
  # Of the paper's layer, whatever the model's heads are.
  longhorn = models.abstract(models.ModelConfig(mixer="longhorn"), VOCAB)
  assert longhorn.blocks.mixer.heads == 1


def test_an_option_may_be_of_one_mixer_of_a_pattern():
  config = configs.replace(
    models.ModelConfig(), {"pattern": ("swa", "gla"), "attention.window": 8}
  )
  config.validate()
  model = models.abstract(config, VOCAB)
  assert model.blocks.parts[0].mixer.window == 8


STACK = models.ModelConfig(
  pattern=("titans", "swa", "transformer"),
  dim=16,
  layers=6,
  heads=2,
  mlp_hidden=16,
  memory=models.MemoryOptions(chunk=4, expansion=1.0),
  attention=models.AttentionOptions(window=5),
)


def test_a_stack_of_several_mixers_keeps_the_contract():
  model, ids = models.build(STACK, VOCAB), tokens()
  call = jit(lambda model, ids, state: model(ids, state=state))
  step = jit(lambda model, ids, state: model.step(ids, state))
  whole = call(model, ids, None)
  parts, state = [], model.init_state(2)
  for piece in (ids[:, :6], ids[:, 6:16]):
    out = call(model, piece, state)
    parts.append(out.logits)
    state = out.state
  state = model.prepare(model.resize(state, 19))
  for t in range(16, 19):
    logits, state = step(model, ids[:, t], state)
    parts.append(logits[:, None])
  assert_close(jnp.concatenate(parts, axis=1), whole.logits, 1e-4)
  assert model.capacity(whole.state) == 19


def test_states_that_grow_in_different_steps_have_the_room_of_the_smaller():
  config = models.ModelConfig(
    pattern=("dot", "transformer"),
    dim=16,
    layers=2,
    heads=2,
    mlp_hidden=16,
    kernel=models.KernelOptions(chunk=6, window=2),
  )
  model, ids = models.build(config, VOCAB), tokens()
  call = jit(lambda model, ids, state: model(ids, state=state))
  step = jit(lambda model, ids, state: model.step(ids, state))
  whole = call(model, ids, None)
  state = model.resize(call(model, ids[:, :14], None).state, 16)
  assert model.capacity(state) == 16
  for t in (14, 15):
    logits, state = step(model, ids[:, t], state)
    assert_close(logits, whole.logits[:, t], 1e-4)
  rows = jnp.array([True, False])
  again = model.reset(state, rows)
  assert model.capacity(again) == 16
  logits = call(model, ids[:, :3], again).logits
  assert_close(logits[0], whole.logits[0, :3], 1e-4)
  logits = call(model, ids[:, 16:], model.unprepare(state)).logits
  assert_close(logits, whole.logits[:, 16:], 1e-4)


def test_a_stack_trains_all_its_parameters():
  model = models.build(STACK, VOCAB)
  grads, metrics = jit(jax.grad(models.loss, has_aux=True))(
    model, batch_of(tokens())
  )
  grads = nnx.to_pure_dict(nnx.state(grads))["blocks"]
  assert set(grads["parts"]) == {0, 1, 2}
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    # Turns, each with a block of every kind.
    assert leaf.shape[0] == 2, path
    for turn in leaf:
      assert jnp.any(turn != 0), path
  assert jnp.isfinite(metrics["inner_loss"])
