"""Writes GGUF files for tests, sound ones and broken ones, without help from the reader under test, and loads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.errors import InputError
from pilotfish.loaders import LoadedModel, load_model
from pilotfish.quant import Tensor, quantize

KIND_NUMBERS = {
    **{"F32": 0, "F16": 1, "BF16": 30, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8},
    **{"Q4_K": 12, "Q5_K": 13, "Q6_K": 14},
}
_NUMPY_NUMBERS = {
    **{"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7},
    **{"uint64": 10, "int64": 11, "float64": 12},
}


@dataclass(frozen=True)
class RawValue:
    """A metadata value of any type number with any payload."""

    kind: int
    payload: bytes


@dataclass(frozen=True)
class RawTensor:
    """A tensor description without data."""

    dimensions: tuple[int, ...]  # as in the file: the innermost first
    kind: int
    offset: int


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, RawValue):
        return struct.pack("<I", value.kind) + value.payload
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _NUMPY_NUMBERS[value.dtype.name], value.size) + value.tobytes()
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value)


def gguf_bytes(
    metadata: Mapping[str, Any] | list[tuple[str | bytes, Any]],
    tensors: Mapping[str, Tensor | RawTensor] | list[tuple[str | bytes, Tensor | RawTensor]],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    entry_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; counts and offsets are right unless told otherwise."""
    entries = list(metadata.items()) if isinstance(metadata, Mapping) else metadata
    items = list(tensors.items()) if isinstance(tensors, Mapping) else tensors
    out = magic + struct.pack("<I", version)
    out += struct.pack("<Q", len(items) if tensor_count is None else tensor_count)
    out += struct.pack("<Q", len(entries) if entry_count is None else entry_count)
    for key, value in entries:
        out += text(key) + _value(value)
    data = b""
    for name, tensor in items:
        out += text(name)
        if isinstance(tensor, RawTensor):
            dimensions, kind, offset = tensor.dimensions, tensor.kind, tensor.offset
        else:
            dimensions, kind, offset = tensor.shape[::-1], KIND_NUMBERS[tensor.kind], len(data)
            data += tensor.data.tobytes()
            data += bytes(-len(data) % alignment)
        out += struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
    return out + bytes(-len(out) % alignment) + data


HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 40, 2


def matrix(rows: int, columns: int, seed: int, kind: str = "F32") -> Tensor:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return quantize(values, kind)


def vector(size: int, seed: int) -> Tensor:
    return quantize(np.random.default_rng(seed).standard_normal(size).astype(np.float32), "F32")


def tiny_gguf(architecture: str, kind: str = "F32", bias: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a small model, as a GGUF file has them."""
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": f"tiny {architecture}",
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": np.ones(VOCAB, np.int32),
    }
    tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN, 1, kind), "output_norm.weight": vector(HIDDEN, 2)}
    for layer in range(LAYERS):
        seed = 100 * (layer + 1)
        sizes = {"attn_q": HEADS * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
        for index, (name, rows) in enumerate(sizes.items()):
            tensors[f"blk.{layer}.{name}.weight"] = matrix(rows, HIDDEN, seed + index, kind)
            if bias or architecture == "qwen2":
                tensors[f"blk.{layer}.{name}.bias"] = vector(rows, seed + 10 + index)
        if architecture == "qwen3":
            tensors[f"blk.{layer}.attn_q_norm.weight"] = vector(HEAD_DIM, seed + 20)
            tensors[f"blk.{layer}.attn_k_norm.weight"] = vector(HEAD_DIM, seed + 21)
        tensors[f"blk.{layer}.attn_output.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM, seed + 3, kind)
        tensors[f"blk.{layer}.attn_norm.weight"] = vector(HIDDEN, seed + 4)
        tensors[f"blk.{layer}.ffn_norm.weight"] = vector(HIDDEN, seed + 5)
        tensors[f"blk.{layer}.ffn_gate.weight"] = matrix(INNER, HIDDEN, seed + 6, kind)
        tensors[f"blk.{layer}.ffn_up.weight"] = matrix(INNER, HIDDEN, seed + 7, kind)
        tensors[f"blk.{layer}.ffn_down.weight"] = matrix(HIDDEN, INNER, seed + 8, kind)
    return metadata, tensors


def load_bytes(folder: Path, raw: bytes, weights: str | None = None) -> LoadedModel:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    return load_model(path, weights)


def refused(folder: Path, raw: bytes) -> str:
    """The one line of the error, without the path that it must begin with."""
    with pytest.raises(InputError) as caught:
        load_bytes(folder, raw)
    line = str(caught.value)
    prefix = f"{folder / 'model.gguf'}: "
    assert line.startswith(prefix) and "\n" not in line
    return line.removeprefix(prefix)
