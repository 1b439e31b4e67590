"""Round trips, byte lengths, streaming, saving and damage of tokenizers."""

import json
import lzma
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_jax.data import ByteTokenizer, StreamDecoder, tokenizers
from atlas_jax.errors import UserError

KINDS = ("bytes", "sentencepiece_file", "byte_level_file", "fallback_file")
HOSTILE = (
  "",
  " ",
  "  two leading, two trailing  ",
  "\ttab\n\n\r\nlines\r",
  "naïve Ünïcödé — “quotes”",
  "漢字かな交じり文",
  "🙂👩‍👩‍👧‍👦 e\u0301 vs \u00e9, ﬁ, Å",
  "▁a marker▁▁ of spaces ▁",
  "<0x41> <s> </s> <unk> <|endoftext|>",
  "\0\x01\x7f \u200b\ufeff \U0010ffff",
  "x" * 500,
)


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(request):
  if request.param == "bytes":
    return ByteTokenizer()
  return tokenizers.load(str(request.getfixturevalue(request.param)))


@pytest.mark.parametrize("text", HOSTILE)
def test_text_comes_back_and_its_bytes_are_counted(any_tokenizer, text):
  ids = any_tokenizer.encode(text)
  assert all(0 <= token < any_tokenizer.vocab_size for token in ids)
  assert any_tokenizer.end_of_text not in ids
  assert any_tokenizer.decode(ids) == text
  assert any_tokenizer.decode_bytes(np.array(ids, np.int32)) == text.encode()
  lengths = any_tokenizer.byte_length(np.array(ids, np.int64))
  assert lengths.dtype == np.int32
  assert lengths.sum() == len(text.encode())


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back(any_tokenizer, text):
  ids = any_tokenizer.encode(text)
  assert any_tokenizer.decode_bytes(ids) == text.encode()


def test_end_of_text_is_no_byte(any_tokenizer):
  end = any_tokenizer.end_of_text
  assert 0 <= end < any_tokenizer.vocab_size
  assert any_tokenizer.decode_bytes([end]) == b""
  assert any_tokenizer.decode_bytes(np.array([end])) == b""
  assert any_tokenizer.byte_length(np.array([end])) == 0
  assert any_tokenizer.keeps_text


def test_known_words_are_few_tokens(any_tokenizer):
  text = "the memory learns"
  expected = len(text) if any_tokenizer.vocab_size == 257 else 8
  assert len(any_tokenizer.encode(text)) <= expected


def test_id_out_of_range_is_an_error(any_tokenizer):
  beyond = any_tokenizer.vocab_size
  with pytest.raises(IndexError):
    any_tokenizer.decode_bytes([beyond])
  with pytest.raises(IndexError):
    any_tokenizer.decode_bytes(np.array([beyond]))


def test_stream_decoder_gives_whole_characters(any_tokenizer):
  text = "a é 漢 🙂 end"
  decoder = StreamDecoder(any_tokenizer)
  parts = [decoder.push(token) for token in any_tokenizer.encode(text)]
  assert "".join(parts) == text
  assert decoder.finish() == ""
  assert not any("\ufffd" in part for part in parts)


def test_stream_decoder_replaces_a_broken_character():
  tokenizer = ByteTokenizer()
  broken = "é🙂".encode()[:-1]
  decoder = StreamDecoder(tokenizer)
  parts = [decoder.push(token) for token in broken]
  assert parts == ["", "é", "", "", ""]
  assert decoder.finish() == "\ufffd"
  assert tokenizer.decode(broken) == "é\ufffd"


def test_saved_tokenizer_is_the_same(any_tokenizer, tmp_path):
  any_tokenizer.save(tmp_path / "kept")
  any_tokenizer.save(tmp_path / "kept")
  loaded = tokenizers.load(str(tmp_path / "kept"))
  assert [p.name for p in (tmp_path / "kept").iterdir()] == [loaded.file_name]
  assert loaded.fingerprint == any_tokenizer.fingerprint
  assert loaded.vocab_size == any_tokenizer.vocab_size
  assert loaded.end_of_text == any_tokenizer.end_of_text
  text = "the memory 🙂"
  assert loaded.encode(text) == any_tokenizer.encode(text)


def test_fingerprints_differ(request):
  prints = {ByteTokenizer().fingerprint}
  for name in KINDS[1:]:
    path = request.getfixturevalue(name)
    prints.add(tokenizers.load(str(path)).fingerprint)
  assert len(prints) == len(KINDS)


