"""Prompts: where they come from and what is wrong with them."""

import io

import pytest

from atlas_jax.data.tokenizers import ByteTokenizer
from atlas_jax.errors import UserError
from atlas_jax.generation import prompts

NOTHING = io.BytesIO()


def test_a_prompt_is_a_text_a_file_or_standard_input(tmp_path):
  path = tmp_path / "prompt.txt"
  path.write_bytes("né\r\n".encode())
  assert prompts.choose("né", None, NOTHING) == "né"
  assert prompts.choose(None, str(path), NOTHING) == "né\r\n"
  assert prompts.choose(None, "-", io.BytesIO(b"x\n")) == "x\n"


@pytest.mark.parametrize(
  ("text", "path", "stdin", "message"),
  [
    (None, None, b"", "--prompt=TEXT or --prompt_file=FILE"),
    ("x", "-", b"x", "--prompt=TEXT or --prompt_file=FILE"),
    ("", None, b"", "the prompt is empty"),
    (None, "-", b"", "the prompt is empty"),
    (None, "-", b"ab\xff", r"not UTF-8 text \(byte 2"),
    ("ab\udcff", None, b"", r"not UTF-8 text \(character 2"),
    (None, "/no/such/file", b"", "cannot read the prompt from /no/such/file"),
    (None, "/", b"", "cannot read the prompt from /"),
  ],
)
def test_a_bad_prompt_is_told_in_one_line(text, path, stdin, message):
  with pytest.raises(UserError, match=message) as error:
    prompts.choose(text, path, io.BytesIO(stdin))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("texts", "message"),
  [
    ("text", "prompts are a list"),
    ([], "there is no prompt"),
    (["a", ""], "prompt 1 is empty"),
    (["a\udc80", "b"], "prompt 0 is not UTF-8"),
  ],
)
def test_a_bad_batch_names_the_prompt(texts, message):
  with pytest.raises(UserError, match=message):
    prompts.encode(texts, ByteTokenizer())


def test_a_prompt_may_be_empty_where_something_was_read_before():
  ids = prompts.encode(["", "a"], ByteTokenizer(), may_be_empty=True)
  assert ids == [[], [97]]
