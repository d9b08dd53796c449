"""Writes safetensors files for tests, sound ones and broken ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pilotfish.quant import Tensor


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        end = len(data) + tensor.nbytes
        entries[name] = {"dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": [len(data), end]}
        data += tensor.data.tobytes()
    return header(json.dumps(entries), data)


def header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data
