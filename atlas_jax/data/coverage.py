"""The bytes of text that some windows hold."""

import collections
from collections.abc import Iterable

from array_record.python import array_record_data_source

from atlas_jax.data import records, windows
from atlas_jax.data.tokenizer import Tokenizer
from atlas_jax.data.windows import Split

# Records asked for one by one take three times as long.
_READ_AT_ONCE = 1024


def window_bytes(
  split: Split, tokenizer: Tokenizer, indices: Iterable[int]
) -> list[bytes]:
  """Returns the text behind windows, for a baseline that reads the same.

  Pieces of a document that follow one another are joined, wherever their
  windows lie. A model is scored on every token of such a run but the first,
  which it only reads.

  Args:
    split: The windows.
    tokenizer: The tokenizer they were made with.
    indices: Which windows; one given twice counts once.

  Returns:
    One run of bytes for every uninterrupted stretch of a document, in order of
    documents and of places in them.
  """
  source = array_record_data_source.ArrayRecordDataSource(str(split.path))
  documents = collections.defaultdict(list)
  wanted = sorted(set(map(int, indices)))
  with windows.reading(split.path):
    for begin in range(0, len(wanted), _READ_AT_ONCE):
      for record in source.__getitems__(wanted[begin : begin + _READ_AT_ONCE]):
        for piece in records.unpack(record):
          documents[piece.document].append((piece.start, piece.tokens))
  runs: list[bytes] = []
  for document in sorted(documents):
    run, end = bytearray(), None
    for start, tokens in sorted(documents[document], key=lambda pair: pair[0]):
      joined = start == end
      end = start + len(tokens) - 1
      if run and not joined:
        runs.append(bytes(run))
        run = bytearray()
      # A piece that goes on where the last one ended begins with its target.
      run += tokenizer.decode_bytes(tokens[int(joined) :])
    runs.append(bytes(run))
  return runs
