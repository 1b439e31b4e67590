"""The tokenizer of a GGUF file: its ids, its end, and what is refused."""

import numpy as np
import pytest

from atlas_jax.data import tokenizers
from atlas_jax.errors import UserError
from atlas_jax.interop import gguf_tokenizer
from atlas_jax.interop.gguf_file import GgufFile
from tests.interop import helpers

pytest.importorskip("tokenizers", reason="pip install 'atlas-jax[gguf]'")


@pytest.fixture(scope="module")
def tokenizer(tiny_file):
  return gguf_tokenizer.read(GgufFile(tiny_file))


def ids_of(*names: str) -> list[int]:
  return [helpers.tokens().index(name) for name in names]


def test_merges_apply_in_their_order(tokenizer):
  assert tokenizer.vocab_size == len(helpers.tokens())
  assert tokenizer.encode("the then in") == ids_of(
    "t", "he", "Ġthe", "n", "Ġ", "in"
  )


def test_digits_stand_alone_where_the_file_says_so(tokenizer, tmp_path):
  assert tokenizer.encode("12 3") == ids_of("1", "2", "Ġ", "3")
  helpers.write(tmp_path / "a.gguf", {"tokenizer.ggml.pre": "gpt-2"})
  other = gguf_tokenizer.read(GgufFile(tmp_path / "a.gguf"))
  assert other.encode("12 3") == ids_of("12", "Ġ3")
  assert other.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
  "text",
  [
    "",
    " ",
    "\ta\r\n\n  b ",
    "naïve 漢字 🙂 e\u0301",
    "\0\x7f\ufeff \U0010ffff",
  ],
)
def test_text_comes_back(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.keeps_text
  assert tokenizer.decode_bytes(ids) == text.encode()
  assert tokenizer.byte_length(np.array(ids, np.int32)).sum() == len(
    text.encode()
  )


def test_special_tokens_are_not_read_from_text_and_stand_for_no_byte(tokenizer):
  text = "<|im_start|>in<|im_end|>"
  ids = tokenizer.encode(text)
  assert min(ids) >= len(helpers.SPECIALS)
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode_bytes(range(len(helpers.SPECIALS))) == b""


def test_the_file_says_what_ends_a_text(tokenizer, tmp_path):
  # `<|endoftext|>` is there, too, and would be taken otherwise.
  assert tokenizer.end_of_text == helpers.END
  tokenizer.save(tmp_path)
  again = tokenizers.load(str(tmp_path))
  assert again.end_of_text == helpers.END
  assert again.fingerprint == tokenizer.fingerprint
  helpers.write(tmp_path / "a.gguf", {"tokenizer.ggml.eos_token_id": 0})
  assert gguf_tokenizer.read(GgufFile(tmp_path / "a.gguf")).end_of_text == 0


def test_bytes_without_a_token_are_left_out(tmp_path):
  names = helpers.tokens()
  lost = names.index("q")
  names[lost] = "unused"
  helpers.write(tmp_path / "a.gguf", {"tokenizer.ggml.tokens": names})
  tokenizer = gguf_tokenizer.read(GgufFile(tmp_path / "a.gguf"))
  assert not tokenizer.keeps_text
  assert tokenizer.decode(tokenizer.encode("in queue")) == "in ueue"


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"model": "llama"}, "of kind 'llama'"),
    ({"model": None}, "does not say tokenizer.ggml.model"),
    ({"pre": "llama-bpe"}, "cuts text as 'llama-bpe'"),
    ({"pre": None}, "cuts text as 'default'"),
    ({"add_bos_token": True}, "wants a token before every text"),
    ({"eos_token_id": 5}, "ends texts by token 5"),
    ({"eos_token_id": 10_000}, "ends texts by token 10000"),
    ({"tokens": ["a", "b", "a"]}, "names a token twice"),
    ({"token_type": [3, 3, 3]}, "does not say what each is"),
    ({"merges": ["no such"]}, "is damaged"),
  ],
)
def test_other_tokenizers_are_refused(tmp_path, changes, says):
  changes = {f"tokenizer.ggml.{name}": v for name, v in changes.items()}
  helpers.write(tmp_path / "a.gguf", changes)
  with pytest.raises(UserError, match=says) as caught:
    gguf_tokenizer.read(GgufFile(tmp_path / "a.gguf"))
  assert "\n" not in str(caught.value)
