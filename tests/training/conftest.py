"""Makes the stand-in model importable as `standin` by the tests beside it."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
