"""The one exception that a user's mistake raises."""


class UserError(ValueError):
  """A request that cannot be carried out, said in one line.

  The message names what is wrong and what to do about it. Programs print it
  without a traceback and exit with a non-zero code.
  """
