"""Room in states that grow, in doublings: few shapes are few compilations."""

FIRST_ROOM = 256
"""Tokens for which there is room at first."""


def room_for(tokens: int, room: int = 0) -> int:
  """Returns room for so many tokens; never less than there is.

  Args:
    tokens: How many tokens a row must be able to hold.
    room: For how many there is room now.
  """
  room = max(room, FIRST_ROOM)
  while room < tokens:
    room *= 2
  return room
