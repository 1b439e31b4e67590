"""Tiny tokenizers and texts, made here."""

import json
import pathlib
import re

import pytest

from atlas_jax import data

_TEXT = (
  "the memory learns at test time what the window shows and forgets what the "
  "gates let go of, chunk by chunk; é ü 漢字 emoji 🙂 \\t tabs, 0123456789. "
)
WORDS = _TEXT.split()


def sentences(count: int) -> list[str]:
  """Different sentences over the words."""
  step = len(WORDS)
  return [
    " ".join(WORDS[(i * j + j) % step] for j in range(1, 12))
    for i in range(count)
  ]


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory) -> pathlib.Path:
  """A SentencePiece model with byte fallback and the usual normaliser."""
  return _train_sentencepiece(tmp_path_factory, byte_fallback=True)


@pytest.fixture(scope="session")
def plain_sentencepiece_file(tmp_path_factory) -> pathlib.Path:
  """A SentencePiece model as its defaults make it, and without `</s>`."""
  return _train_sentencepiece(tmp_path_factory, eos_id=-1)


def _train_sentencepiece(tmp_path_factory, **options) -> pathlib.Path:
  sentencepiece = pytest.importorskip(
    "sentencepiece", reason="pip install 'atlas-jax[text]'"
  )
  prefix = tmp_path_factory.mktemp("sentencepiece") / "tiny"
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(sentences(200)),
    model_prefix=str(prefix),
    vocab_size=330 if options.get("byte_fallback") else 90,
    model_type="bpe",
    minloglevel=2,
    **options,
  )
  return prefix.with_suffix(".model")


@pytest.fixture(scope="session")
def byte_level_file(tmp_path_factory) -> pathlib.Path:
  """A byte-level tokenizer.json as GPT-2's, with what changes text put in."""
  tokenizers = pytest.importorskip(
    "tokenizers", reason="pip install 'atlas-jax[text]'"
  )
  core = tokenizers.Tokenizer(tokenizers.models.BPE())
  byte_level = tokenizers.pre_tokenizers.ByteLevel
  core.normalizer = tokenizers.normalizers.NFKC()
  core.pre_tokenizer = byte_level(add_prefix_space=True)
  core.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=400,
    initial_alphabet=byte_level.alphabet(),
    special_tokens=["<|endoftext|>"],
    show_progress=False,
  )
  core.train_from_iterator(sentences(200), trainer)
  core.enable_truncation(4)
  core.enable_padding(length=32)
  path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
  core.save(str(path))
  return path


@pytest.fixture(scope="session")
def fallback_file(tmp_path_factory) -> pathlib.Path:
  """A tokenizer.json with byte fallback as Llama 2's."""
  tokenizers = pytest.importorskip(
    "tokenizers", reason="pip install 'atlas-jax[text]'"
  )
  model = tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>")
  core = tokenizers.Tokenizer(model)
  core.normalizer = tokenizers.normalizers.Sequence(
    [
      tokenizers.normalizers.Prepend("▁"),
      tokenizers.normalizers.Replace(" ", "▁"),
    ]
  )
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=420,
    special_tokens=["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256))],
    max_token_length=8,
    show_progress=False,
  )
  core.train_from_iterator(sentences(200), trainer)
  path = tmp_path_factory.mktemp("fallback") / "tokenizer.json"
  core.save(str(path))
  return _with_plain_bytes(path)


def _with_plain_bytes(path: pathlib.Path) -> pathlib.Path:
  """Leaves only <unk> and </s> among the special tokens, as Llama 2 does."""
  spec = json.loads(path.read_text())
  spec["added_tokens"] = spec["added_tokens"][:2]
  path.write_text(json.dumps(spec))
  return path


@pytest.fixture
def tokenizer() -> data.ByteTokenizer:
  """Bytes."""
  return data.ByteTokenizer()


@pytest.fixture
def text_folder(tmp_path) -> pathlib.Path:
  """A folder of 40 short and long documents; no two windows are alike."""
  folder = tmp_path / "text"
  folder.mkdir()
  for i, line in enumerate(sentences(40)):
    text = "".join(
      f"{word} {i}.{n} " for n in range(1 + i * i % 17) for word in line.split()
    )
    text = re.sub(r"\d+ ", lambda found: f"{found.start()} ", text) + "\n"
    (folder / f"document_{i:02}.txt").write_text(text, encoding="utf-8")
  return folder
