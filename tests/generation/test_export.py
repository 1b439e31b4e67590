"""Export: files that compute the same numbers, also without the library."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.errors import UserError
from atlas_jax.generation import Exported, export
from tests.generation.helpers import letter_model

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 6)))
LENGTHS = jnp.array([6, 3], jnp.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("exported") / "model"
  export(letter_model(), batch=2, length=6).save(folder)
  return folder


def run(functions):
  """Reads a segment, then two tokens; returns all logits."""
  weights = functions.weights
  state = functions.start.call(weights)
  logits, state = functions.prefill.call(weights, state, TOKENS, LENGTHS)
  out = [logits]
  for token in ([5, 6], [7, 8]):
    tokens = jnp.array(token, jnp.int32)
    logits, state = functions.step.call(weights, state, tokens)
    out.append(logits)
  return np.stack(out)


@pytest.fixture(scope="module")
def loaded(folder):
  return run(Exported.load(folder))


def test_loaded_functions_compute_what_the_model_does(loaded):
  # Row 0 has 8 tokens, row 1 has 5, in one call.
  tokens = np.array(TOKENS)
  rows = np.zeros((2, 8), np.int32)
  rows[0] = [*tokens[0], 5, 7]
  rows[1, :5] = [*tokens[1, :3], 6, 8]
  mask = jnp.arange(8)[None] < jnp.array([[8], [5]])
  logits = jax.jit(lambda t, m: letter_model()(t, mask=m).logits)(
    jnp.asarray(rows), mask
  )
  expected = np.stack([[logits[0, 5 + i], logits[1, 2 + i]] for i in range(3)])
  np.testing.assert_allclose(loaded, expected, atol=1e-4)


def test_a_process_that_has_only_jax_computes_the_same(
  folder, loaded, tmp_path
):
  code = """
    import sys
    import jax, jax.export, jax.numpy as jnp, numpy as np

    folder, out = sys.argv[1:]
    read = lambda name: open(f"{folder}/{name}.jax", "rb").read()
    start, prefill, step = (
      jax.export.deserialize(bytearray(read(name)))
      for name in ("start", "prefill", "step")
    )
    weights = dict(np.load(f"{folder}/weights.npz"))
    tokens = np.random.default_rng(0).integers(0, 64, (2, 6))
    state = start.call(weights)
    logits, state = prefill.call(
      weights, state, jnp.asarray(tokens), jnp.array([6, 3])
    )
    found = [logits]
    for token in ([5, 6], [7, 8]):
      logits, state = step.call(weights, state, jnp.array(token))
      found.append(logits)
    np.save(out, np.stack(found))
    assert "atlas_jax" not in sys.modules
    assert "flax" not in sys.modules
  """
  out = tmp_path / "logits.npy"
  # With as many devices, what this process compiled is found again.
  settings = {
    "jax_num_cpu_devices": jax.device_count(),
    "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
  }
  subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), folder, out],
    check=True,
    cwd=tmp_path,
    env={**os.environ, **{k.upper(): str(v) for k, v in settings.items()}},
  )
  np.testing.assert_allclose(np.load(out), loaded, atol=1e-5)


def test_bad_requests_are_told(folder, tmp_path):
  with pytest.raises(UserError, match="at least 1"):
    export(letter_model(), batch=0, length=6)
  with pytest.raises(UserError, match="no exported model"):
    Exported.load(tmp_path)
  with pytest.raises(UserError, match="is not empty"):
    Exported.load(folder).save(folder)
  cut = tmp_path / "cut"
  cut.mkdir()
  for path in folder.iterdir():
    content = path.read_bytes()
    (cut / path.name).write_bytes(content[: len(content) // 2])
  with pytest.raises(UserError, match="no exported model, or a damaged one"):
    Exported.load(cut)
