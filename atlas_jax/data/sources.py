"""Documents from files: text and JSON lines, plain or compressed.

A source is a file, a folder or a glob. Everything is read as UTF-8 and
streamed, so that a compressed corpus is never held in memory as a whole. The
identity of a document does not depend on where its folder lies: it is the path
inside the folder, with `#line` behind it for a line of a `.jsonl` file.
"""

import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator

from atlas_jax import paths
from atlas_jax.errors import UserError

# Characters tokenised at once. A longer document is cut behind a line break,
# which bounds the memory that a tokenizer needs for a document of any length;
# SentencePiece is also twice as fast on parts of this size as on 1 MB.
PART_CHARACTERS = 1 << 16

_COMPRESSED = (".gz", ".xz")
_FOLDER_SUFFIXES = (".txt", ".jsonl")

# Folders below the standard library that are not read. Other software lives in
# the package folders. Tests hold files that are broken on purpose, and some
# systems install Python without them, on which the corpus should not depend.
# The last two are generated: a book of help texts, larger than any module, and
# a hundred tables so alike that a split by file would not keep them apart.
_NOT_SOURCE = frozenset(
  (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "pydoc_data",
    "encodings",
  )
)


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """One file of a source.

  Attributes:
    id: Path inside the source, with forward slashes.
    path: Where the file is.
  """

  id: str
  path: pathlib.Path

  @property
  def is_json(self) -> bool:
    """Whether every line is a JSON object."""
    return _inner_suffix(self.path) == ".jsonl"


@dataclasses.dataclass(frozen=True)
class Document:
  """One document.

  Attributes:
    id: Identity, equal wherever the source lies.
    parts: The text in order, in parts of about `PART_CHARACTERS`, each
      non-empty. To be consumed before the next document is asked for.
  """

  id: str
  parts: Iterator[str]


def find_files(path: str) -> list[SourceFile]:
  """Lists the files of a source in a fixed order.

  Args:
    path: A file (any name; `.jsonl` is read as JSON lines, everything else as
      text), a folder (its `.txt` and `.jsonl` files at any depth, hidden ones
      left out), a glob (every file that matches, `**` for any depth), each
      file also with `.gz` or `.xz` behind its name; or "" for the source of
      the running Python's standard library.

  Raises:
    UserError: Nothing is there, or nothing that can be read as documents.
  """
  if not path:
    return _standard_library()
  place = paths.expand(path)
  if place.is_file():
    return [SourceFile(place.name, place)]
  if place.is_dir():
    return _folder(place)
  if glob.has_magic(path):
    return _glob(place)
  raise UserError(
    f"no text at {path!r}: there is no such file or folder; "
    "check data.path and data.valid_path"
  )


def fingerprint(files: list[SourceFile]) -> str:
  """Hashes names and contents (as stored, still compressed) of the files.

  Returns:
    A hexadecimal string.

  Raises:
    UserError: A file cannot be read.
  """
  total = hashlib.sha256()
  for file in files:
    with _errors(file.path), open(file.path, "rb") as stream:
      content = hashlib.file_digest(stream, "sha256").hexdigest()
    total.update(json.dumps([file.id, content]).encode())
  return total.hexdigest()


def read_documents(files: list[SourceFile], field: str) -> Iterator[Document]:
  """Streams the documents of the files, in order; empty ones are left out.

  Args:
    files: From `find_files`.
    field: The field of a `.jsonl` line that holds the text.

  Raises:
    UserError: A file is not UTF-8, cut off or unreadable, or a line of a
      `.jsonl` file is no JSON object with such a field. The message names the
      file, and the line where there is one.
  """
  for file in files:
    if file.is_json:
      yield from _json_documents(file, field)
    else:
      parts = _text_parts(file.path)
      first = next(parts, None)
      if first is not None:
        yield Document(file.id, itertools.chain((first,), parts))


def _standard_library() -> list[SourceFile]:
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  found = []
  for path in root.rglob("*.py"):
    name = path.relative_to(root)
    if _NOT_SOURCE.isdisjoint(name.parts[:-1]):
      found.append(SourceFile(name.as_posix(), path))
  if not found:
    raise UserError(
      "this Python has no source of its standard library on disk; "
      "give a text by data.path"
    )
  return sorted(found, key=lambda file: file.id)


