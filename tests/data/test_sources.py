"""Finding files, streaming documents, and every way in which that fails."""

import gzip
import json
import lzma
import shutil

import pytest

from atlas_jax.data import sources
from atlas_jax.errors import UserError


def read(path, field="text") -> dict[str, str]:
  """All documents by identity."""
  files = sources.find_files(str(path))
  documents = sources.read_documents(files, field)
  return {doc.id: "".join(doc.parts) for doc in documents}


def write(path, content: str):
  """Writes text, compressed as the suffix says."""
  opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
  with opener(path, "wb") as stream:
    stream.write(content.encode())
  return path


def lines(*texts: str) -> str:
  return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_text_file_is_read_unchanged(tmp_path, suffix):
  text = "one\r\ntwo\rthree\n\n é🙂\u2028 end "
  path = write(tmp_path / f"a.txt{suffix}", text)
  assert read(path) == {path.name: text}


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_json_lines(tmp_path, suffix):
  content = lines("first\nline é", "", "third\u2028") + "\n \n" + lines("six")
  path = write(tmp_path / f"a.jsonl{suffix}", content.rstrip("\n"))
  name = path.name
  assert read(path) == {
    f"{name}#1": "first\nline é",
    f"{name}#3": "third\u2028",
    f"{name}#6": "six",
  }


def test_only_line_feeds_end_a_json_line(tmp_path):
  path = write(tmp_path / "a.jsonl", '{"text":\r"a"}\r\n{"text": "b"}\r\n')
  assert read(path) == {"a.jsonl#1": "a", "a.jsonl#2": "b"}


def test_field_is_chosen(tmp_path):
  path = write(tmp_path / "a.jsonl", '{"text": "a", "body": "b"}')
  assert read(path, field="body") == {"a.jsonl#1": "b"}


def test_byte_order_mark_is_no_text(tmp_path):
  path = tmp_path / "a.txt"
  path.write_bytes(b"\xef\xbb\xbfhello")
  assert read(path) == {"a.txt": "hello"}


def test_folder_is_searched_to_the_bottom(tmp_path):
  (tmp_path / "b" / "deep").mkdir(parents=True)
  (tmp_path / ".hidden").mkdir()
  write(tmp_path / "z.txt", "z")
  write(tmp_path / "b" / "deep" / "a.TXT", "a")
  write(tmp_path / "b" / "c.jsonl.gz", lines("c"))
  write(tmp_path / "b" / "notes.md", "not read")
  write(tmp_path / "b" / ".secret.txt", "not read")
  write(tmp_path / ".hidden" / "x.txt", "not read")
  expected = {"b/c.jsonl.gz#1": "c", "b/deep/a.TXT": "a", "z.txt": "z"}
  found = read(tmp_path)
  assert found == expected
  assert list(found) == sorted(expected)


def test_glob_takes_any_suffix(tmp_path):
  (tmp_path / "src" / "inner").mkdir(parents=True)
  write(tmp_path / "src" / "a.py", "a")
  write(tmp_path / "src" / "inner" / "b.py", "b")
  write(tmp_path / "src" / "c.txt", "c")
  assert read(tmp_path / "src" / "*.py") == {"a.py": "a"}
  everything = read(tmp_path / "src" / "**" / "*.py")
  assert everything == {"a.py": "a", "inner/b.py": "b"}
  assert read(tmp_path / "*" / "*.py") == {"src/a.py": "a"}


def test_file_whose_name_looks_like_a_glob(tmp_path):
  path = write(tmp_path / "a[1].txt", "a")
  assert read(path) == {"a[1].txt": "a"}


def test_identity_and_fingerprint_do_not_depend_on_the_place(tmp_path):
  one = tmp_path / "one"
  (one / "sub").mkdir(parents=True)
  write(one / "sub" / "a.txt", "a")
  write(one / "b.txt", "b")
  shutil.copytree(one, tmp_path / "two")
  assert read(one) == read(tmp_path / "two")

  def mark(folder):
    return sources.fingerprint(sources.find_files(str(folder)))

  before = mark(one)
  assert mark(tmp_path / "two") == before
  write(one / "b.txt", "c")
  assert mark(one) != before
  write(one / "b.txt", "b")
  (one / "b.txt").rename(one / "d.txt")
  assert mark(one) != before


