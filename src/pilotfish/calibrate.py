"""Measure what forward passes cost on this machine, once for each model: the result is kept in the cache folder.

Passes of many shapes are timed in turns, so that a noisy moment hits all alike. No request may be running: the KV of
the blocks that are used is overwritten.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pilotfish
from pilotfish.control.cost import CostModel, Load
from pilotfish.drafters.base import Host, Measurable
from pilotfish.errors import InputError
from pilotfish.loaders.demo import cache_folder
from pilotfish.loaders.kept import kept_or_made, shown
from pilotfish.metrics import now_ms
from pilotfish.program import BLOCK_SIZE, KV, Executable, Program
from pilotfish.tree import DraftTree, Rows, TreeBatch

FORMAT = 1  # of a file, and of what is measured
STEADY = 1.2  # how far the machine may move while a drafter is measured
SECONDS_VARIABLE = "PILOTFISH_CALIBRATION_SECONDS"
MOST_ROWS = 512
SHORT, MIDDLE, LONG = 128, 512, 2048  # tokens before the rows
# What gives the outline, and is measured several times before anything else, as (rows, requests, context, is a prompt).
OUTLINE = (
    *((rows, 1, SHORT, False) for rows in (1, 2, 4, 8, 16, 32)),
    *((rows, 1, LONG, False) for rows in (1, 8, 16)),
    *((rows, requests, SHORT, False) for rows, requests in ((4, 4), (8, 8), (16, 4))),
    (16, 1, SHORT, True),  # tells what logits cost
)
DETAILS = (
    *((rows, 1, SHORT, False) for rows in (3, 6, 12, 24, 48, 64)),
    *((rows, 1, LONG, False) for rows in (2, 4, 32)),
    *((rows, requests, SHORT, False) for rows, requests in ((2, 2), (8, 2), (16, 16), (32, 8))),
    (4, 4, MIDDLE, False),
    (64, 1, SHORT, True),
)
# Of so many rows most are of prompts, whose logits are not wanted. What tells most comes first.
LARGE = tuple((rows, 1, SHORT, True) for rows in (128, MOST_ROWS, 256, 96))
MOST_REPEATS = 12
ALWAYS = 4  # passes of at most so many rows are measured however slow the machine is
# Shares of the time, until which the outline, and then details may be measured; one pass must be expected to end in it.
OUTLINE_SHARE, DETAILS_SHARE, OVERRUN = 0.5, 0.75, 1.25

Samples = list[tuple[Load, float]]


@dataclass
class _Pass:
    batch: TreeBatch
    load: Load
    times: list[float] = field(default_factory=list)  # ms


def measure(
    executable: Executable,
    kv: KV,
    program: Program,
    *,
    num_blocks: int,
    most_rows: int = MOST_ROWS,
    seconds: float = 3.0,
    logits: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Samples:
    """Time passes of 1 to `most_rows` rows in about `seconds`: (load, ms) of each.

    Rows are chains of one request or spread over several, after a short and a long context. With `logits` the logits
    are given back, not only the likeliest tokens. Passes of many rows are left out where they would take too long.
    `progress` is told the share that is done. Overwrites KV of the blocks below `num_blocks`.
    """
    outline, details, large = _passes(program, num_blocks, most_rows)
    passes = [*outline, *details, *large]
    _touch(kv, passes)
    started, told = now_ms(), 0.0

    def elapsed() -> float:
        return (now_ms() - started) / (1e3 * seconds)

    def run(item: _Pass) -> None:
        nonlocal told
        begun = now_ms()
        executable.forward(item.batch, kv, logits)
        item.times.append(now_ms() - begun)
        told = max(told, min(0.99, elapsed()))
        if progress is not None:
            progress(told)

    def expected(item: _Pass) -> float:
        """The share of the time that a pass takes at most, as rows get no dearer the more there are."""
        known = [other for other in passes if other.times and other.load.rows <= item.load.rows]
        nearest = max(known, key=lambda other: other.load.rows, default=None)
        if nearest is None:
            return 0.0
        return median(nearest.times) * item.load.rows / nearest.load.rows / (1e3 * seconds)

    def once(items: Sequence[_Pass], most: float) -> None:
        for item in items:
            if item.load.rows <= ALWAYS or elapsed() + expected(item) < most:
                run(item)

    def again(items: Sequence[_Pass], most: float) -> None:
        """All get the same time, so that short passes, which vary most, are run most often."""
        while left := [item for item in items if 0 < len(item.times) < MOST_REPEATS]:
            item = min(left, key=lambda item: sum(item.times))
            if elapsed() + expected(item) > most:
                return
            run(item)

    for _ in range(2):  # threads wake up, buffers grow
        run(passes[0])
    passes[0].times.clear()
    once(outline, OVERRUN)
    again(outline, OUTLINE_SHARE)
    once(details, DETAILS_SHARE)
    once(large, OVERRUN)
    again(passes, 1.0)
    if progress is not None:
        progress(1.0)
    return [(item.load, ms) for item in passes for ms in item.times]


def calibrated(
    key: Mapping[str, object], measure_now: Callable[[], Samples], *, folder: Path | None = None
) -> CostModel:
    """The cost model of what `key` describes: out of `folder` (by default in the cache folder), else measured and kept.

    A file that is damaged or of another key is measured again. A folder that can not be written costs only the next
    start the time.
    """
    return kept_or_made(
        cache_folder() / "costs" if folder is None else folder,
        {"format": FORMAT, **key},
        "cost",
        "what passes cost",
        make=lambda: CostModel.fit(measure_now()),
        write=CostModel.as_dict,
        read=CostModel.from_dict,
    )


def model_key(path: Path, program: Program, backend: str, **others: object) -> dict[str, object]:
    """What a calibration depends on: the files at `path`, the program, `backend` (a description), this CPU and version.

    `others` are added: whatever else makes passes faster or slower, as weights that are rounded on load.
    """
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    states = [(str(file.resolve()), file.stat()) for file in files if file.is_file()]
    return {
        "files": [[name, state.st_size, state.st_mtime_ns] for name, state in states],
        "program": hashlib.sha256(repr(program).encode()).hexdigest(),
        "context": program.context_length,
        "backend": backend,
        "cpu": cpu_name(),
        "version": pilotfish.__version__,
        **others,
    }


class Calibration:
    """What passes of a loaded target and of its drafters cost, measured when it is first asked for.

    Machines move: the same pass may take twice the time a minute later. What decides is how much dearer one pass is
    than another, so drafters are measured beside the target and brought to the speed that it was measured at.
    """

    def __init__(self, path: Path, weights: str | None, host: Host, backend: str) -> None:
        """`path` is the target's, `weights` what it was rounded to, `backend` a description."""
        self.path = path
        self._weights = weights
        self._host = host
        self._backend = backend
        self._target: CostModel | None = None
        self._one_row_ms = 0.0  # of the target, as it was measured

    def target(self) -> CostModel:
        """Of the target's passes; corrected by whoever tells it of real ones."""
        if self._target is None:
            host = self._host
            key = model_key(self.path, host.program, self._backend, weights=self._weights)
            self._target = calibrated(key, lambda: self._measure("the target", host.executable, host.kv, host.program))
            self._one_row_ms = self._target.ms(Load(1, 1, 1))
        return self._target

    def drafter(self, drafter: Measurable, path: Path) -> CostModel:
        """Of a drafter's passes; its files are at `path`, if it has any."""
        self.target()
        key = model_key(
            path if path.exists() else self.path,
            drafter.program,
            self._backend,
            weights=self._weights,
            drafter=drafter.name,
            beside=round(self._one_row_ms, 3),
        )

        def now() -> Samples:
            for _ in range(3):
                before = self._row_ms()
                samples = self._measure(drafter.name, drafter.executable, drafter.kv, drafter.program)
                after = self._row_ms()
                if max(before, after) < STEADY * min(before, after):
                    break  # else the machine moved in between
            speed = self._one_row_ms / ((before + after) / 2)
            return [(load, ms * speed) for load, ms in samples]

        return calibrated(key, now)

    def _row_ms(self) -> float:
        """The target's pass of one row now."""
        batch = TreeBatch.build([Rows([0], 0, [0])])
        times = []
        for _ in range(7):
            begun = now_ms()
            self._host.executable.forward(batch, self._host.kv, False)
            times.append(now_ms() - begun)
        return median(times)

    def _measure(self, what: str, executable: Executable, kv: KV, program: Program) -> Samples:
        with shown(f"measuring what passes of {what} cost") as progress:
            return measure(
                executable,
                kv,
                program,
                num_blocks=self._host.num_blocks,
                seconds=calibration_seconds(),
                progress=progress,
            )


