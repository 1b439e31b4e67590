"""Ends a text at the first of some strings, wherever its pieces are cut."""

from collections.abc import Sequence

from atlas_jax.errors import UserError


class StopStrings:
  """Passes text on until one of some strings is complete in it.

  What could still become one of them is held back, which is never more than
  the longest of them. The string that is complete first counts, so that the
  result does not depend on how the text is cut into pieces.

  Args:
    stops: The strings; they are no part of the text that is passed on.

  Raises:
    UserError: One of them is empty.
  """

  def __init__(self, stops: Sequence[str]):
    if isinstance(stops, str):
      raise UserError("stop strings are a list: give [text] for a single one")
    if not all(stops):
      raise UserError("a stop string is empty; leave it out")
    self._stops = tuple(stops)
    self._held = ""

  def push(self, text: str) -> tuple[str, bool]:
    """Takes the next piece of the text.

    Returns:
      The text that is certain now, and whether the text has ended.
    """
    held = self._held + text
    found = [
      (held.index(stop) + len(stop), held.index(stop))
      for stop in self._stops
      if stop in held
    ]
    if found:
      self._held = ""
      return held[: min(found)[1]], True
    certain = len(held) - max(
      (_overlap(held, stop) for stop in self._stops), default=0
    )
    self._held = held[certain:]
    return held[:certain], False

  def finish(self) -> str:
    """Returns what was held back, as the text ends without a stop string."""
    held, self._held = self._held, ""
    return held


def _overlap(text: str, stop: str) -> int:
  """Length of the longest end of `text` with which `stop` begins."""
  longest = min(len(text), len(stop) - 1)
  for length in range(longest, 0, -1):
    if text.endswith(stop[:length]):
      return length
  return 0
