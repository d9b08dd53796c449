"""Where the time of a forward pass goes: by kind of stage, against what this machine can read and multiply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from pilotfish.backends.native import StageTime
from pilotfish.program import BLOCK_SIZE, Attention, GatedAct, Head, Linear, Op, Program, RopeKV
from pilotfish.tree import TreeBatch


@dataclass(frozen=True)
class Cost:
    """All stages of one kind in one pass."""

    kind: str
    stages: int
    ms: float
    barriers: int
    bytes: int  # of weights, keys and values, each read once
    macs: int

    def as_dict(self) -> dict[str, str | float]:
        return {
            "kind": self.kind,
            "stages": self.stages,
            "ms": round(self.ms, 4),
            "barriers": self.barriers,
            "bytes": self.bytes,
            "macs": self.macs,
        }


def costs(
    program: Program, batch: TreeBatch, weights: Mapping[str, Any], passes: Sequence[Sequence[StageTime]]
) -> list[Cost]:
    """Medians over passes of the same batch, in the order of the pass. `weights` are as the backend keeps them."""
    kinds: dict[str, list[int]] = {}
    for index, stage in enumerate(passes[0]):
        kinds.setdefault(" + ".join(map(_name, stage.ops)), []).append(index)
    found = []
    for kind, indices in kinds.items():
        ops = [op for index in indices for op in passes[0][index].ops]
        found.append(
            Cost(
                kind,
                len(indices),
                median(sum(stages[index].ms for index in indices) for stages in passes),
                sum(passes[0][index].barriers for index in indices),
                sum(_bytes(program, batch, op, weights) for op in ops),
                sum(_macs(program, batch, op, weights) for op in ops),
            )
        )
    return found


def table(found: Sequence[Cost], what: str, limit_gb_per_s: float, limit_gmac_per_s: float) -> Table:
    """For people: where the passes `what` (a row count or a word) spend their time."""
    total_ms, barriers = sum(cost.ms for cost in found), sum(cost.barriers for cost in found)
    result = Table(
        title=f"{f'{what} row(s)' if what.isdigit() else what}: {total_ms:.2f} ms, {barriers} barriers",
        caption=f"The limits: {limit_gb_per_s:.1f} GB/s, and {limit_gmac_per_s:.0f} GMAC/s of 4-bit integers.",
    )
    for heading in ("stage", "times", "ms", "share", "barriers", "GB/s", "GMAC/s"):
        result.add_column(heading, justify="left" if heading == "stage" else "right")
    for cost in found:
        result.add_row(
            cost.kind,
            str(cost.stages),
            f"{cost.ms:.3f}",
            f"{cost.ms / total_ms:.1%}",
            str(cost.barriers),
            f"{cost.bytes / cost.ms * 1e-6:.1f}",
            f"{cost.macs / cost.ms * 1e-6:.0f}",
        )
    return result


def _name(op: Op) -> str:
    match op:
        case Linear():
            return f"{op.x} to {op.out}"
        case RopeKV():
            return "rope, KV"
        case GatedAct():
            return "gate"
        case _:
            return type(op).__name__.lower()


def _bytes(program: Program, batch: TreeBatch, op: Op, weights: Mapping[str, Any]) -> int:
    match op:
        case Linear():
            return sum(int(weights[part.weight].nbytes) for part in op.parts)
        case Head():
            return int(weights[op.weight].nbytes)
        case Attention():
            # All rows of a request read its positions together.
            ends = int(np.maximum.reduceat(batch.positions, batch.row_starts[:-1]).sum()) + batch.num_requests
            return ends * program.kv.bytes_per_block // program.kv.layers // BLOCK_SIZE
        case _:
            return 0


def _macs(program: Program, batch: TreeBatch, op: Op, weights: Mapping[str, Any]) -> int:
    match op:
        case Linear():
            return batch.num_rows * sum(_cells(weights[part.weight]) for part in op.parts)
        case Head():
            return len(batch.logit_rows) * _cells(weights[op.weight])
        case Attention():
            return int((batch.positions + 1).sum()) * program.num_heads * program.kv.head_dim * 2
        case _:
            return 0


def _cells(weight: Any) -> int:
    return int(weight.outputs) * int(weight.inputs)
