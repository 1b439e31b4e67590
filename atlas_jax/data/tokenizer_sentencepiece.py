"""SentencePiece models.

A model with byte fallback can represent every text. Its normaliser (which would
fold characters, and put a space before the text) is replaced by the identity,
so that decoding returns exactly what was encoded. A model without byte fallback
keeps its normaliser, since line breaks and tabs would be unknown to it; what it
cannot represent is lost.
"""

from atlas_jax.data.tokenizer import REPLACEMENT, Tokenizer, encode_around
from atlas_jax.errors import UserError

try:
  import sentencepiece
  from sentencepiece import sentencepiece_model_pb2
except ImportError as error:
  raise UserError(
    "SentencePiece models need another package: pip install sentencepiece"
  ) from error

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class SentencePieceTokenizer(Tokenizer):
  """The tokens of a SentencePiece `.model` file.

  The end of a text is the model's `</s>`, or one id more where it has none.
  """

  def __init__(self, content: bytes, name: str):
    """Reads a model.

    Args:
      content: The file's bytes.
      name: What to call it in messages.

    Raises:
      UserError: The bytes are no SentencePiece model.
    """
    try:
      model = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
      model.ParseFromString(content)
      fallback = model.trainer_spec.byte_fallback
      model.normalizer_spec.add_dummy_prefix = False
      if fallback:
        model.normalizer_spec.remove_extra_whitespaces = False
        model.normalizer_spec.name = "identity"
        model.normalizer_spec.precompiled_charsmap = b""
      processor = sentencepiece.SentencePieceProcessor(
        model_proto=model.SerializeToString()
      )
    except Exception as error:  # The parsers raise many kinds.
      raise UserError(
        f"the tokenizer {name!r} is damaged or is no SentencePiece model "
        f"({str(error).strip() or type(error).__name__})"
      ) from error
    pieces = [_bytes_of(processor, id_) for id_ in range(len(processor))]
    end = processor.eos_id()
    if end < 0:
      end = len(pieces)
      pieces.append(b"")
    super().__init__(
      pieces, end_of_text=end, content=content, keeps_text=fallback
    )
    self._processor = processor
    self._space_ids = None
    if fallback:
      self._space_ids = [
        processor.piece_to_id(f"<0x{value:02X}>") for value in _SPACE.encode()
      ]

  @property
  def file_name(self) -> str:
    """See `Tokenizer`."""
    return "tokenizer.model"

  def encode(self, text: str) -> list[int]:
    """See `Tokenizer`."""
    if self._space_ids and _SPACE in text:
      return encode_around(
        text, _SPACE, self._space_ids, self._processor.encode
      )
    return self._processor.encode(text)


def _bytes_of(
  processor: sentencepiece.SentencePieceProcessor, id_: int
) -> bytes:
  piece = processor.id_to_piece(id_)
  if processor.is_control(id_):
    return b""
  if processor.is_unknown(id_):
    return REPLACEMENT
  if processor.is_byte(id_):
    return bytes([int(piece[3:5], 16)])
  return piece.replace(_SPACE, " ").encode()