def test_tokens_are_those_of_the_library(sentencepiece_file):
  sentencepiece = pytest.importorskip(
    "sentencepiece", reason="pip install 'atlas-jax[text]'"
  )
  library = sentencepiece.SentencePieceProcessor(
    model_file=str(sentencepiece_file)
  )
  ours = tokenizers.load(str(sentencepiece_file))
  text = "the window shows what the gates let go of"
  # The library puts a space before a text, which ours leaves to the text.
  assert ours.encode(" " + text) == library.encode(text)
  assert ours.vocab_size == len(library)
  assert ours.end_of_text == library.eos_id()


def test_model_that_loses_text_says_so(plain_sentencepiece_file):
  tokenizer = tokenizers.load(str(plain_sentencepiece_file))
  assert not tokenizer.keeps_text
  # It has no token for the end of a text and is given one.
  assert tokenizer.end_of_text == tokenizer.vocab_size - 1
  ids = tokenizer.encode("the memory\nlearns Ω")
  assert tokenizer.decode(ids) == "the memory learns \ufffd"
  assert tokenizer.byte_length(np.array(ids)).sum() == 21


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    ("byts", "no tokenizer; give 'bytes'"),
    ("absent.model", "cannot read the tokenizer 'absent.model'"),
    ("absent.json", "cannot read the tokenizer 'absent.json'"),
  ],
)
def test_wrong_name(spec, message):
  with pytest.raises(UserError, match=message):
    tokenizers.load(spec)


def test_folder_without_tokenizer(tmp_path):
  with pytest.raises(UserError, match="name the tokenizer's file"):
    tokenizers.load(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\xff\x00rubbish", b"{}", b"[1]"])
@pytest.mark.parametrize("suffix", [".model", ".json"])
def test_damaged_file(tmp_path, content, suffix):
  path = tmp_path / f"damaged{suffix}"
  path.write_bytes(content)
  with pytest.raises(UserError, match="is damaged or is no") as caught:
    tokenizers.load(str(path))
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["sentencepiece_file", "byte_level_file"])
def test_truncated_file(tmp_path, request, kind):
  whole = request.getfixturevalue(kind)
  path = tmp_path / whole.name
  path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
  with pytest.raises(UserError, match="is damaged or is no"):
    tokenizers.load(str(path))


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"model": {"type": "WordPiece", "vocab": {}}}, "a WordPiece vocabulary"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer Whitespace"),
  ],
)
def test_vocabulary_that_drops_spaces(
  tmp_path, byte_level_file, change, reason
):
  spec = json.loads(byte_level_file.read_text())
  path = tmp_path / "tokenizer.json"
  path.write_text(json.dumps({**spec, **change}))
  with pytest.raises(UserError, match=reason):
    tokenizers.load(str(path))


@pytest.mark.parametrize(
  ("library", "suffix", "module"),
  [
    ("sentencepiece", ".model", "tokenizer_sentencepiece"),
    ("tokenizers", ".json", "tokenizer_huggingface"),
  ],
)
def test_missing_library(tmp_path, monkeypatch, library, suffix, module):
  path = tmp_path / f"any{suffix}"
  path.touch()
  monkeypatch.setitem(sys.modules, library, None)
  monkeypatch.delitem(sys.modules, f"atlas_jax.data.{module}", raising=False)
  import atlas_jax.data

  monkeypatch.delattr(atlas_jax.data, module, raising=False)
  with pytest.raises(UserError, match=f"pip install {library}"):
    tokenizers.load(str(path))


def test_real_sentencepiece_model(data_root):
  path = data_root / "tokenizers" / "mistral_v1_32k.spm.model"
  tokenizer = tokenizers.load(str(path))
  assert tokenizer.vocab_size == 32_000
  assert tokenizer.end_of_text == 2
  for text in HOSTILE:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_length(np.array(ids, int)).sum() == len(text.encode())


def test_real_byte_level_vocabulary(data_root, tmp_path):
  library = pytest.importorskip(
    "tokenizers", reason="pip install 'atlas-jax[text]'"
  )
  folder = data_root / "tokenizers"
  names = {path.name: path for path in folder.glob("gpt2_*.xz")}
  for name, path in names.items():
    (tmp_path / name[:-3]).write_bytes(lzma.decompress(path.read_bytes()))
  vocab = next(tmp_path.glob("*encoder*"))
  merges = next(tmp_path.glob("*bpe*"))
  core = library.Tokenizer(
    library.models.BPE.from_file(str(vocab), str(merges))
  )
  core.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  core.decoder = library.decoders.ByteLevel()
  core.add_special_tokens(["<|endoftext|>"])
  core.save(str(tmp_path / "tokenizer.json"))
  tokenizer = tokenizers.load(str(tmp_path / "tokenizer.json"))
  assert tokenizer.vocab_size == 50_257
  assert tokenizer.end_of_text == 50_256
  for text in HOSTILE:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
  assert tokenizer.encode("Hello world") == [15496, 995]
