"""Block formats of weights: how many elements and bytes a block has, and what its values are.

A tensor keeps the bytes of its file; `dequantize` is the one definition of what they mean. The layouts are those of
GGUF (ggml-common.h of the ggml project). Products and sums are rounded to float32 in the order of its reference code,
so values equal that reference bit for bit.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import InputError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_CHUNK_ELEMENTS = 1 << 18  # keeps the temporaries of decoding and rounding near the cache
_GROUP = 32  # elements that share a scale in Q8_0 and Q4_1


@dataclass(frozen=True)
class Format:
    """A block: `decode` turns raw blocks [n, bytes] into values [n, elements]."""

    elements: int
    bytes: int
    decode: Callable[[Bytes], Floats]


def _f16(raw: Bytes) -> Floats:
    """[n, 2 k] bytes -> [n, k]."""
    return raw.view("<f2").astype(np.float32)


def _fields(raw: Bytes, bits: int, run: int) -> Bytes:
    """Unpack the `bits`-wide fields of each byte, [n, bytes] -> [n, bytes * 8 / bits].

    Each run of `run` bytes gives first all its lowest fields, then all the next ones, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Bytes = (raw.reshape(len(raw), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(raw), -1)


def _stack(low: Bytes, high: Bytes) -> Bytes:
    """Four low bits with the higher ones above them."""
    stacked: Bytes = low | (high << np.uint8(4))
    return stacked


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and eight 6-bit minima that Q4_K and Q5_K pack into twelve bytes, each [n, 8]."""
    low_d, low_m, high = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([low_d & 63, (high & 15) | ((low_d >> 2) & 48)], axis=1)
    minima = np.concatenate([low_m & 63, (high >> 4) | ((low_m >> 2) & 48)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _decode_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _decode_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(blocks: Bytes) -> Floats:
    q = _fields(blocks[:, 2:18], 4, 16).astype(np.float32) - 8
    return _f16(blocks[:, 0:2]) * q


def _decode_q4_1(blocks: Bytes) -> Floats:
    q = _fields(blocks[:, 4:20], 4, 16).astype(np.float32)
    return _f16(blocks[:, 0:2]) * q + _f16(blocks[:, 2:4])


def _decode_q5_0(blocks: Bytes) -> Floats:
    q = _stack(_fields(blocks[:, 6:22], 4, 16), _fields(blocks[:, 2:6], 1, 1))
    return _f16(blocks[:, 0:2]) * (q.astype(np.float32) - 16)


def _decode_q5_1(blocks: Bytes) -> Floats:
    q = _stack(_fields(blocks[:, 8:24], 4, 16), _fields(blocks[:, 4:8], 1, 1))
    return _f16(blocks[:, 0:2]) * q.astype(np.float32) + _f16(blocks[:, 2:4])


def _decode_q8_0(blocks: Bytes) -> Floats:
    return _f16(blocks[:, 0:2]) * blocks[:, 2:34].view(np.int8).astype(np.float32)


def _scale_and_shift(blocks: Bytes, q: Bytes) -> Floats:
    """(d * scale) * q - dmin * minimum for the eight sub-blocks of Q4_K and Q5_K."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = _f16(blocks[:, 0:2]) * scales
    shift = _f16(blocks[:, 2:4]) * minima
    values = scale[:, :, None] * q.reshape(len(q), 8, 32).astype(np.float32) - shift[:, :, None]
    return values.reshape(len(q), 256)


def _decode_q4_k(blocks: Bytes) -> Floats:
    return _scale_and_shift(blocks, _fields(blocks[:, 16:144], 4, 32))


def _decode_q5_k(blocks: Bytes) -> Floats:
    q = _stack(_fields(blocks[:, 48:176], 4, 32), _fields(blocks[:, 16:48], 1, 32))
    return _scale_and_shift(blocks, q)


def _decode_q6_k(blocks: Bytes) -> Floats:
    q = _stack(_fields(blocks[:, 0:128], 4, 64), _fields(blocks[:, 128:192], 2, 32))
    scale = _f16(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    values = scale[:, :, None] * (q.reshape(len(q), 16, 16).astype(np.float32) - 32)
    return values.reshape(len(q), 256)


FORMATS: dict[str, Format] = {
    "F32": Format(1, 4, _decode_f32),
    "F16": Format(1, 2, _f16),
    "BF16": Format(1, 2, _decode_bf16),
    "Q4_0": Format(32, 18, _decode_q4_0),
    "Q4_1": Format(32, 20, _decode_q4_1),
    "Q5_0": Format(32, 22, _decode_q5_0),
    "Q5_1": Format(32, 24, _decode_q5_1),
    "Q8_0": Format(32, 34, _decode_q8_0),
    "Q4_K": Format(256, 144, _decode_q4_k),
    "Q5_K": Format(256, 176, _decode_q5_k),
    "Q6_K": Format(256, 210, _decode_q6_k),
}


@dataclass(frozen=True, eq=False)
class Tensor:
    """A weight as its file has it: row-major [outputs, inputs] or [n], blocks along the last axis.

    Raises InputError when the bytes can not hold that shape.
    """

    kind: str  # a key of FORMATS
    shape: tuple[int, ...]
    data: Bytes = field(repr=False)  # [bytes], contiguous, usually a view of a mapped file

    def __post_init__(self) -> None:
        form = FORMATS.get(self.kind)
        if form is None:
            raise InputError(f"format {self.kind} is not supported; supported are {', '.join(FORMATS)}")
        if not self.shape or min(self.shape) < 1:
            raise InputError(f"shape {list(self.shape)} holds nothing; every dimension must be at least 1")
        if self.shape[-1] % form.elements:
            raise InputError(
                f"rows of {self.shape[-1]} elements do not fill {self.kind} blocks; "
                f"the length must be a multiple of {form.elements}"
            )
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise TypeError("data must be one contiguous run of bytes")
        if self.data.size != self.nbytes:
            raise InputError(
                f"{self.kind} data of shape {list(self.shape)} takes {self.nbytes} bytes, not {self.data.size}"
            )

    @property
    def num_rows(self) -> int:
        """Rows of the last axis; a one-dimensional tensor is one row."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        form = FORMATS[self.kind]
        return self.shape[-1] // form.elements * form.bytes

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes

    def dequantize(self) -> Floats:
        """All values, in `shape`."""
        return _decode(self.kind, self.data).reshape(self.shape)

    def release(self) -> None:
        """Take the pages of a mapped file out of this process; whoever reads the tensor again reads the file again."""
        owner: object = self.data
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if isinstance(owner, memoryview):
            owner = owner.obj
        if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            start = self.data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            owner.madvise(mmap.MADV_DONTNEED, first, start + self.data.size - first)

    def rows(self, indices: NDArray[np.integer]) -> Floats:
        """The values of some rows, [n, inputs]; only those are decoded."""
        raw = self.data.reshape(self.num_rows, self.row_bytes)[indices]
        return _decode(self.kind, raw.reshape(-1)).reshape(len(indices), self.shape[-1])

    def take_rows(self, indices: NDArray[np.integer]) -> Tensor:
        """The matrix [len(indices), inputs] whose row i is row indices[i] of this one, byte for byte."""
        raw = self.data.reshape(self.num_rows, self.row_bytes)[indices]
        return Tensor(self.kind, (len(indices), self.shape[-1]), raw.reshape(-1))


def _decode(kind: str, data: Bytes) -> Floats:
    form = FORMATS[kind]
    blocks = data.reshape(-1, form.bytes)
    out = np.empty((len(blocks), form.elements), np.float32)
    step = _CHUNK_ELEMENTS // form.elements
    with np.errstate(invalid="ignore"):  # a scale that is infinity or NaN in the file makes its values NaN
        for start in range(0, len(blocks), step):
            out[start : start + step] = form.decode(blocks[start : start + step])
    return out


def _raw(values: NDArray[np.generic]) -> Bytes:
    """[n, k] values -> their bytes [n, k * itemsize]."""
    return np.ascontiguousarray(values).view(np.uint8)


def _encode_f32(values: Floats) -> Bytes:
    return _raw(values.astype("<f4"))


def _encode_f16(values: Floats) -> Bytes:
    return _raw(_to_f16(values))


def _encode_bf16(values: Floats) -> Bytes:
    bits = values.view(np.uint32)
    even = (bits >> 16) & 1
    return _raw(((bits + (0x7FFF + even)) >> 16).astype("<u2"))


def _encode_q8_0(values: Floats) -> Bytes:
    groups = values.reshape(-1, _GROUP)
    scale = _to_f16(np.abs(groups).max(axis=1, keepdims=True) / np.float32(127))
    q = np.rint(groups * _inverse(scale)).clip(-127, 127).astype(np.int8)
    return np.concatenate([_raw(scale), _raw(q)], axis=1)


def _encode_q4_1(values: Floats) -> Bytes:
    groups = values.reshape(-1, _GROUP)
    low = groups.min(axis=1, keepdims=True)
    scale = _to_f16((groups.max(axis=1, keepdims=True) - low) / np.float32(15))
    minimum = _to_f16(low)
    q = np.rint((groups - minimum.astype(np.float32)) * _inverse(scale)).clip(0, 15).astype(np.uint8)
    return np.concatenate([_raw(scale), _raw(minimum), _stack(q[:, :16], q[:, 16:])], axis=1)


def _to_f16(values: Floats) -> NDArray[np.float16]:
    if values.size and np.abs(values).max() >= 65520:  # rounds to infinity
        raise InputError("it holds values too large for float16")
    return values.astype("<f2")


def _inverse(scale: NDArray[np.float16]) -> Floats:
    """1 / scale, and 0 for a group without spread: dividing by the stored scale keeps its rounding out of q."""
    wide = scale.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "F32": _encode_f32,
    "F16": _encode_f16,
    "BF16": _encode_bf16,
    "Q8_0": _encode_q8_0,
    "Q4_1": _encode_q4_1,
}


def quantize(values: Floats, kind: str) -> Tensor:
    """Round float32 values [outputs, inputs] to the nearest of F32, F16, BF16, Q8_0 or Q4_1.

    Groups of 32 get their scale from their largest magnitude (Q8_0: d = max |x| / 127) or their range (Q4_1:
    d = (max - min) / 15, m = min). Raises InputError when a row is no whole number of blocks or a value is not finite.
    """
    if kind not in _ENCODERS:
        raise ValueError(f"can not quantize to {kind}, only to {', '.join(_ENCODERS)}")
    form = FORMATS[kind]
    if values.shape[-1] % form.elements:
        raise InputError(f"rows of {values.shape[-1]} elements do not fill {kind} groups of {form.elements}")
    if not np.isfinite(values).all():
        raise InputError("it holds values that are not finite")
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, form.elements)
    return Tensor(kind, values.shape, _ENCODERS[kind](flat).reshape(-1))


def requantize(tensor: Tensor, kind: str) -> Tensor:
    """The tensor's values rounded to another format, a few rows at a time: see `quantize`."""
    step = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
    starts = range(0, tensor.num_rows, step)
    rows = (np.arange(start, min(start + step, tensor.num_rows)) for start in starts)
    data = np.concatenate([quantize(tensor.rows(indices), kind).data for indices in rows])
    return Tensor(kind, tensor.shape, data)
