"""A tiny GGUF file, written here, and what it computes, in plain numpy."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

DIM, HEADS, KV_HEADS, HIDDEN, LAYERS = 32, 4, 2, 64, 2
BASE, EPSILON = 5_000.0, 1e-5
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "1 2", "Ġ 3")

# Not a multiple of 128, to which embeddings are rounded up.
METADATA = {
  "llama.block_count": LAYERS,
  "llama.context_length": 64,
  "llama.embedding_length": DIM,
  "llama.feed_forward_length": HIDDEN,
  "llama.attention.head_count": HEADS,
  "llama.attention.head_count_kv": KV_HEADS,
  "llama.attention.layer_norm_rms_epsilon": EPSILON,
  "llama.rope.freq_base": BASE,
  "llama.rope.dimension_count": DIM // HEADS,
  "tokenizer.ggml.model": "gpt2",
  "tokenizer.ggml.pre": "smollm",
  "tokenizer.ggml.merges": list(MERGES),
  "tokenizer.ggml.eos_token_id": END,
}


def tokens() -> list[str]:
  """The vocabulary: special tokens, bytes, merges."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [256 + n for n in range(256 - len(printable))]
  letters = [chr(value) for value in (*printable, *others)]
  return [*SPECIALS, *letters, *(m.replace(" ", "") for m in MERGES)]


def tensors(tied: bool = True) -> dict[str, np.ndarray]:
  """Random float32 weights by name, as the file has them: [outputs, inputs]."""
  random = np.random.default_rng(3)
  key = DIM // HEADS * KV_HEADS
  shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokens()), DIM)}
  for n in range(LAYERS):
    for name, shape in (
      ("attn_q", (DIM, DIM)),
      ("attn_k", (key, DIM)),
      ("attn_v", (key, DIM)),
      ("attn_output", (DIM, DIM)),
      ("ffn_gate", (HIDDEN, DIM)),
      ("ffn_up", (HIDDEN, DIM)),
      ("ffn_down", (DIM, HIDDEN)),
      ("attn_norm", (DIM,)),
      ("ffn_norm", (DIM,)),
    ):
      shapes[f"blk.{n}.{name}"] = shape
  shapes["output_norm"] = (DIM,)
  if not tied:
    shapes["output"] = (len(tokens()), DIM)
  made = {}
  for name, shape in shapes.items():
    # Scores and angles of order 1, so that no part hides behind another.
    array = random.standard_normal(shape) * (2.0 / DIM**0.5)
    if len(shape) == 1:
      array += 1.0
    made[f"{name}.weight"] = array.astype(np.float32)
  return made


def write(
  path: pathlib.Path,
  metadata: Mapping[str, Any] | None = None,
  arrays: Mapping[str, np.ndarray] | None = None,
  *,
  architecture: str = "llama",
) -> dict[str, np.ndarray]:
  """Writes a GGUF file, matrices of two of its kinds quantised.

  Args:
    path: The file.
    metadata: Laid over `METADATA` and the vocabulary; None leaves one out.
    arrays: The tensors; None: `tensors()`.
    architecture: Its name.

  Returns:
    The tensors in float32 as a reader has them.
  """
  import gguf

  arrays = tensors() if arrays is None else arrays
  names = tokens()
  kinds = [3] * len(SPECIALS) + [1] * (len(names) - len(SPECIALS))
  values = {
    **METADATA,
    "tokenizer.ggml.tokens": names,
    "tokenizer.ggml.token_type": kinds,
    **(metadata or {}),
  }
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in values.items():
    if value is not None:
      _add(writer, key, value)
  stored = {}
  for name, array in arrays.items():
    kind = gguf.GGMLQuantizationType.F32
    if "token_embd" in name:
      kind = gguf.GGMLQuantizationType.Q8_0
    elif "ffn" in name and array.ndim == 2:
      kind = gguf.GGMLQuantizationType.Q4_1
    packed = gguf.quantize(array, kind)
    writer.add_tensor(name, packed, raw_dtype=kind)
    stored[name] = gguf.dequantize(packed, kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return stored


def _add(writer: Any, key: str, value: Any) -> None:
  if isinstance(value, bool):
    writer.add_bool(key, value)
  elif isinstance(value, int):
    writer.add_uint32(key, value)
  elif isinstance(value, float):
    writer.add_float32(key, value)
  elif isinstance(value, str):
    writer.add_string(key, value)
  else:
    writer.add_array(key, value)


def logits(
  arrays: Mapping[str, np.ndarray],
  ids: np.ndarray,
  *,
  layers: int = LAYERS,
  heads: int = HEADS,
  kv_heads: int = KV_HEADS,
  base: float = BASE,
  epsilon: float = EPSILON,
  dtype: type = np.float64,
) -> np.ndarray:
  """Logits [T, vocab] of a text, from the tensors of a file.

  Rotates pairs of neighbours, as the file has them, in complex numbers.
  """
  arrays = {name: array.astype(dtype) for name, array in arrays.items()}
  x = arrays["token_embd.weight"][ids]
  length, dim = x.shape
  width = dim // heads
  places = np.arange(length)
  rates = base ** (-np.arange(width // 2) * 2 / width)
  turns = np.exp(1j * np.outer(places, rates))[:, None]
  later = places[:, None] < places[None]

  def norm(x: np.ndarray, name: str) -> np.ndarray:
    square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(square + epsilon) * arrays[f"{name}.weight"]

  def project(x: np.ndarray, name: str) -> np.ndarray:
    return x @ arrays[f"{name}.weight"].T

  def rotated(x: np.ndarray) -> np.ndarray:
    pairs = x.reshape(*x.shape[:2], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

  for n in range(layers):
    h = norm(x, f"blk.{n}.attn_norm")
    query = project(h, f"blk.{n}.attn_q").reshape(length, heads, width)
    key = project(h, f"blk.{n}.attn_k").reshape(length, kv_heads, width)
    value = project(h, f"blk.{n}.attn_v").reshape(length, kv_heads, width)
    query, key = rotated(query), rotated(key)
    read = np.empty_like(query)
    for head in range(heads):
      other = head * kv_heads // heads
      scores = query[:, head] @ key[:, other].T / np.sqrt(width)
      scores = np.where(later, -np.inf, scores)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      weights /= weights.sum(-1, keepdims=True)
      read[:, head] = weights @ value[:, other]
    x = x + project(read.reshape(length, dim), f"blk.{n}.attn_output")
    h = norm(x, f"blk.{n}.ffn_norm")
    gate = project(h, f"blk.{n}.ffn_gate")
    gate = gate / (1 + np.exp(-gate))
    x = x + project(gate * project(h, f"blk.{n}.ffn_up"), f"blk.{n}.ffn_down")
  matrix = "output" if "output.weight" in arrays else "token_embd"
  return project(norm(x, "output_norm"), matrix)
