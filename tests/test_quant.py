"""Block formats against the gguf package, and rounding against its own definition."""

from __future__ import annotations

import mmap
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import InputError
from pilotfish.loaders.loaded import map_file
from pilotfish.quant import FORMATS, Tensor, quantize, requantize

QUANTS = [kind for kind in FORMATS if kind != "F32"]
SCALE_BYTES = {
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]},
    **{"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "F16": [0]},
}


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> Tensor:
    """Random bits everywhere, but float16 scales that are finite (subnormal and negative ones too)."""
    rng = np.random.default_rng(seed)
    form = FORMATS[kind]
    raw = rng.integers(0, 256, (rows * blocks, form.bytes), np.uint8)
    for offset in SCALE_BYTES.get(kind, []):
        high = raw[:, offset + 1]
        high[(high & 0x7C) == 0x7C] ^= 0x40
    if kind == "BF16":
        raw[:, 1] &= 0xBF
    return Tensor(kind, (rows, blocks * form.elements), raw.reshape(-1))


def reference(tensor: Tensor) -> np.ndarray:
    raw = tensor.data.reshape(tensor.shape[0], -1)
    if tensor.kind == "F16":
        return raw.view(np.float16).astype(np.float32)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor.kind])


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize("seed", range(4))
def test_values_are_those_of_the_gguf_package_bit_for_bit(kind: str, seed: int) -> None:
    tensor = random_blocks(kind, 3, 50, seed)
    assert np.array_equal(bits(tensor.dequantize()), bits(reference(tensor)))


def test_long_tensors_are_decoded_in_pieces_without_a_seam() -> None:
    tensor = random_blocks("Q4_1", 3, 40_000, 0)
    assert np.array_equal(bits(tensor.dequantize()), bits(reference(tensor)))


def test_f32_is_taken_as_it_is() -> None:
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    tensor = Tensor("F32", (3, 5), values.view(np.uint8).reshape(-1))
    assert np.array_equal(tensor.dequantize(), values)


def test_a_scale_that_is_not_finite_gives_values_that_are_not_finite_without_a_warning() -> None:
    tensor = Tensor("Q8_0", (1, 32), np.frombuffer(b"\x00\x7c" + bytes(31) + b"\x01", np.uint8))
    assert np.isnan(tensor.dequantize()[0, 0]) and np.isinf(tensor.dequantize()[0, 31])


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_and_take_rows_pick_whole_rows(kind: str) -> None:
    tensor = (
        random_blocks(kind, 7, 32, 1) if kind != "F32" else quantize(reference(random_blocks("F16", 7, 32, 1)), kind)
    )
    picked = np.array([6, 0, 0, 3])
    assert np.array_equal(bits(tensor.rows(picked)), bits(tensor.dequantize()[picked]))
    taken = tensor.take_rows(picked)
    assert taken.kind == kind and taken.shape == (4, tensor.shape[1])
    assert np.array_equal(bits(taken.dequantize()), bits(tensor.dequantize()[picked]))
    assert tensor.nbytes == tensor.data.size == 7 * tensor.row_bytes
    assert tensor.rows(np.array([], np.int64)).shape == (0, tensor.shape[1])