def test_long_documents_come_in_parts(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, "PART_CHARACTERS", 10)
  text = "12345\n1234567890123\n\nend é"
  write(tmp_path / "a.txt", text)
  write(tmp_path / "b.jsonl", lines(text, "x" * 35))
  parts = {
    doc.id: list(doc.parts)
    for doc in sources.read_documents(sources.find_files(str(tmp_path)), "text")
  }
  cut = ["12345\n1234567890123\n", "\nend é"]
  expected = {"a.txt": cut, "b.jsonl#1": cut, "b.jsonl#2": ["x" * 35]}
  assert parts == expected


def test_standard_library_is_the_default():
  files = sources.find_files("")
  names = [file.id for file in files]
  assert names == sorted(names)
  assert "tarfile.py" in names
  assert "json/decoder.py" in names
  folders = {part for name in names for part in name.split("/")[:-1]}
  left_out = {"site-packages", "dist-packages", "test", "encodings"}
  assert not folders & left_out
  some = [file for file in files if file.id == "tarfile.py"]
  (document,) = sources.read_documents(some, "text")
  assert "class TarFile" in "".join(document.parts)


def test_standard_library_without_source(tmp_path, monkeypatch):
  monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
  with pytest.raises(UserError, match="no source of its standard library"):
    sources.find_files("")


def test_missing_path(tmp_path):
  with pytest.raises(UserError, match=r"no text at .*absent.*data\.path"):
    read(tmp_path / "absent.txt")


def test_glob_without_match(tmp_path):
  with pytest.raises(UserError, match=r"no file matches the glob"):
    read(tmp_path / "*.txt")


def test_folder_without_text(tmp_path):
  write(tmp_path / "a.md", "a")
  with pytest.raises(UserError, match=r"no \.txt or \.jsonl file.*glob"):
    read(tmp_path)


@pytest.mark.parametrize(
  "content", [b"ok\xff\xfe", b"caf\xe9 au lait", b"\xc3"]
)
def test_text_that_is_not_utf8(tmp_path, content):
  path = tmp_path / "latin.txt"
  path.write_bytes(content)
  with pytest.raises(UserError, match=r"latin\.txt is not UTF-8 text"):
    read(path)


def test_json_line_that_is_not_utf8(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(lines("good").encode() + b'{"text": "\xff"}\n')
  with pytest.raises(UserError, match=r"a\.jsonl:\d+ is not UTF-8 text"):
    read(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_compressed_file_cut_off(tmp_path, name, suffix):
  content = lines(*(str(i) * 50 for i in range(200)))
  path = write(tmp_path / (name + suffix), content)
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(UserError, match="cut off or is not what its name says"):
    read(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_file_that_is_not_compressed(tmp_path, suffix):
  path = tmp_path / f"a.txt{suffix}"
  path.write_text("plain text")
  with pytest.raises(UserError, match=f"a.txt{suffix} is cut off or"):
    read(path)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("not json", r"a\.jsonl:3 is not JSON"),
    ('{"text": "unclosed', r"a\.jsonl:3 is not JSON"),
    ("[" * 100_000, r"a\.jsonl:3 is not JSON"),
    ('["text"]', r"a\.jsonl:3 is a JSON list, not an object"),
    ('{"title": "t", "body": "b", "n": 1}', r":3 has no .*'title', 'body';"),
    ('{"text": 5}', r"a\.jsonl:3 has no text field 'text'.*: none;"),
    (r'{"text": "\ud800"}', r"a\.jsonl:3 holds half a surrogate pair"),
  ],
)
def test_bad_json_line(tmp_path, line, message):
  path = write(tmp_path / "a.jsonl", lines("a", "b") + line + "\n")
  with pytest.raises(UserError, match=message) as caught:
    read(path)
  assert "\n" not in str(caught.value)


def test_file_that_vanishes(tmp_path):
  path = write(tmp_path / "a.txt", "a")
  files = sources.find_files(str(path))
  path.unlink()
  with pytest.raises(UserError, match=r"cannot read .*a\.txt: No such file"):
    list(sources.read_documents(files, "text"))
  with pytest.raises(UserError, match=r"cannot read .*a\.txt: No such file"):
    sources.fingerprint(files)
