"""The GGUF reader against the gguf package and against damage."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_writer import RawTensor, RawValue, gguf_bytes, load_bytes, matrix, refused, text, tiny_gguf
from pilotfish.errors import InputError
from pilotfish.loaders.gguf_file import read_gguf


def test_header_and_tensors_are_those_of_the_gguf_package(smollm2_path: Path) -> None:
    file = read_gguf(smollm2_path)
    oracle = gguf.GGUFReader(smollm2_path)
    expected = {name: field for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata.keys() == expected.keys()
    for name, field in expected.items():
        value = file.metadata[name]
        if isinstance(value, list | np.ndarray):
            assert len(value) == len(field.data), name
            for index in range(0, len(value), 37):
                assert value[index] == field.contents(index), name
        else:
            assert value == field.contents(), name
    assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        ours = file.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type.name and list(ours.shape) == tensor.shape.tolist()[::-1]
        assert np.array_equal(ours.data, tensor.data.view(np.uint8).reshape(-1))
        assert not ours.data.flags.owndata and not ours.data.flags.writeable
    for name in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.7.attn_k.weight"):
        ours = file.tensors[name]
        raw = ours.data.reshape(ours.shape[0], -1)
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[ours.kind])
        assert np.array_equal(ours.dequantize().view(np.uint32), values.view(np.uint32))


ONE = {"x": matrix(2, 32, 0)}
HUGE = 2**63


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the file is empty"),
        (b"GG", "not a GGUF file"),
        (b"GGUF\x03\x00", "truncated or corrupt: the version"),
        (gguf_bytes({}, {}, magic=b"GGML"), "not a GGUF file"),
        (gguf_bytes({}, {}, version=1), "GGUF version 1 is not supported; supported are 2 and 3"),
        (gguf_bytes({}, {}, version=4), "GGUF version 4 is not supported"),
        (gguf_bytes({}, {}, version=3 << 24), "big-endian GGUF files are not supported"),
        (gguf_bytes({}, {}, tensor_count=HUGE), f"{HUGE} tensors do not fit"),
        (gguf_bytes({}, {}, entry_count=HUGE), f"{HUGE} metadata entries do not fit"),
        (gguf_bytes({}, {}, tensor_count=1) + bytes(32), "a tensor name is empty"),
        (
            gguf_bytes({}, {}, tensor_count=1, alignment=1) + b"\x01" * 32,
            "truncated or corrupt: a tensor name reaches past the end",
        ),
        (gguf_bytes({"a": 1}, {}, entry_count=2), "a metadata key is empty"),
        (gguf_bytes([("a", 1), ("a", 2)], {}), "metadata key a appears twice"),
        (gguf_bytes({}, [*ONE.items(), *ONE.items()]), "x appears twice"),
        (gguf_bytes([(b"\xff\xfe", 1)], {}), "a metadata key is not valid UTF-8"),
        (gguf_bytes([("a\nb", 1)], {}), r"a metadata key is empty or holds characters that can not be printed: 'a\nb'"),
        (gguf_bytes({}, [("\x1b[2J", ONE["x"])]), "a tensor name is empty or holds characters that can not be printed"),
        (gguf_bytes({"a": RawValue(8, struct.pack("<Q", HUGE))}, {}), "the value of a reaches past the end"),
        (gguf_bytes({"a": RawValue(8, text(b"\x80"))}, {}), "the value of a is not valid UTF-8"),
        (gguf_bytes({"a": RawValue(13, bytes(8))}, {}), "a has the value type 13"),
        (gguf_bytes({"a": RawValue(7, b"\x02")}, {}), "a is a boolean that is neither 0 nor 1"),
        (gguf_bytes({"a": RawValue(9, struct.pack("<IQ", 9, 0))}, {}), "a is an array of arrays"),
        (gguf_bytes({"a": RawValue(9, struct.pack("<IQ", 13, 0))}, {}), "a has the value type 13"),
        (gguf_bytes({"a": RawValue(9, struct.pack("<IQ", 4, HUGE))}, {}), f"{HUGE} numbers of a do not fit"),
        (gguf_bytes({"a": RawValue(9, struct.pack("<IQ", 8, HUGE))}, {}), f"{HUGE} strings of a do not fit"),
        (gguf_bytes({"a": RawValue(9, struct.pack("<IQQ", 8, 1, 99))}, {}), "a string of a reaches past the end"),
        (gguf_bytes({"general.alignment": 0}, ONE), "general.alignment is 0; it must be a power of two"),
        (gguf_bytes({"general.alignment": 24}, ONE), "general.alignment is 24"),
        (gguf_bytes({"general.alignment": "32"}, ONE), "general.alignment is 32; it must"),
        (gguf_bytes({}, {"x": RawTensor((), 0, 0)}), "tensor x has 0 dimensions; 1 to 4 are possible"),
        (gguf_bytes({}, {"x": RawTensor((1,) * 5, 0, 0)}), "tensor x has 5 dimensions"),
        (gguf_bytes({}, {"x": RawTensor((32, 2), 10, 0)}), "tensor x: format Q2_K is not supported; supported are F32"),
        (gguf_bytes({}, {"x": RawTensor((32, 2), 99, 0)}), "tensor x: format number 99 is not supported"),
        (gguf_bytes({}, {"x": RawTensor((32, 2), 0, 8)}), "offset 8 is not a multiple of the alignment 32"),
        (gguf_bytes({}, {"x": RawTensor((32, 2), 0, 0)}), "tensor x: truncated or corrupt: its 256 bytes reach past"),
        (gguf_bytes({}, ONE | {"y": RawTensor((8,), 0, HUGE)}), "tensor y: truncated or corrupt: its 32 bytes"),
        (gguf_bytes({}, ONE | {"y": RawTensor((HUGE, HUGE), 0, 0)}), "tensor y: truncated or corrupt"),
        (gguf_bytes({}, ONE | {"y": RawTensor((0, 4), 0, 0)}), "tensor y: shape [4, 0] holds nothing"),
        (gguf_bytes({}, ONE | {"y": RawTensor((16, 4), 2, 0)}), "tensor y: rows of 16 elements do not fill Q4_0"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_damaged_field(tmp_path: Path, raw: bytes, message: str) -> None:
    assert message in refused(tmp_path, raw)


def test_another_alignment_and_a_header_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes({"general.alignment": 256}, ONE, alignment=256))
    assert np.array_equal(read_gguf(path).tensors["x"].data, ONE["x"].data)
    every = {"a": np.array([-1, 5], np.int64), "b": np.array([True, False]), "c": [], "d": np.zeros(0, np.float64)}
    path.write_bytes(gguf_bytes(every, {}))
    metadata = read_gguf(path).metadata
    assert {key: list(value) for key, value in metadata.items()} == {"a": [-1, 5], "b": [True, False], "c": [], "d": []}


SMALL = gguf_bytes(*tiny_gguf("llama", "Q4_1"))
HEADER_BYTES = len(SMALL) - sum(-(-t.data.size // 32) * 32 for t in tiny_gguf("llama", "Q4_1")[1].values())
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@same_folder
@given(st.integers(0, len(SMALL) - 1) | st.integers(0, HEADER_BYTES))
def test_a_truncated_file_is_always_refused(tmp_path: Path, size: int) -> None:
    assert refused(tmp_path, SMALL[:size])


@settings(same_folder, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_headers_load_or_are_refused(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(SMALL)
    for position, byte in flips:
        raw[position] = byte
    try:
        load_bytes(tmp_path, bytes(raw)).config.check()
    except InputError as error:
        assert "\n" not in str(error)
