"""One training step: golden numbers, accumulation, failures."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import standin
from flax import nnx

from atlas_jax.training.heldout import evaluate
from atlas_jax.training.nonfinite import explain
from atlas_jax.training.program import make_program, split_model
from atlas_jax.training.sharding import make_mesh

# A change of these numbers is a change of what training does: name it in the
# changelog, then write the new numbers here.
GOLDEN = {
  "bits_per_byte": 9.2076359,
  "grad_norm": 2.3642228,
  "hidden_norm": 0.7676460,
  "learning_rate": 0.0025,
  "loss": 6.3822470,
  "param_norm": 33.588203,
  "update_rms": 0.0025433586,
}


def program_of(**changes):
  config = standin.small_config(**changes)
  mesh = make_mesh(1, 1, jax.devices()[:1])
  return make_program(standin.make(config).build, config.train, mesh)


def step_of(program, batch, state=None):
  state = program.init() if state is None else state
  return program.train_step(state, program.place(batch))


def test_golden_metrics_of_one_step():
  state, report = step_of(program_of(), standin.some_batch())
  measured = {name: float(value) for name, value in report.metrics.items()}
  assert measured == pytest.approx(GOLDEN, rel=1e-4)
  assert int(state.step) == 1
  assert bool(report.finite)
  assert not any(np.any(flags) for flags in report.nonfinite.values())


def test_loss_is_the_mean_over_targets_and_ignores_the_others():
  program = program_of()
  batch = standin.some_batch()
  assert 0 < batch["weights"].sum() < batch["weights"].size
  _, report = step_of(program, batch)
  changed = dict(batch)
  changed["targets"] = np.where(
    batch["weights"] > 0, batch["targets"], 5
  ).astype(np.int32)
  _, other = step_of(program, changed)
  assert float(other.metrics["loss"]) == float(report.metrics["loss"])

  graph, _ = split_model(standin.Model(rngs=nnx.Rngs(0)))
  model = nnx.merge(graph, program.init().params)
  out = model.hidden(
    batch["tokens"], segment_ids=batch["segment_ids"], aligned=True
  )
  log = np.asarray(jax.nn.log_softmax(model.logits(out.hidden)), np.float64)
  picked = np.take_along_axis(log, batch["targets"][..., None], -1)[..., 0]
  mean = -(picked * batch["weights"]).sum() / batch["weights"].sum()
  assert float(report.metrics["loss"]) == pytest.approx(mean, rel=1e-5)
  # One byte per token.
  bits = mean / np.log(2)
  assert float(report.metrics["bits_per_byte"]) == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_equals_one_large_batch(accumulate):
  batch = standin.some_batch()
  counts = batch["weights"].sum(1)
  assert len(set(counts.tolist())) > 1, "microbatches must differ in weight"
  whole, report = step_of(program_of(train__clip=0.0), batch)
  parts, partly = step_of(
    program_of(train__clip=0.0, train__accumulate=accumulate), batch
  )
  # What the model says of itself is a mean over microbatches, not theirs.
  for name in GOLDEN.keys() - {"hidden_norm"}:
    assert float(partly.metrics[name]) == pytest.approx(
      float(report.metrics[name]), rel=1e-6, abs=1e-6
    ), name
  chex.assert_trees_all_close(
    optax.tree.get(parts.opt_state, "mu"),
    optax.tree.get(whole.opt_state, "mu"),
    rtol=0.0,
    atol=1e-6,
  )


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_failed_step_changes_nothing_now_or_later(poison):
  program = program_of()
  good = standin.some_batch()
  state, _ = step_of(program, good)
  before = jax.device_get(state)
  bad = {**good, "weights": np.full_like(good["weights"], poison)}
  state, report = step_of(program, bad, state)
  assert not bool(report.finite)
  assert bool(state.halted)
  chex.assert_trees_all_equal(
    state._replace(halted=before.halted), before, strict=True
  )
  # A step that was dispatched before the failure was read.
  state, report = step_of(program, good, state)
  assert bool(report.finite)
  chex.assert_trees_all_equal(
    state._replace(halted=before.halted), before, strict=True
  )


def test_a_failure_names_the_layer_nearest_to_the_loss():
  program = program_of()
  state = program.init()
  scale = state.params["blocks"]["scale"].at[1].set(jnp.inf)
  params = {**state.params, "blocks": {**state.params["blocks"]}}
  params["blocks"]["scale"] = scale
  _, report = step_of(
    program, standin.some_batch(), state._replace(params=params)
  )
  metrics = {name: float(value) for name, value in report.metrics.items()}
  text = explain(metrics, jax.device_get(report.nonfinite))
  assert "loss=nan" in text
  assert "blocks[1]" in text.split("first non-finite gradient")[1]
  assert "\n" not in text


def test_explain_orders_groups_from_the_loss_backwards():
  flags = {
    "blocks/mixer/a": np.array([True, True, False]),
    "blocks/mlp/b": np.array([True, False, False]),
    "embed/embedding": np.array(True),
    "final_norm/scale": np.array(False),
  }
  text = explain({"loss": 1.0, "grad_norm": float("inf")}, flags)
  assert text.startswith("non-finite grad_norm=inf; ")
  assert "loss: blocks[1]/mixer (then 3 more groups, blocks[0]/mixer" in text
  flags["final_norm/scale"] = np.array(True)
  assert "loss: final_norm (then 4" in explain({}, flags)


def test_evaluation_weighs_batches_by_their_targets():
  program = program_of()
  params = program.init().params
  batch = standin.some_batch()
  both = evaluate(program, params, [batch])
  halves = [
    {k: np.concatenate([v[:4], 0 * v[:4]]) for k, v in batch.items()},
    {k: np.concatenate([v[4:], 0 * v[4:]]) for k, v in batch.items()},
  ]
  split = evaluate(program, params, halves)
  assert split == pytest.approx(both, rel=1e-5)
  assert both["bits_per_byte"] == pytest.approx(
    both["loss"] / np.log(2), rel=1e-6
  )


def test_a_batch_without_targets_costs_nothing():
  batch = standin.some_batch()
  empty = {
    **batch,
    "weights": 0 * batch["weights"],
    "bytes": 0 * batch["bytes"],
  }
  _, report = step_of(program_of(), empty)
  assert bool(report.finite)
  assert float(report.metrics["loss"]) == 0.0


def test_refuses_a_model_with_variables_that_steps_would_lose():
  class Counting(standin.Model):
    def __init__(self, *, rngs):
      super().__init__(rngs=rngs)
      self.count = nnx.Variable(jnp.zeros(()))

  with pytest.raises(ValueError, match=r"only nnx\.Param.*count"):
    split_model(Counting(rngs=nnx.Rngs(0)))
