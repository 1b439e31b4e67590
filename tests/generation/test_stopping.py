"""Stop strings, however the text is cut into pieces."""

import itertools

import pytest

from atlas_jax.errors import UserError
from atlas_jax.generation.stopping import StopStrings


def run(pieces, stops):
  """All text that is passed on, and whether it was stopped."""
  stopper = StopStrings(stops)
  out = []
  for piece in pieces:
    text, stopped = stopper.push(piece)
    out.append(text)
    if stopped:
      return "".join(out), True
  return "".join(out) + stopper.finish(), False


@pytest.mark.parametrize(
  ("text", "stops", "expected"),
  [
    ("hello END x", ["END"], "hello "),
    ("hello EN", ["END"], None),
    ("aaab", ["aab"], "a"),
    ("ababac", ["abac"], "ab"),
    ("xyz", ["yz", "y"], "x"),
    # The one that is complete first counts, the longer of two at once.
    ("abcd", ["abcd", "bc"], "a"),
    ("abc", ["c", "bc"], "a"),
    ("ends", ["s"], "end"),
    ("é\n\nü", ["\n\n"], "é"),
    ("nothing", [], None),
    ("", ["x"], None),
  ],
)
def test_every_cut_into_pieces_gives_the_same(text, stops, expected):
  borders = range(1, len(text))
  for count in range(min(len(text), 4)):
    for chosen in itertools.combinations(borders, count):
      ends = [0, *chosen, len(text)]
      pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
      found, stopped = run(pieces, stops)
      assert stopped == (expected is not None)
      assert found == (text if expected is None else expected), pieces


def test_no_more_is_held_back_than_must_be():
  stopper = StopStrings(["END"])
  assert stopper.push("abE") == ("ab", False)
  assert stopper.push("N") == ("", False)
  assert stopper.push("x") == ("ENx", False)
  assert stopper.push("EEE") == ("EE", False)
  assert stopper.finish() == "E"
  assert stopper.finish() == ""


@pytest.mark.parametrize("stops", ["END", [""], ["x", ""]])
def test_what_is_no_list_of_strings_is_refused(stops):
  with pytest.raises(UserError, match="stop string"):
    StopStrings(stops)