def _folder(root: pathlib.Path) -> list[SourceFile]:
  found = []
  for path in root.rglob("*"):
    name = path.relative_to(root)
    hidden = any(part.startswith(".") for part in name.parts)
    known = _inner_suffix(path) in _FOLDER_SUFFIXES
    if known and not hidden and path.is_file():
      found.append(SourceFile(name.as_posix(), path))
  if not found:
    raise UserError(
      f"the folder {str(root)!r} holds no .txt or .jsonl file (also .gz, .xz); "
      f"for other text files give a glob such as '{root}/**/*.md'"
    )
  return sorted(found, key=lambda file: file.id)


def _glob(pattern: pathlib.Path) -> list[SourceFile]:
  # Names count from the last folder that is spelt out.
  spelt = itertools.takewhile(lambda p: not glob.has_magic(p), pattern.parts)
  root = pathlib.Path(*spelt)
  found = [
    SourceFile(path.relative_to(root).as_posix(), path)
    for path in map(pathlib.Path, glob.glob(str(pattern), recursive=True))
    if path.is_file()
  ]
  if not found:
    raise UserError(f"no file matches the glob {str(pattern)!r}")
  return sorted(found, key=lambda file: file.id)


def _inner_suffix(path: pathlib.Path) -> str:
  """The suffix below that of the compression, in lower case."""
  suffixes = [suffix.lower() for suffix in path.suffixes]
  if suffixes and suffixes[-1] in _COMPRESSED:
    suffixes.pop()
  return suffixes[-1] if suffixes else ""


@contextlib.contextmanager
def _errors(path: pathlib.Path, line: int = 0) -> Iterator[None]:
  """Turns what reading a file can raise into a UserError that names it."""
  where = f"{path}:{line}" if line else str(path)
  try:
    yield
  except UnicodeDecodeError as error:
    raise UserError(
      f"{where} is not UTF-8 text (byte {error.object[error.start]:#04x}: "
      f"{error.reason}); convert it or leave it out"
    ) from error
  except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
    raise UserError(
      f"{path} is cut off or is not what its name says ({error}); "
      "fetch or compress it again"
    ) from error
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _open(path: pathlib.Path, newline: str) -> io.TextIOWrapper:
  suffix = path.suffix.lower()
  binary = {".gz": gzip.open, ".xz": lzma.open}.get(suffix, open)(path, "rb")
  # "-sig": a byte order mark is no part of the text. No newline is changed.
  return io.TextIOWrapper(binary, encoding="utf-8-sig", newline=newline)


def _text_parts(path: pathlib.Path) -> Iterator[str]:
  with _errors(path), _open(path, newline="") as stream:
    while text := stream.read(PART_CHARACTERS):
      yield text + stream.readline()


def _json_documents(file: SourceFile, field: str) -> Iterator[Document]:
  number = 0
  with _errors(file.path):
    stream = _open(file.path, newline="\n")
  with stream:
    while True:
      with _errors(file.path, number + 1):
        line = stream.readline()
      if not line:
        return
      number += 1
      if line.strip():
        text = _field_of(line, field, f"{file.path}:{number}")
        if text:
          yield Document(f"{file.id}#{number}", _split(text))


def _field_of(line: str, field: str, where: str) -> str:
  try:
    value = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(
      f"{where} is not JSON ({error}); a .jsonl file holds one object a line"
    ) from error
  if not isinstance(value, dict):
    raise UserError(
      f"{where} is a JSON {type(value).__name__}, not an object; "
      "a .jsonl file holds one object a line"
    )
  text = value.get(field)
  if not isinstance(text, str):
    names = [name for name, item in value.items() if isinstance(item, str)]
    has = ", ".join(map(repr, names[:12])) or "none"
    raise UserError(
      f"{where} has no text field {field!r}; its text fields are: {has}; "
      "choose one by data.field"
    )
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise UserError(
      f"{where} holds half a surrogate pair in {field!r}, which is no Unicode "
      "text; repair or leave out the line"
    ) from error
  return text


def _split(text: str) -> Iterator[str]:
  start = 0
  while start < len(text):
    end = start + PART_CHARACTERS
    if end < len(text):
      line_break = text.find("\n", end)
      end = len(text) if line_break < 0 else line_break + 1
    yield text[start:end]
    start = end
