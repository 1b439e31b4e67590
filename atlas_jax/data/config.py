"""What text is read, how it is tokenised, and into what windows."""

import dataclasses

from atlas_jax import config
from atlas_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Configuration of the data pipeline.

  The granularity at which documents start inside a window is the chunk of the
  model's memory, which is not here, and `align`.

  Raises:
    UserError: A field is outside its range.
  """

  path: str = config.field(
    "",
    "Training text: a file, a folder (every .txt and .jsonl in it) or a glob, "
    "each file also as .gz or .xz. Empty: the source of the running Python's "
    "standard library.",
  )
  valid_path: str = config.field(
    "",
    "Held-out text, in the same forms. Empty: documents of data.path are held "
    "out by a hash of their names.",
  )
  valid_fraction: float = config.field(
    0.05,
    "Share of the documents that is held out while data.valid_path is empty. "
    "1 holds out everything, 0 nothing.",
  )
  field: str = config.field("text", "Field of a .jsonl line that holds text.")
  tokenizer: str = config.field(
    "bytes",
    "'bytes', a SentencePiece .model file, or a Hugging Face tokenizer.json.",
  )
  window: int = config.field(
    1024, "Tokens in one training example; a multiple of the memory's chunk."
  )
  align: int = config.field(
    1,
    "Documents start at multiples of this as well as of the memory's chunk: "
    "models of other chunks that divide it then read equal batches.",
  )
  shuffle: bool = config.field(
    True, "Shuffle the windows anew in every epoch; else read them in order."
  )
  eval_windows: int = config.field(
    64, "Held-out windows that one evaluation reads; 0 reads all of them."
  )
  cache: str = config.field(
    "",
    "Folder of the tokenised windows, shared by runs on the same text. Empty: "
    "inside the working folder.",
  )
  read_threads: int = config.field(
    2, "Threads that read and lay out windows ahead of training."
  )

  def __post_init__(self):
    if not 0.0 <= self.valid_fraction <= 1.0:
      raise UserError(
        f"data.valid_fraction is {self.valid_fraction}; "
        "give a number between 0 and 1"
      )
    if self.window < 2:
      raise UserError(f"data.window is {self.window}; give at least 2")
    if self.align < 1:
      raise UserError(f"data.align is {self.align}; give 1 or more")
    if self.eval_windows < 0:
      raise UserError(
        f"data.eval_windows is {self.eval_windows}; give 0 (all) or more"
      )
    if self.read_threads < 1:
      raise UserError(
        f"data.read_threads is {self.read_threads}; give at least 1"
      )