@pytest.mark.parametrize(
    ("kind", "shape", "size", "message"),
    [
        ("Q2_K", (1, 256), 84, "Q2_K is not supported; supported are F32"),
        ("Q4_0", (2, 31), 36, "rows of 31 elements do not fill Q4_0 blocks.*multiple of 32"),
        ("Q4_0", (2, 32), 35, r"shape \[2, 32\] takes 36 bytes, not 35"),
        ("F32", (2, 0), 0, "holds nothing"),
        ("F32", (), 4, "holds nothing"),
    ],
)
def test_wrong_tensors_are_refused(kind: str, shape: tuple[int, ...], size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tensor(kind, shape, np.zeros(size, np.uint8))


def test_data_must_be_one_run_of_bytes() -> None:
    with pytest.raises(TypeError, match="contiguous"):
        Tensor("F32", (1,), np.zeros(8, np.uint8)[::2])


groups = st.lists(st.floats(-1000, 1000, width=32), min_size=64, max_size=64).map(
    lambda values: np.array(values, np.float32).reshape(2, 32)
)


@given(groups)
def test_rounding_errs_by_at_most_half_a_step(values: np.ndarray) -> None:
    # The stored scale is a float16: 11 bits, or multiples of 2^-24 below its normal range. A scale that was rounded
    # down moves the ends of the range by that error times the number of steps.
    def scale_error(scale: np.ndarray) -> np.ndarray:
        return np.maximum(scale * 2**-11, 2**-25)

    tiny = 1e-6 + np.abs(values) * 2**-20
    step = np.abs(values).max(axis=1, keepdims=True).astype(np.float64) / 127
    error = np.abs(quantize(values, "Q8_0").dequantize() - values.astype(np.float64))
    assert (error <= step / 2 + 127 * scale_error(step) + tiny).all()

    low = values.min(axis=1, keepdims=True).astype(np.float64)
    step = (values.max(axis=1, keepdims=True) - low) / 15
    error = np.abs(quantize(values, "Q4_1").dequantize() - values.astype(np.float64))
    minimum_error = np.maximum(np.abs(low) * 2**-11, 2**-25)
    assert (error <= step / 2 + 15 * scale_error(step) + minimum_error + tiny).all()


def test_bf16_rounds_to_nearest_even() -> None:
    words = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000000, 0xBF818000, 0x00008000]
    tensor = quantize(np.array([words], np.uint32).view(np.float32), "BF16")
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000, 0xBF82, 0x0000]
    assert tensor.data.view("<u2").tolist() == expected


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_values_of_a_format_survive_being_rounded_to_it(kind: str) -> None:
    values = np.random.default_rng(2).standard_normal((4, 96)).astype(np.float32)
    once = quantize(values, kind)
    if kind in ("F32", "F16", "BF16"):
        assert np.array_equal(quantize(once.dequantize(), kind).data, once.data)
        assert np.allclose(once.dequantize(), values, rtol=2.0**-8)
    assert once.shape == (4, 96) and once.kind == kind
    zeros = np.zeros((2, 32), np.float32)
    assert np.array_equal(quantize(zeros, kind).dequantize(), zeros)


def test_requantize_works_row_by_row() -> None:
    tensor = random_blocks("Q6_K", 30, 400, 3)
    values = tensor.dequantize()
    values /= np.abs(values).max()
    source = quantize(values, "F32")
    assert np.array_equal(requantize(source, "Q8_0").data, quantize(values, "Q8_0").data)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_values_that_can_not_be_rounded_are_refused(kind: str) -> None:
    values = np.ones((2, 32), np.float32)
    values[1, 3] = np.nan
    with pytest.raises(InputError, match="not finite"):
        quantize(values, kind)
    if kind != "BF16":
        values[1, 3] = 3e7
        with pytest.raises(InputError, match="too large for float16"):
            quantize(values, kind)
    with pytest.raises(ValueError, match="only to"):
        quantize(values, "Q6_K")


def test_rows_that_do_not_fill_groups_are_refused() -> None:
    with pytest.raises(InputError, match="rows of 33 elements do not fill Q4_1 groups of 32"):
        quantize(np.zeros((2, 33), np.float32), "Q4_1")


def test_a_released_tensor_is_read_again_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tensor"
    raw = np.random.default_rng(0).integers(0, 256, 3 * mmap.PAGESIZE + 64, np.uint8)
    path.write_bytes(raw.tobytes())
    tensor = Tensor("F32", (mmap.PAGESIZE // 2,), np.frombuffer(map_file(path), np.uint8)[64 : 64 + 2 * mmap.PAGESIZE])
    before = tensor.data.tobytes()
    tensor.release()
    assert tensor.data.tobytes() == before == raw[64 : 64 + 2 * mmap.PAGESIZE].tobytes()
    owned = Tensor("F32", (4,), raw[:16].copy())
    owned.release()
    assert owned.data.tobytes() == raw[:16].tobytes()
