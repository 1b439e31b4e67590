"""A model from a GGUF file computes what the file means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import interop
from atlas_jax.errors import UserError
from atlas_jax.interop.gguf_file import GgufFile
from atlas_jax.interop.llama import rotate_half
from tests.interop import helpers
from tests.layers.helpers import jit

pytest.importorskip("tokenizers", reason="pip install 'atlas-jax[gguf]'")

LENGTH = 12


def text_ids() -> np.ndarray:
  random = np.random.default_rng(5)
  return random.integers(0, len(helpers.tokens()), LENGTH)


def run(model, ids: np.ndarray) -> np.ndarray:
  tokens = jnp.asarray(ids[None], jnp.int32)
  return np.asarray(jit(lambda tokens: model(tokens).logits)(tokens))[0]


def close(have: np.ndarray, want: np.ndarray, tolerance: float) -> None:
  assert have.shape == want.shape
  assert np.abs(have - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_plain_numpy(tmp_path, tied):
  path = tmp_path / "a.gguf"
  arrays = helpers.write(path, arrays=helpers.tensors(tied))
  model, _ = interop.load(str(path))
  ids = text_ids()
  close(run(model, ids), helpers.logits(arrays, ids), 1e-5)


def test_every_hyperparameter_of_the_file_counts(tmp_path):
  ids = text_ids()
  path = tmp_path / "a.gguf"
  for base, epsilon in ((50.0, helpers.EPSILON), (helpers.BASE, 0.5)):
    arrays = helpers.write(
      path,
      {
        "llama.rope.freq_base": base,
        "llama.attention.layer_norm_rms_epsilon": epsilon,
      },
    )
    model, _ = interop.load(str(path))
    want = helpers.logits(arrays, ids, base=base, epsilon=epsilon)
    close(run(model, ids), want, 1e-5)


def test_the_configuration_is_that_of_the_file(tiny_file):
  model, tokenizer = interop.load(str(tiny_file))
  config = model.config
  assert config.mixer == "transformer"
  assert (config.dim, config.heads, config.layers) == (
    helpers.DIM,
    helpers.HEADS,
    helpers.LAYERS,
  )
  assert config.hidden == helpers.HIDDEN
  assert config.norm_epsilon == helpers.EPSILON
  assert config.tie_embeddings
  assert model.vocab == tokenizer.vocab_size == len(helpers.tokens())


def test_what_the_file_leaves_out_has_its_usual_value(tmp_path):
  left_out = ("llama.rope.freq_base", "llama.attention.head_count_kv")
  arrays = helpers.tensors()
  for name in list(arrays):
    if "attn_k" in name or "attn_v" in name:
      arrays[name] = np.concatenate([arrays[name], -arrays[name]])
  path = tmp_path / "a.gguf"
  arrays = helpers.write(path, dict.fromkeys(left_out), arrays)
  model, _ = interop.load(str(path))
  ids = text_ids()
  want = helpers.logits(arrays, ids, kv_heads=helpers.HEADS, base=10_000.0)
  close(run(model, ids), want, 1e-5)


def test_step_by_step_it_says_the_same(tiny_file):
  model, _ = interop.load(str(tiny_file))
  ids = text_ids()
  tokens = jnp.asarray(ids, jnp.int32)
  start = model(tokens[None, :5])
  assert start.state is not None
  state = model.prepare(model.resize(start.state, LENGTH))
  step = jit(model.step)
  whole = run(model, ids)
  for place in range(5, LENGTH):
    logits, state = step(tokens[None, place], state)
    close(np.asarray(logits)[0], whole[place], 1e-5)


def test_changes_are_laid_over_it(tiny_file):
  ids = text_ids()
  model, _ = interop.load(str(tiny_file))
  half, _ = interop.load(
    str(tiny_file), {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  )
  assert half.embedding[...].dtype == jnp.bfloat16
  exact, rough = run(model, ids), run(half, ids)
  error = np.sqrt(np.mean((rough - exact) ** 2) / np.mean(exact**2))
  assert 0 < error < 0.05


def test_another_mixer_with_the_same_parameters_takes_the_weights(tiny_file):
  ids = text_ids()
  model, _ = interop.load(str(tiny_file))
  changes = {"mixer": "swa", "attention.window": LENGTH}
  whole, _ = interop.load(str(tiny_file), changes)
  close(run(whole, ids), run(model, ids), 1e-5)
  short, _ = interop.load(str(tiny_file), {**changes, "attention.window": 3})
  have, want = run(short, ids), run(model, ids)
  close(have[:3], want[:3], 1e-5)
  assert np.abs(have[3:] - want[3:]).max(-1).min() > 1e-3


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"attention.qk_norm": True}, "has no weights for blocks/mixer/"),
    ({"mixer": "titans"}, "titans has no use for it"),
    ({"mixer": "transformr"}, "transformr"),
    ({"dims": 3}, "dims"),
    ({"tie_embeddings": False}, "no tensor output.weight"),
  ],
)
def test_changes_that_do_not_fit_are_refused(tiny_file, changes, says):
  with pytest.raises(UserError, match=says) as caught:
    interop.load(str(tiny_file), changes)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("metadata", "says"),
  [
    ({"llama.block_count": None}, "does not say llama.block_count"),
    ({"llama.block_count": 3}, r"no tensor blk\.2\."),
    ({"llama.block_count": 1}, r"holds blk\.1\..*has no place"),
    (
      {"llama.embedding_length": 64, "llama.rope.dimension_count": 16},
      "but must be",
    ),
    ({"llama.attention.head_count": 3}, "do not divide each other"),
    ({"llama.attention.head_count": 0}, "do not divide each other"),
    ({"llama.attention.head_count": [4, 4]}, "is a list of 2"),
    ({"llama.attention.key_length": 4}, "heads are 8 wide"),
    ({"llama.rope.dimension_count": 4}, "heads are 8 wide"),
    ({"llama.rope.scaling.type": "yarn"}, r"scales positions \(yarn\)"),
    ({"llama.expert_count": 8}, "sets llama.expert_count"),
    ({"llama.feed_forward_length": 128}, "but must be"),
  ],
)
def test_other_models_are_refused(tmp_path, metadata, says):
  helpers.write(tmp_path / "a.gguf", metadata)
  with pytest.raises(UserError, match=says) as caught:
    interop.load(str(tmp_path / "a.gguf"))
  assert "\n" not in str(caught.value)


def test_another_architecture_is_refused(tmp_path):
  helpers.write(tmp_path / "a.gguf", architecture="mamba")
  with pytest.raises(UserError, match="architecture 'mamba'"):
    interop.load(str(tmp_path / "a.gguf"))


def test_a_tensor_without_a_place_is_refused(tmp_path):
  extra = {"blk.0.attn_q.bias": np.ones(helpers.DIM, np.float32)}
  helpers.write(tmp_path / "a.gguf", arrays={**helpers.tensors(), **extra})
  with pytest.raises(UserError, match=r"holds blk\.0\.attn_q\.bias"):
    interop.load(str(tmp_path / "a.gguf"))


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
  arrays = helpers.tensors()
  arrays["token_embd.weight"] = arrays["token_embd.weight"][:-1]
  helpers.write(tmp_path / "a.gguf", arrays=arrays)
  with pytest.raises(UserError, match="tokens but embeds"):
    interop.load(str(tmp_path / "a.gguf"))


def test_rows_of_pairs_become_rows_of_halves():
  rows = np.arange(12.0)[:, None]
  # Two heads of three pairs.
  want = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
  np.testing.assert_array_equal(rotate_half(rows, 2)[:, 0], want)


def test_the_weights_are_read_in_the_order_of_layers(tmp_path):
  arrays = helpers.tensors()
  helpers.write(tmp_path / "a.gguf", arrays=arrays)
  model, _ = interop.load(str(tmp_path / "a.gguf"))
  scale = np.asarray(model.blocks.mixer_norm.scale[...])
  for n in range(helpers.LAYERS):
    np.testing.assert_array_equal(scale[n], arrays[f"blk.{n}.attn_norm.weight"])
  kernel = jax.device_get(model.blocks.mixer.query.kernel[...])
  want = rotate_half(arrays["blk.1.attn_q.weight"], helpers.HEADS).T
  np.testing.assert_array_equal(kernel[1], want)
  assert GgufFile(tmp_path / "a.gguf").tensor("output_norm.weight").ndim == 1
