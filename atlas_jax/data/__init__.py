"""From text files to batches of packed windows, and the baseline beside them.

`prepare` tokenises text once into windows; `train_dataset`, `iterate` and
`valid_batches` read them; `window_bytes` returns the text behind some windows,
to which `Trigram` can be fitted.

```
tokenizer = tokenizers.load(config.tokenizer)
windows = prepare(config, tokenizer, chunk=64, cache="cache")
dataset = train_dataset(windows.train, batch=8, seed=0)
iterator = iterate(dataset)
batch = next(iterator)   # dict of arrays [B, T]
```
"""

from atlas_jax.data import tokenizers
from atlas_jax.data.config import DataConfig
from atlas_jax.data.coverage import window_bytes
from atlas_jax.data.pipeline import (
  iterate,
  train_dataset,
  train_indices,
  valid_batches,
  valid_indices,
)
from atlas_jax.data.tokenizer import (
  ByteTokenizer,
  StreamDecoder,
  Tokenizer,
)
from atlas_jax.data.trigram import Trigram
from atlas_jax.data.windows import Split, Windows, open_windows, prepare

__all__ = [
  "ByteTokenizer",
  "DataConfig",
  "Split",
  "StreamDecoder",
  "Tokenizer",
  "Trigram",
  "Windows",
  "iterate",
  "open_windows",
  "prepare",
  "tokenizers",
  "train_dataset",
  "train_indices",
  "valid_batches",
  "valid_indices",
  "window_bytes",
]
