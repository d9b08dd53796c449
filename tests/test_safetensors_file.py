"""The safetensors reader against the library and against damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pilotfish.errors import InputError
from pilotfish.loaders.safetensors_file import read_safetensors
from pilotfish.quant import quantize
from safetensors_writer import header, packed

KINDS = ["F32", "F16", "BF16"]


def one(**fields: Any) -> str:
    return json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the file is empty"),
        (b"\x01", "its header takes 1 bytes"),
        (b"\xff" * 8 + b"{}", "its header takes 18446744073709551615 bytes"),
        (header("[1]"), "does not hold a JSON object"),
        (header("{"), "is not valid JSON"),
        (header('{"x": 3}'), "tensor x: its description is not an object"),
        (header(one(dtype="I64"), bytes(8)), "tensor x: type I64 is not supported; supported are F32, F16, BF16"),
        (header(one(dtype=["F32"]), bytes(8)), "tensor x: type ['F32'] is not supported"),
        (header(one(shape=[-2]), bytes(8)), "shape and data_offsets must be lists of whole numbers"),
        (header(one(shape="2"), bytes(8)), "shape and data_offsets must be lists of whole numbers"),
        (header(one(shape=[True, 2]), bytes(8)), "shape and data_offsets must be lists of whole numbers"),
        (header(one(data_offsets=[0]), bytes(8)), "shape and data_offsets must be lists of whole numbers"),
        (header(one(data_offsets=[8, 0]), bytes(8)), "its bytes 8 to 0 reach past the end"),
        (header(one(), bytes(7)), "its bytes 0 to 8 reach past the end of the file"),
        (header(one(shape=[3]), bytes(8)), "tensor x: F32 data of shape [3] takes 12 bytes, not 8"),
        (header(one(shape=[0], data_offsets=[0, 0])), "tensor x: shape [0] holds nothing"),
        (header(one(shape=[1], data_offsets=[4, 8]), bytes(8)), "the data of its tensors overlap or leave gaps"),
        (header(one(), bytes(9)), "8 bytes of data are described, 9 are there"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_damaged_safetensors(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_a_file_that_the_library_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = {"a": rng.standard_normal((3, 4)).astype(np.float32), "b": rng.standard_normal(5).astype(np.float16)}
    save_file(arrays, tmp_path / "x", {"format": "np"})
    ours = read_safetensors(tmp_path / "x")
    assert {name: tensor.kind for name, tensor in ours.items()} == {"a": "F32", "b": "F16"}
    assert all(np.array_equal(ours[name].dequantize(), array) for name, array in arrays.items())


@pytest.mark.parametrize("kind", KINDS)
def test_safetensors_are_read_as_the_library_reads_them(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(4)
    shapes = [("a.weight", (5, 32)), ("b", (7,)), ("c", (2, 3, 4))]
    raw = packed({name: quantize(rng.standard_normal(shape).astype(np.float32), kind) for name, shape in shapes})
    (tmp_path / "x").write_bytes(raw)
    ours = read_safetensors(tmp_path / "x")
    theirs = dict(safetensors.deserialize(raw))
    assert ours.keys() == theirs.keys()
    for name, entry in theirs.items():
        assert (ours[name].kind, list(ours[name].shape)) == (entry["dtype"], entry["shape"])
        assert ours[name].data.tobytes() == bytes(entry["data"])


SMALL = packed({"a": quantize(np.ones((2, 3), np.float32), "F32"), "b": quantize(np.ones(4, np.float32), "BF16")})
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@settings(same_folder, max_examples=300)
@given(st.integers(0, len(SMALL)), st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=3))
def test_damage_is_refused_or_harmless(tmp_path: Path, size: int, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(SMALL)
    for position, byte in flips:
        raw[position] = byte
    path = tmp_path / "x"
    path.write_bytes(raw[:size])
    try:
        read_safetensors(path)
        assert size == len(SMALL)
    except InputError as error:
        assert "\n" not in str(error)
