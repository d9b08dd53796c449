"""The GGUF container: a checked, memory-mapped reader of our own.

The format is described in the ggml project's docs/gguf.md. The header is read in one pass, so a vocabulary of 150,000
tokens costs a fraction of a second; tensor data is only mapped.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import InputError
from pilotfish.loaders.loaded import map_file, naming
from pilotfish.quant import FORMATS, Bytes, Tensor

Numbers = NDArray[np.generic]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_KINDS = {
    **{0: "F32", 1: "F16", 30: "BF16"},
    **{2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"},
}
_OTHER_KINDS = {
    **{10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"},
    **{22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
_LEAST_ENTRY_BYTES = 8 + 4 + 1  # key length, value type, the smallest value
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, number of dimensions, one dimension, type, offset
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFFile:
    """Metadata (str, int, float, bool, list of str, numpy array) and tensors, whose data stays in the mapped file."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


class _Header:
    """Reads values one after the other and never past the end."""

    def __init__(self, file: mmap.mmap) -> None:
        self._file = file
        self.position = 0

    @property
    def left_bytes(self) -> int:
        return len(self._file) - self.position

    def _advance(self, size_bytes: int, what: str) -> int:
        start = self.position
        if size_bytes > self.left_bytes:
            raise InputError(f"truncated or corrupt: {what} reaches past the end of the file")
        self.position = start + size_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._file, self._advance(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._file, self._advance(8, what))[0]
        return value

    def count(self, least_bytes: int, what: str) -> int:
        """A number of things that each take at least `least_bytes` of the rest of the file."""
        count = self.u64(f"the number of {what}")
        if count * least_bytes > self.left_bytes:
            raise InputError(f"truncated or corrupt: {count} {what} do not fit in a file of {len(self._file)} bytes")
        return count

    def strings(self, count: int, what: str) -> list[str]:
        file, position, size = self._file, self.position, len(self._file)
        unpack = _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(file, position)[0]
                if position > size:
                    break
                strings.append(file[start:position].decode())
        except UnicodeDecodeError:
            raise InputError(f"{what} is not valid UTF-8") from None
        except struct.error:  # the length itself lies past the end
            position = size + 1
        self._advance(position - self.position, what)
        return strings

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def name(self, what: str) -> str:
        """A string that is fit to be shown in one line."""
        name = self.string(what)
        if not name or not name.isprintable():
            raise InputError(f"{what} is empty or holds characters that can not be printed: {name!a}")
        return name

    def value(self, key: str) -> Any:
        what = f"the value of {key}"
        kind = self.u32(what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(kind, 1, key)[0].item()

    def _array(self, key: str) -> list[str] | Numbers:
        kind = self.u32(f"the array {key}")
        if kind == _ARRAY:
            raise InputError(f"{key} is an array of arrays, which is not supported")
        if kind == _STRING:
            return self.strings(self.count(8, f"strings of {key}"), f"a string of {key}")
        return self._numbers(kind, None, key)

    def _numbers(self, kind: int, count: int | None, key: str) -> Numbers:
        code = _SCALARS.get(kind)
        if code is None:
            raise InputError(f"{key} has the value type {kind}, which GGUF does not know")
        dtype = np.dtype(code)
        if count is None:
            count = self.count(dtype.itemsize, f"numbers of {key}")
        start = self._advance(count * dtype.itemsize, f"the value of {key}")
        raw = np.frombuffer(self._file, np.uint8, count * dtype.itemsize, start)
        if dtype == np.bool_ and (raw > 1).any():
            raise InputError(f"{key} is a boolean that is neither 0 nor 1")
        numbers: Numbers = raw.view(dtype).copy()
        return numbers


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file (version 2 or 3, little-endian) and map its tensors.

    Raises InputError when any field is wrong or reaches past the end.
    """
    with naming(path):
        file = map_file(path)
        header = _Header(file)
        if file[:4] != b"GGUF":
            raise InputError("not a GGUF file: it does not start with GGUF")
        header.u32("the magic number")
        _check_version(header.u32("the version"))
        tensor_count = header.count(_LEAST_TENSOR_BYTES, "tensors")
        entry_count = header.count(_LEAST_ENTRY_BYTES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = header.name("a metadata key")
            if key in metadata:
                raise InputError(f"metadata key {key} appears twice")
            metadata[key] = header.value(key)
        alignment = metadata.get("general.alignment", 32)
        if not _is_integer(alignment) or alignment < 1 or alignment & (alignment - 1):
            raise InputError(f"general.alignment is {alignment}; it must be a power of two")
        places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            name = header.name("a tensor name")
            if name in places:
                raise InputError(f"tensor {name} appears twice")
            places[name] = _tensor_place(header, name)
        start = -(-header.position // alignment) * alignment
        data = np.frombuffer(file, np.uint8)[start:]
        tensors: dict[str, Tensor] = {}
        for name, (shape, kind, offset) in places.items():
            with naming(f"tensor {name}"):
                if offset % alignment:
                    raise InputError(f"its offset {offset} is not a multiple of the alignment {alignment}")
                tensors[name] = _map_tensor(data, shape, kind, offset)
        return GGUFFile(metadata, tensors)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_version(version: int) -> None:
    if version in (2, 3):
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
        raise InputError("big-endian GGUF files are not supported; convert it to little-endian")
    raise InputError(f"GGUF version {version} is not supported; supported are 2 and 3")


def _tensor_place(header: _Header, name: str) -> tuple[tuple[int, ...], int, int]:
    """Shape (row-major), type and offset of one tensor."""
    what = f"the description of tensor {name}"
    dimensions = header.u32(what)
    if not 1 <= dimensions <= 4:
        raise InputError(f"tensor {name} has {dimensions} dimensions; 1 to 4 are possible")
    shape = tuple(header.u64(what) for _ in range(dimensions))[::-1]
    return shape, header.u32(what), header.u64(what)


def _map_tensor(data: Bytes, shape: tuple[int, ...], kind_number: int, offset: int) -> Tensor:
    kind = _KINDS.get(kind_number)
    if kind is None:
        name = _OTHER_KINDS.get(kind_number, f"number {kind_number}")
        raise InputError(f"format {name} is not supported; supported are {', '.join(FORMATS)}")
    form = FORMATS[kind]
    size_bytes = math.prod(shape) // form.elements * form.bytes
    if offset + size_bytes > len(data):
        raise InputError(f"truncated or corrupt: its {size_bytes} bytes reach past the end of the file")
    return Tensor(kind, shape, data[offset : offset + size_bytes])
