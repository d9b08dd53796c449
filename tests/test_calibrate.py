"""Calibration: what is measured stays within the model and its blocks, and is kept for the next start."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from layer_loop import tiny_host
from pilotfish.backends.native import NativeBackend
from pilotfish.calibrate import (
    MOST_REPEATS,
    Calibration,
    Samples,
    calibrated,
    calibration_seconds,
    cpu_name,
    measure,
    model_key,
)
from pilotfish.control.cost import CostModel, Load
from pilotfish.engine import Engine, Target
from pilotfish.errors import InputError
from pilotfish.loaders.kept import shown
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.program import BLOCK_SIZE, KV, Executable, Floats, Result
from pilotfish.tree import TreeBatch
from tiny import tiny_model


def _target(context: int = 1024, num_blocks: int = 80) -> Target:
    config, tensors = tiny_model("llama", 11, kinds="Q4_0+Q8_0")
    backend = NativeBackend(threads=1)
    program = decoder_program(config, context)
    weights = backend.load(tensors)
    return Target(program, backend.prepare(program, weights), backend.new_kv(program.kv, num_blocks), num_blocks)


class Checked:
    """Lets only batches through that lie within the blocks and the context, and keeps their loads."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.loads: list[Load] = []

    def forward(self, batch: TreeBatch, kv: KV, logits: bool, feeds: Sequence[Floats] = ()) -> Result:
        assert batch.positions.max() < self.target.program.context_length
        assert batch.block_tables.min() >= 0 and batch.block_tables.max() < self.target.num_blocks
        used = [
            (int(batch.block_tables[request, slot // BLOCK_SIZE]), slot % BLOCK_SIZE)
            for request in range(batch.num_requests)
            for slot in batch.slots[batch.row_starts[request] : batch.row_starts[request + 1]].tolist()
        ]
        assert len(set(used)) == len(used), "two rows write one slot"
        self.loads.append(Load.of(batch))
        return self.target.executable.forward(batch, kv, logits, feeds)


def _measure(target: Target, executable: Executable, **options: float) -> Samples:
    return measure(
        executable,
        target.kv,
        target.program,
        num_blocks=target.num_blocks,
        most_rows=int(options.get("most_rows", 512)),
        seconds=options.get("seconds", 0.5),
        logits=False,
        progress=None,
    )


@pytest.mark.parametrize(("context", "num_blocks"), [(1024, 80), (1024, 8), (100, 80), (16, 1), (1, 1)])
def test_every_pass_fits(context: int, num_blocks: int) -> None:
    target = _target(context, num_blocks)
    executable = Checked(target)
    samples = _measure(target, executable, seconds=0.3)
    assert {load for load, _ in samples} == set(executable.loads)
    assert all(ms > 0 for _, ms in samples)
    most = min(context, num_blocks * BLOCK_SIZE)
    assert max(load.rows for load, _ in samples) <= most
    assert {1, 2, 4, 8, 16} & {*range(most + 1)} <= {load.rows for load, _ in samples}
    CostModel.fit(samples).check()


def test_rows_contexts_and_requests_vary_in_turns() -> None:
    target = _target(num_blocks=200)
    executable = Checked(target)
    samples = _measure(target, executable, seconds=0.8)
    of_rows: dict[int, set[Load]] = {}
    for load, _ in samples:
        of_rows.setdefault(load.rows, set()).add(load)
    assert set(of_rows) >= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512}
    eight = of_rows[8]
    assert len({load.context for load in eight}) > 2, "two contexts, and spread over requests"
    assert len({load.outputs for load in of_rows[16]}) == 2
    assert of_rows[512] == {next(load for load in of_rows[512] if load.outputs == 1)}
    counts = {load: sum(other == load for other, _ in samples) for load, _ in samples}
    assert max(counts.values()) <= MOST_REPEATS
    assert any(a != b for a, b in zip(executable.loads[40:], executable.loads[41:], strict=False))


def test_most_rows_is_a_bound_and_progress_ends_at_one() -> None:
    target = _target()
    told: list[float] = []
    samples = measure(
        target.executable,
        target.kv,
        target.program,
        num_blocks=target.num_blocks,
        most_rows=5,
        seconds=0.2,
        logits=True,
        progress=told.append,
    )
    assert {load.rows for load, _ in samples} == {1, 2, 3, 4}
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 10


def test_a_slow_model_is_measured_at_few_rows() -> None:
    target = _target()
    samples = _measure(target, target.executable, seconds=1e-6)
    assert {load.rows for load, _ in samples} == {1, 2, 3, 4}
    CostModel.fit(samples).check()


def test_measuring_changes_no_text() -> None:
    def text(target: Target) -> list[int]:
        engine = Engine(target)
        (request,) = engine.add([5, 6, 7, 8], SamplingParams(max_tokens=30))
        list(engine.run())
        return request.tokens

    plain, used = _target(), _target()
    _measure(used, used.executable)
    assert text(plain) == text(used)


class Counted:
    """A measurement that counts how often it was made."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Samples:
        self.times += 1
        return [(Load(1, 128, 128), 10.0 * self.times), (Load(8, 128, 1024), 15.0 * self.times)]


KEY = {"model": "a", "size": 3}


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    count = Counted()
    folder = tmp_path / "new" / "costs"
    first = calibrated(KEY, count, folder=folder)
    second = calibrated(dict(reversed(KEY.items())), count, folder=folder)
    assert count.times == 1 and first.as_dict() == second.as_dict()
    assert [path.suffix for path in folder.iterdir()] == [".json"], "nothing half written is left"


def test_another_key_is_measured(tmp_path: Path) -> None:
    count = Counted()
    for key in (KEY, KEY | {"size": 4}, KEY | {"threads": 2}, KEY):
        calibrated(key, count, folder=tmp_path)
    assert count.times == 3


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"key": 1, "cost": {}}', "[" * 100_000, "\x00\xff"],
)
def test_a_damaged_file_is_measured_again(tmp_path: Path, content: str) -> None:
    count = Counted()
    calibrated(KEY, count, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content.encode("latin-1"))
    again = calibrated(KEY, count, folder=tmp_path)
    assert count.times == 2 and again.ms(Load(1)) > 15
    calibrated(KEY, count, folder=tmp_path)
    assert count.times == 2


def test_a_file_of_another_key_or_model_is_measured_again(tmp_path: Path) -> None:
    count = Counted()
    calibrated(KEY, count, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    good = json.loads(path.read_text())
    for number, bad in enumerate([good | {"key": {}}, good | {"cost": good["cost"] | {"ms": [1]}}], 2):
        path.write_text(json.dumps(bad))
        calibrated(KEY, count, folder=tmp_path)
        assert count.times == number


def test_a_folder_that_can_not_be_written_costs_only_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    count = Counted()
    with caplog.at_level(logging.WARNING, "pilotfish"):
        for _ in range(2):
            assert calibrated(KEY, count, folder=blocked / "costs").ms(Load(1)) > 0
    assert count.times == 2 and "can not be kept" in caplog.text


def test_without_a_folder_the_cache_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    calibrated(KEY, Counted())
    assert len(list((tmp_path / "costs").iterdir())) == 1


def test_the_key_tells_files_programs_and_backends_apart(tmp_path: Path) -> None:
    program = _target().program
    path = tmp_path / "model.gguf"
    path.write_bytes(b"abc")

    def key(**others: object) -> str:
        return json.dumps(model_key(path, program, "avx2 kernels, 2 threads", **others), sort_keys=True)

    first = key()
    assert key() == first
    keys = {first, key(weights="int4"), json.dumps(model_key(path, program, "avx2 kernels, 1 threads"), sort_keys=True)}
    shallow = replace(program, ops=program.ops[:-1])
    keys.add(json.dumps(model_key(path, shallow, "avx2 kernels, 2 threads"), sort_keys=True))
    os.utime(path, ns=(1, 1))
    keys.add(key())
    path.write_bytes(b"abcd")
    os.utime(path, ns=(1, 1))
    keys.add(key())
    folder = json.dumps(model_key(tmp_path, program, "avx2 kernels, 2 threads"))
    assert len(keys) == 6 and str(path) in folder
    assert cpu_name() and cpu_name() in json.loads(first).values()


def test_the_bar_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("measuring") as progress:
        progress(0.5)
        progress(1.0)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


class _Drafter:
    """What a calibration has to know of a drafter."""

    name = "draft:small"

    def __init__(self, target: Target) -> None:
        self.program, self.executable, self.kv = target.program, target.executable, target.kv


def test_a_drafter_is_measured_at_the_speed_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is half as fast meanwhile must not make the drafter look twice as dear."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    monkeypatch.setenv("PILOTFISH_CALIBRATION_SECONDS", "0.1")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"model")
    config, tensors = tiny_model("llama", 11, kinds="Q4_0+Q8_0")
    host = tiny_host(NativeBackend(threads=1), config, tensors, 512)
    calls: list[str] = []

    def measured(self: Calibration, what: str, *rest: object) -> Samples:
        calls.append(what)
        return [(Load(1, 1, 1), 10.0 if what == "the target" else 6.0)]

    rows_ms = iter([20.0, 40.0, 20.0, 20.0])  # the first time it moves while the drafter is measured
    monkeypatch.setattr(Calibration, "_measure", measured)
    monkeypatch.setattr(Calibration, "_row_ms", lambda self: next(rows_ms))
    target = Target(host.program, host.executable, host.kv, host.num_blocks)
    calibration = Calibration(file, None, host, "kernels")
    assert calibration.target().ms(Load(1, 1, 1)) == pytest.approx(10.0)
    assert calibration.drafter(_Drafter(target), file).ms(Load(1, 1, 1)) == pytest.approx(3.0)
    assert calls == ["the target", "draft:small", "draft:small"]
    again = Calibration(file, None, host, "kernels")
    assert again.drafter(_Drafter(target), tmp_path / "gone").ms(Load(1, 1, 1)) == pytest.approx(3.0)
    assert len(calls) == 3, "both were kept"


@pytest.mark.parametrize(("text", "seconds"), [("", 3.0), ("0", 0.0), ("2.5", 2.5)])
def test_the_time_for_it_can_be_set(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("PILOTFISH_CALIBRATION_SECONDS", text)
    assert calibration_seconds() == seconds


@pytest.mark.parametrize("text", ["x", "-1", "nan", "1e9"])
def test_a_time_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PILOTFISH_CALIBRATION_SECONDS", text)
    with pytest.raises(InputError, match=r"PILOTFISH_CALIBRATION_SECONDS is .*; it must be a number of seconds"):
        calibration_seconds()
