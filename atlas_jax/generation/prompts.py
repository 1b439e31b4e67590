"""Texts to go on from: where they come from, and what is wrong with them."""

import pathlib
from collections.abc import Sequence
from typing import BinaryIO

from atlas_jax.data.tokenizer import Tokenizer
from atlas_jax.errors import UserError

STDIN = "-"
"""The path that stands for standard input."""


def choose(text: str | None, path: str | None, stdin: BinaryIO) -> str:
  """Returns the prompt that is given as a text or as a file.

  Args:
    text: The prompt itself, or None.
    path: A UTF-8 file that holds it, taken to the letter; "-": standard
      input; or None.
    stdin: Standard input.

  Raises:
    UserError: None or both are given, the file cannot be read, or the prompt
      is empty or not UTF-8.
  """
  if (text is None) == (path is None):
    raise UserError(
      "give a text to go on from, by either --prompt=TEXT or --prompt_file=FILE"
    )
  if path is not None:
    try:
      content = (
        stdin.read() if path == STDIN else pathlib.Path(path).read_bytes()
      )
      text = content.decode()
    except OSError as error:
      raise UserError(
        f"cannot read the prompt from {path}: {error.strerror or error}"
      ) from None
    except UnicodeDecodeError as error:
      raise UserError(
        f"the prompt is not UTF-8 text (byte {error.start} is broken): "
        "convert it to UTF-8"
      ) from None
  assert text is not None
  _check(text, "the prompt")
  return text


def encode(
  prompts: Sequence[str], tokenizer: Tokenizer, *, may_be_empty: bool = False
) -> list[list[int]]:
  """Returns the tokens of each prompt.

  Raises:
    UserError: There is no prompt, or one is empty or no Unicode text.
  """
  if isinstance(prompts, str):
    raise UserError("prompts are a list: give [text] for a single one")
  if not prompts:
    raise UserError("there is no prompt: give at least one")
  for number, prompt in enumerate(prompts):
    name = "the prompt" if len(prompts) == 1 else f"prompt {number}"
    _check(prompt, name, may_be_empty)
  return [tokenizer.encode(prompt) for prompt in prompts]


def _check(prompt: str, name: str, may_be_empty: bool = False) -> None:
  if not prompt and not may_be_empty:
    raise UserError(
      f"{name} is empty: give at least one character to go on from"
    )
  try:
    prompt.encode()
  except UnicodeEncodeError as error:
    # The bytes of a command line that are not UTF-8 become such characters.
    raise UserError(
      f"{name} is not UTF-8 text (character {error.start} is broken): "
      "convert it to UTF-8"
    ) from None