def calibration_seconds() -> float:
    """How long one calibration may take: PILOTFISH_CALIBRATION_SECONDS, else 3; 0 leaves it to real passes to tell.

    Raises InputError when the variable is not a number of seconds.
    """
    text = os.environ.get(SECONDS_VARIABLE) or "3"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 600:
        raise InputError(f"{SECONDS_VARIABLE} is {text!r}; it must be a number of seconds from 0 to 600")
    return seconds


def cpu_name() -> str:
    """What the system calls this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "unknown CPU"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "unknown CPU")


def _passes(program: Program, num_blocks: int, most_rows: int) -> tuple[list[_Pass], list[_Pass], list[_Pass]]:
    """Outline, details and passes of many rows, all within the blocks and within the context of the model."""

    def build(shapes: Iterable[tuple[int, int, int, bool]]) -> list[_Pass]:
        found = []
        for rows, requests, context, prompt in shapes:
            each = rows // requests
            context = min(context, most_slots - each)
            blocks = -(-(context + each) // BLOCK_SIZE)  # of each request
            if rows > most_rows or context < 0 or requests * blocks > num_blocks:
                continue
            parts = []
            for index in range(requests):
                own = range(index * blocks, (index + 1) * blocks)
                tokens = [(17 + 31 * (index + row)) % program.vocab_size for row in range(each)]
                tree = DraftTree.empty() if prompt else DraftTree.chain(tokens[1:])
                parts.append(Rows(tokens if prompt else tokens[:1], context, own, tree))
            batch = TreeBatch.build(parts)
            found.append(_Pass(batch, Load.of(batch)))
        return found

    most_slots = min(program.context_length, num_blocks * BLOCK_SIZE)
    return build(OUTLINE), build(DETAILS), build(LARGE)


def _touch(kv: KV, passes: Sequence[_Pass]) -> None:
    """Write a slot of every block that is read: memory that was never written lies in one page, and in the cache."""
    last = max(int(item.batch.block_tables.max(initial=0)) for item in passes)
    kv.move(range(last + 1), [0] * last, [BLOCK_SIZE * block for block in range(1, last + 1)])
