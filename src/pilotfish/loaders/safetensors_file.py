"""The safetensors container, read by mapping it: the library's NumPy side does not know bfloat16 and copies.

The format is eight bytes of header length, a JSON header and the data (huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.errors import InputError
from pilotfish.loaders.keys import short
from pilotfish.loaders.loaded import map_file, naming
from pilotfish.quant import Bytes, Tensor

_KINDS = ("F32", "F16", "BF16")  # named as in quant.FORMATS
_MOST_HEADER_BYTES = 100_000_000  # the library's own limit


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Map the tensors of one file, which must cover its data without gaps or overlaps, as the format demands.

    Raises InputError when the header is damaged or a type is no float of two or four bytes.
    """
    with naming(path):
        file = map_file(path)
        data_start = 8 + int.from_bytes(file[:8], "little")
        if data_start > min(len(file), 8 + _MOST_HEADER_BYTES):
            raise InputError(f"truncated or corrupt: its header takes {data_start - 8} bytes")
        header = parse_json(file[8:data_start])
        header.pop("__metadata__", None)
        data = np.frombuffer(file, np.uint8)[data_start:]
        tensors: dict[str, Tensor] = {}
        ranges: list[tuple[int, int]] = []
        for name, entry in header.items():
            with naming(f"tensor {short(name)}"):
                tensors[name], place = _map_tensor(data, entry)
                ranges.append(place)
        end = 0
        for first, last in sorted(ranges):
            if first != end:
                raise InputError("corrupt: the data of its tensors overlap or leave gaps")
            end = last
        if end != len(data):
            raise InputError(f"truncated or corrupt: {end} bytes of data are described, {len(data)} are there")
        return tensors


def parse_json(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises InputError when it is something else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not valid JSON: {short(error)}") from None
    if not isinstance(value, dict):
        raise InputError("does not hold a JSON object")
    return value


def _map_tensor(data: Bytes, entry: object) -> tuple[Tensor, tuple[int, int]]:
    if not isinstance(entry, dict):
        raise InputError("its description is not an object")
    kind: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if kind not in _KINDS:
        raise InputError(f"type {short(kind)} is not supported; supported are {', '.join(_KINDS)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise InputError("shape and data_offsets must be lists of whole numbers, the latter of two")
    first, last = offsets
    if not first <= last <= len(data):
        raise InputError(f"truncated or corrupt: its bytes {first} to {last} reach past the end of the file")
    return Tensor(kind, tuple(shape), data[first:last]), (first, last)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
