"""Documents, put together again from packed windows."""

import numpy as np
import pytest

from atlas_jax.errors import UserError
from atlas_jax.evaluation import Documents
from tests.evaluation.helpers import (
  TEXTS,
  TOKENIZER,
  documents_of,
  prepare,
  write_texts,
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
  return documents_of(tmp_path_factory.mktemp("documents"))


def test_every_stretch_of_every_document_is_read(documents):
  assert documents.ids == list(TEXTS)
  for index, text in enumerate(TEXTS.values()):
    ids = [*TOKENIZER.encode(text), TOKENIZER.end_of_text]
    assert documents.lengths[index] == len(ids) - 1
    for start in range(len(ids) - 1):
      for stop in range(start + 1, len(ids)):
        found = documents.read(index, start, stop)
        assert found.dtype == np.int32
        assert found.tolist() == ids[start : stop + 1], (index, start, stop)


def test_the_order_depends_on_names_only(documents, tmp_path):
  order = [documents.ids[index] for index in documents.order()]
  assert sorted(order) == list(TEXTS)
  assert order != list(TEXTS)
  fewer = write_texts(tmp_path / "text")
  (fewer / "c.txt").unlink()
  (fewer / "a.txt").write_text("another text")
  found = prepare(fewer, tmp_path / "cache")
  rest = Documents(found, found.valid)
  again = [rest.ids[index] for index in rest.order()]
  assert again == [id_ for id_ in order if id_ != "c.txt"]


def test_an_empty_split_is_told(tmp_path):
  found = prepare(
    write_texts(tmp_path / "text"), tmp_path / "cache", valid_fraction=0.0
  )
  with pytest.raises(UserError, match="no text was held out"):
    Documents(found, found.valid)
