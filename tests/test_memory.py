"""Memory is divided before it is taken, and what does not fit is said in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotfish import LLM, InputError, SamplingParams, llm
from pilotfish.control.memory import MemoryPlan, available_memory, plan_memory
from pilotfish.files import parse_bytes

GIB = 2**30


def _plan(**changes: Any) -> MemoryPlan:
    given: dict[str, Any] = {
        "weights": {"target": GIB, "draft": GIB // 4},
        "kv_bytes_per_block": {"target": 3 << 20, "draft": 1 << 20},
        "logits_bytes": 100 << 20,
        "workspace_bytes": 20 << 20,
        "block_size": 16,
        "least_blocks": 10,
        "most_blocks": 10_000,
        "wanted_kv_bytes": None,
        "available_bytes": 8 * GIB,
    }
    return plan_memory(**(given | changes))


def test_kv_has_half_of_what_is_left() -> None:
    plan = _plan()
    left = 8 * GIB - GIB - GIB // 4 - (120 << 20)
    assert plan.num_blocks == left // 2 // (4 << 20)
    assert plan.kv_bytes == plan.num_blocks * (4 << 20) and plan.fits
    assert plan.total_bytes == sum(plan.parts.values()) == 8 * GIB - left + plan.kv_bytes


def test_kv_stays_within_its_bounds() -> None:
    assert _plan(most_blocks=50).num_blocks == 50
    small = _plan(available_bytes=GIB)
    assert small.num_blocks == 10 and not small.fits


def test_a_wish_is_kept() -> None:
    assert _plan(wanted_kv_bytes=GIB).num_blocks == 256
    assert not _plan(wanted_kv_bytes=8 * GIB).fits


def test_the_table_names_every_byte() -> None:
    lines = _plan(wanted_kv_bytes=GIB).lines()
    assert [line.split("  ")[0].strip() for line in lines] == [
        "weights of target",
        "weights of draft",
        "KV of target, 4,096 tokens",
        "KV of draft, 4,096 tokens",
        "logits to verify",
        "workspace of a pass",
        "total",
        "free on this machine",
    ]
    assert all("bytes" in line and "MiB" in line for line in lines)


def test_this_machine_has_memory() -> None:
    assert 2**20 < available_memory() < 2**50


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512MB", 512 * 10**6), ("2GiB", 2 * GIB), ("1.5 gib", 3 * GIB // 2), ("3k", 3000), ("7Ti", 7 * 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1 XB", "1e9", "GiB", "1GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="must be a number of bytes"):
        parse_bytes(text)


def test_a_model_tells_what_it_takes(smollm2_path: Path) -> None:
    model = LLM(smollm2_path, context=512, max_num_seqs=2, kv_cache_memory_bytes=64 << 20)
    assert model.memory.kv_bytes == model.target.num_blocks * model.target.program.kv.bytes_per_block <= 64 << 20
    assert model.memory.kv_bytes > 60 << 20 and any("Smollm2" in line for line in model.memory_table())
    assert model.generate("a", SamplingParams(max_tokens=2))[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("available", "wanted", "message"),
    [
        (50 << 20, None, "does not fit into memory"),
        (400 << 20, 10 * GIB, "does not fit into memory"),
        (8 * GIB, 1000, "too few for 2 requests"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_loaded(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, wanted: int | None, message: str
) -> None:
    monkeypatch.setattr(llm, "available_memory", lambda: available)
    with pytest.raises(InputError, match=message) as caught:
        LLM(smollm2_path, max_num_seqs=2, kv_cache_memory_bytes=wanted)
    if "fit" in message:
        assert "weights of" in str(caught.value) and "free on this machine" in str(caught.value)
