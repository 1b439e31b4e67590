"""Continues a text with a trained model.

  python -m experiments.generate --workdir=DIR --prompt='def main('
  python -m experiments.generate --workdir=DIR --prompt_file=- < story.txt

Prints what comes after the prompt while it is drawn. Memory does not grow with
the length of prompt or text: `--max_tokens=0` goes on until the model ends the
text or Ctrl-C is pressed.
"""

from absl import flags as absl_flags

from atlas_jax.errors import UserError
from atlas_jax.generation import Generator, Sampling, prompts
from atlas_jax.training import restore
from experiments import flags

_WORKDIR = absl_flags.DEFINE_string(
  "workdir", None, "Folder of a run, or one checkpoint in it."
)
_PROMPT = absl_flags.DEFINE_string("prompt", None, "Text to go on from.")
_PROMPT_FILE = absl_flags.DEFINE_string(
  "prompt_file", None, "File with the prompt in UTF-8; -: standard input."
)
flags.define_fields(Sampling)
_SEED = absl_flags.DEFINE_integer("seed", 0, "Equal seeds give equal texts.")
_MAX_TOKENS = absl_flags.DEFINE_integer(
  "max_tokens", 256, "Tokens to draw; 0: until the text ends by itself."
)
_STOP = absl_flags.DEFINE_multi_string(
  "stop", [], "End before this string; may be given several times."
)


def main() -> None:
  """Prints a continuation."""
  sampling = Sampling(**flags.overrides(Sampling))
  prompt = prompts.choose(_PROMPT.value, _PROMPT_FILE.value, flags.stdin())
  if not _WORKDIR.value:
    raise UserError("no model given: add --workdir=DIR, the folder of a run")
  run = restore.load(_WORKDIR.value)
  generator = Generator(run.model, run.tokenizer, trained=run.is_trained)
  for piece in generator.stream(
    [prompt],
    sampling=sampling,
    seed=_SEED.value,
    max_tokens=_MAX_TOKENS.value,
    stop=_STOP.value,
  ):
    print(piece.text, end="", flush=True)
  print()


if __name__ == "__main__":
  flags.run(main)
