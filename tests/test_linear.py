"""Packed weights against the gguf package, linear kernels against float64, paths and row counts against each other."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish import _native

Floats = NDArray[np.float32]

PATHS = _native.path_names()
# For each format: elements and bytes of a block, offsets of its half-precision scales, and where its integers begin.
KINDS = {
    "F32": (1, 4, [], 0),
    "F16": (1, 2, [0], 0),
    "BF16": (1, 2, [], 0),
    "Q4_0": (32, 18, [0], 2),
    "Q4_1": (32, 20, [0, 2], 4),
    "Q5_0": (32, 22, [0], 2),
    "Q5_1": (32, 24, [0, 2], 4),
    "Q8_0": (32, 34, [0], 2),
    "Q4_K": (256, 144, [0, 2], 16),
    "Q5_K": (256, 176, [0, 2], 16),
    "Q6_K": (256, 210, [208], 0),
}
INTEGERS = [kind for kind, (elements, *_) in KINDS.items() if elements > 1]


def inputs_of(kind: str) -> int:
    return 45 if KINDS[kind][0] == 1 else 768


def random_blocks(kind: str, outputs: int, inputs: int, seed: int) -> NDArray[np.uint8]:
    """Any bits [outputs, bytes], but scales between 2^-8 and 2^4 and finite numbers of like size."""
    rng = np.random.default_rng(seed)
    elements, size, halves, _ = KINDS[kind]
    if kind == "F32":
        return rng.standard_normal((outputs, inputs), np.float32).view(np.uint8)
    if kind == "BF16":
        return np.ascontiguousarray(rng.standard_normal((outputs, inputs), np.float32).view(np.uint16)[:, 1::2]).view(
            np.uint8
        )
    raw = rng.integers(0, 256, (outputs * inputs // elements, size), np.uint8)
    for offset in halves:
        raw[:, offset + 1] = (raw[:, offset + 1] & 0x83) | (rng.integers(7, 19, len(raw), np.uint8) << 2)
    return raw.reshape(outputs, -1)


def pack(kind: str, raw: NDArray[np.uint8], inputs: int) -> _native.Weight:
    return _native.pack(kind, len(raw), inputs, raw.reshape(-1))


def dequantize(kind: str, raw: NDArray[np.uint8]) -> Floats:
    if kind == "F16":  # the package leaves halves as they are
        return raw.view(np.float16).astype(np.float32)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


def bits(values: Floats) -> NDArray[np.uint32]:
    return values.view(np.uint32)


def random_rows(rows: int, inputs: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, inputs), np.float32) * np.exp(rng.standard_normal((rows, 1), np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [1, 16, 37])
def test_unpacked_rows_are_the_values_of_the_file_bit_for_bit(kind: str, outputs: int) -> None:
    inputs = inputs_of(kind)
    raw = random_blocks(kind, outputs, inputs, outputs)
    weight = pack(kind, raw, inputs)
    assert (weight.kind, weight.outputs, weight.inputs) == (kind, outputs, inputs)
    rows = np.stack([weight.unpack_row(row) for row in range(outputs)])
    assert np.array_equal(bits(rows), bits(dequantize(kind, raw)))


def test_a_weight_packed_by_several_threads_is_complete() -> None:
    raw = random_blocks("Q8_0", 3001, 1024, 0)
    weight = pack("Q8_0", raw, 1024)
    assert 0 <= weight.nbytes - raw.nbytes <= 16 * raw.shape[1]
    rows = np.stack([weight.unpack_row(row) for row in range(3001)])
    assert np.array_equal(bits(rows), bits(dequantize("Q8_0", raw)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_is_within_rounding_of_float64(path: str, kind: str) -> None:
    outputs, inputs = 37, inputs_of(kind)
    raw = random_blocks(kind, outputs, inputs, 1)
    x = random_rows(3, inputs, 2)
    values = dequantize(kind, raw).astype(np.float64)
    steps, size = inputs, np.abs(values)
    used = x.astype(np.float64)
    if kind in INTEGERS:
        quantized = [_native.quantize(path, row) for row in x]
        used = np.stack([q.reshape(-1, 32) * scale.astype(np.float64)[:, None] for q, scale, *_ in quantized])
        used = used.reshape(x.shape)
        # Scale and minimum are added apart: blocks whose integers are zero hold the minimum alone.
        _, block, _, begin = KINDS[kind]
        zeroed = raw.reshape(-1, block).copy()
        zeroed[:, begin:] = 0
        minimum = dequantize(kind, zeroed.reshape(raw.shape)) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 0.0
        size = np.abs(values - minimum) + np.abs(minimum)
        steps = inputs // 16
    # Each of `steps` sums rounds once, relative to at most the sum of all sizes; each product of scales twice.
    bound = (steps + 3) * 2.0**-24 * (np.abs(used) @ size.T)
    out = _native.linear(path, pack(kind, raw, inputs), x)
    assert np.all(np.abs(out - used @ values.T) <= bound)


@pytest.mark.parametrize("kind", KINDS)
def test_paths_agree_and_a_row_does_not_depend_on_the_others(kind: str) -> None:
    inputs = inputs_of(kind)
    weight = pack(kind, random_blocks(kind, 37, inputs, 3), inputs)
    x = random_rows(40, inputs, 4)
    alone = np.concatenate([_native.linear(PATHS[0], weight, x[row : row + 1]) for row in range(40)])
    for path in PATHS:
        for rows in range(1, 41):
            first = (7 * rows) % (41 - rows)
            out = _native.linear(path, weight, x[first : first + rows])
            assert np.array_equal(bits(out), bits(alone[first : first + rows])), (path, rows)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["BF16", "Q4_K"])
def test_bias_and_residual_are_added_last(path: str, kind: str) -> None:
    inputs = inputs_of(kind)
    weight = pack(kind, random_blocks(kind, 21, inputs, 5), inputs)
    x, bias, residual = random_rows(4, inputs, 6), random_rows(1, 21, 7)[0], random_rows(4, 21, 8)
    plain = _native.linear(path, weight, x)
    assert np.array_equal(bits(_native.linear(path, weight, x, bias)), bits(plain + bias))
    assert np.array_equal(bits(_native.linear(path, weight, x, None, residual)), bits(residual + plain))
    assert np.array_equal(bits(_native.linear(path, weight, x, bias, residual)), bits(residual + (plain + bias)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
def test_quantized_activations(values: list[float]) -> None:
    x = np.array(values, np.float32)
    first = _native.quantize(PATHS[0], x)
    for path in PATHS[1:]:
        for ours, theirs in zip(first, _native.quantize(path, x), strict=True):
            assert ours.tobytes() == theirs.tobytes()
    q, scale, offset, minus = first
    assert np.all(np.abs(q.astype(int)) <= 127)
    low, high = q.reshape(2, 16).sum(axis=1, dtype=np.int32).tolist()
    assert minus.tolist() == [[-low - high, -32 * low, -32 * high]]
    assert offset[0] == scale[0] * np.float32(low + high)
    # A half step, the rounding of the scale and of the quotient (at most 127 steps), and what counts as zero.
    bound = np.float64(scale[0]) * (0.5 + 127 * 2.0**-22) + 2.0**-99
    assert np.all(np.abs(q * np.float64(scale[0]) - x.astype(np.float64)) <= bound)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 17, 31])
def test_a_row_that_is_not_finite_does_not_come_out_finite(path: str, bad: float, at: int) -> None:
    x = np.ones((2, 256), np.float32)
    x[0, 32 + at] = bad
    out = _native.linear(path, pack("Q6_K", random_blocks("Q6_K", 16, 256, 9), 256), x)
    assert not np.isfinite(out[0]).any()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("path", PATHS)
def test_argmax_takes_the_first_of_equals(path: str) -> None:
    x = random_rows(1, 301, 10)[0]
    x[[17, 200, 300]] = 99.0
    assert _native.argmax(path, x) == (17, 99.0)
    x[17] = np.nan
    assert _native.argmax(path, x) == (200, 99.0)


def test_what_does_not_fit_is_refused() -> None:
    raw = random_blocks("Q4_0", 2, 64, 0).reshape(-1)
    with pytest.raises(ValueError, match="Q9_Z"):
        _native.pack("Q9_Z", 2, 64, raw)
    with pytest.raises(ValueError, match="Q4_0"):
        _native.pack("Q4_0", 2, 65, raw)
    with pytest.raises(ValueError, match="72 bytes"):
        _native.pack("Q4_0", 3, 64, raw)
    with pytest.raises(ValueError, match="Q4_K"):
        _native.pack("Q4_K", 1, 128, raw)
    weight = _native.pack("Q4_0", 2, 64, raw)
    with pytest.raises(ValueError, match="inputs"):
        _native.linear(PATHS[0], weight, np.zeros((1, 32), np.float32))
    with pytest.raises(ValueError, match="sse9"):
        _native.linear("sse9", weight, np.zeros((1, 64), np.float32))
    with pytest.raises(IndexError):
        weight.unpack_row(2)
