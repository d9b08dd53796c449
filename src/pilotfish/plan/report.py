"""The report of `pilotfish plan`: one object for machines, tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pilotfish.plan.estimates import BestAt, Estimate
from pilotfish.plan.machine import Machine
from pilotfish.plan.sizes import DRAFT_SHARES, BatchSizes, ModelSizes
from pilotfish.program import BLOCK_SIZE

_BYTES, _COUNTS = ("bytes", "kB", "MB", "GB", "TB", "PB"), ("", "k", "M", "B", "T")
_SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # draft lengths in the table, beside the best


@dataclass(frozen=True)
class Report:
    """Everything that was asked for and found."""

    sizes: BatchSizes
    batch: int
    machine: Machine
    memory_bytes: int | None
    estimates: Sequence[Estimate]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        plan = self.sizes.plan(self.batch, self.memory_bytes)
        memory: dict[str, Any] = {"bytes": dict(plan.parts), "total_bytes": plan.total_bytes}
        if self.memory_bytes is not None:
            memory |= {
                "available_bytes": self.memory_bytes,
                "fits": plan.fits,
                "kv_tokens": plan.num_blocks * BLOCK_SIZE,
                "requests": self.sizes.most_requests(self.memory_bytes),
            }
        return {
            "target": _model_dict(self.sizes.target),
            "draft": None if self.sizes.draft is None else _model_dict(self.sizes.draft),
            "draft_sizes": [_share_dict(self.sizes.target, share) for share in DRAFT_SHARES],
            "machine": {
                "name": self.machine.name,
                "bandwidth_gb_per_s": round(self.machine.gb_per_s, 2),
                "peak_tflop_per_s": round(self.machine.tflop_per_s, 4),
                "measured": self.machine.measured,
            },
            "batch": self.batch,
            "context": self.sizes.context,
            "k": self.sizes.drafts,
            "plain_ms": _round(self.estimates[0].plain_ms),
            "memory": memory,
            "estimates": [_estimate_dict(found) for found in self.estimates],
            "notes": list(self.notes),
        }

    def print(self) -> None:
        console = Console()
        console.print(self._memory_table())
        for found in self.estimates:
            console.print(self._lengths_table(found))
        print("exact: Leviathan et al. 2023; flat takes a pass of k + 1 rows to cost as much as one of 1\n")
        for acceptance in dict.fromkeys(found.acceptance for found in self.estimates):
            console.print(self._batches_table([each for each in self.estimates if each.acceptance == acceptance]))
        machine = self.machine
        plain_ms = self.estimates[0].plain_ms
        print(
            f"roofline of {machine.name}: {machine.gb_per_s:,.4g} GB/s, {machine.tflop_per_s:,.4g} TFLOP/s; plain "
            f"decoding takes {plain_ms:.3g} ms a step or more, {1e3 * self.batch / plain_ms:,.4g} tokens/s or less"
        )
        for found in self.estimates:
            print(f"{_sentence(found, self.batch)}; {_until(found)}")
        if self.memory_bytes is not None:
            print(f"memory holds {self.sizes.most_requests(self.memory_bytes):,} requests of that context")
        for note in self.notes:
            print(f"note: {note}")

    def _memory_table(self) -> Table:
        sizes, target, draft = self.sizes, self.sizes.target, self.sizes.draft
        config = target.config
        table = Table(
            title=f"{target.name}: batch {self.batch}, context {sizes.context:,}, {sizes.drafts} draft tokens a request"
        )
        for heading in ("what", "size", "from"):
            table.add_column(heading, justify="right" if heading == "size" else "left")
        origins = {
            f"{role} weights": f"{model.format.upper()}, {count(model.parameters)} parameters{_of_nominal(model)}"
            for role, model in sizes.models.items()
        }
        origins |= {
            "target KV": f"{self.batch} x {sizes.context:,} tokens, in blocks of {BLOCK_SIZE}",
            "draft KV": "the same blocks",
            "logits to verify": f"{self.batch} x {sizes.drafts + 1} rows x {config.vocab_size:,} tokens x 4 bytes",
            "logits of the draft": "one row for each request",
            "rows of draft trees": f"KV of {self.batch} x {sizes.drafts} draft tokens until they are judged",
            "workspace of a pass": "row buffers",
        }
        plan = sizes.plan(self.batch, self.memory_bytes)
        for name, part in plan.parts.items():
            table.add_row(name, size(part), origins[name])
        table.add_row("total", size(plan.total_bytes), "")
        table.add_section()
        for role, model in sizes.models.items():
            shape = model.config
            table.add_row(
                f"{role} KV per token",
                size(model.kv_bytes_per_token),
                f"{shape.num_layers} layers x {shape.num_kv_heads} heads x {shape.head_dim} x K and V x 2 bytes",
            )
        if draft is None:
            low, high = (_share_dict(target, share) for share in DRAFT_SHARES)
            table.add_row(
                f"drafts of {_shares()} of the parameters",
                _range(low["weight_bytes"], high["weight_bytes"], _BYTES),
                f"{_range(low['parameters'], high['parameters'], _COUNTS)} parameters; of a nominal "
                f"{count(target.nominal_parameters)} it would be "
                f"{_range(low['nominal_parameters'], high['nominal_parameters'], _COUNTS)}, "
                f"{_range(low['nominal_weight_bytes'], high['nominal_weight_bytes'], _BYTES)}",
            )
        if self.memory_bytes is not None:
            table.add_section()
            verdict = "it fits" if plan.fits else "it does NOT fit"
            table.add_row("memory", size(self.memory_bytes), verdict)
            table.add_row("tokens of KV that fit", f"{plan.num_blocks * BLOCK_SIZE:,}", "beside all else of this batch")
            requests = sizes.most_requests(self.memory_bytes)
            table.add_row(f"requests of {sizes.context:,} tokens", f"{requests:,}", "each with its own buffers")
        return table

    def _lengths_table(self, found: Estimate) -> Table:
        table = Table(
            title=f"speed-up over k: drafter {found.drafter} (c = {found.cost_ratio:.3f}), "
            f"acceptance {found.acceptance:g}, batch {self.batch}",
        )
        headings = ("k", "tokens a pass", "pass of k+1 rows", "exact", "exact, flat", "rule of thumb", "breaks even at")
        for heading in headings:
            table.add_column(heading, justify="right")
        for row in found.lengths:
            if row.drafts in _SHOWN or row.drafts == found.best.drafts:
                table.add_row(
                    f"{row.drafts}{' best' if row.drafts == found.best.drafts else ''}",
                    f"{row.tokens:.2f}",
                    f"x {row.pass_ratio:.2f}",
                    f"{row.speed_up:.2f}",
                    f"{row.flat:.2f}",
                    f"{row.rule_of_thumb:.2f}",
                    _percent(row.break_even),
                    style="bold" if row.drafts == found.best.drafts else None,
                )
        return table

    def _batches_table(self, found: Sequence[Estimate]) -> Table:
        rate = found[0].acceptance
        table = Table(title=f"best k (speed-up) by batch size, acceptance {rate:g}")
        table.add_column("batch", justify="right")
        for each in found:
            table.add_column(each.drafter, justify="right")
        if self.memory_bytes is not None:
            table.add_column("fits", justify="right")
        for row in zip(*(each.batches for each in found), strict=True):
            cells = [f"{best.drafts} ({best.speed_up:.2f})" if best.drafts else "0" for best in row]
            if self.memory_bytes is not None:
                cells.append("yes" if self.sizes.plan(row[0].batch, self.memory_bytes).fits else "no")
            table.add_row(str(row[0].batch), *cells)
        return table


def size(number: float) -> str:
    """Bytes in three figures and decimal units."""
    return _range(number, number, _BYTES)


def count(number: float) -> str:
    """A number of parameters in three figures."""
    return _range(number, number, _COUNTS)


def _range(low: float, high: float, units: Sequence[str]) -> str:
    """Two numbers in the unit of the second; one when they are the same."""
    index = 0
    while index + 1 < len(units) and float(f"{high / 1000**index:.3g}") >= 1000:
        index += 1
    shown = [f"{number / 1000**index:{'.0f' if index == 0 else '.3g'}}" for number in dict.fromkeys((low, high))]
    return f"{' to '.join(shown)} {units[index]}".rstrip()


def _of_nominal(model: ModelSizes) -> str:
    if abs(model.nominal_parameters / model.parameters - 1) < 0.01:
        return ""
    return f"; {size(model.nominal_bytes)} for a nominal {count(model.nominal_parameters)}"


def _shares() -> str:
    return " to ".join(f"{100 * share:g} %" for share in DRAFT_SHARES)


def _percent(rate: float | None) -> str:
    return "never" if rate is None else f"{100 * rate:.1f} %"


def _sentence(found: Estimate, batch: int) -> str:
    start = f"{found.drafter}, acceptance {found.acceptance:g}: "
    if found.best.drafts:
        start += f"best k {found.best.drafts} at batch {batch}, {found.best.speed_up:.2f} x plain decoding"
    else:
        start += f"at batch {batch} plain decoding is best"
    even = (
        "no acceptance pays" if found.break_even is None else f"pays from an acceptance of {_percent(found.break_even)}"
    )
    return f"{start}; {even}"


def _until(found: Estimate) -> str:
    if found.pays_until is None:
        return "pays at every batch size"
    if found.pays_until == 0:
        return "pays at no batch size"
    return f"best k is 0 from a batch of {found.pays_until + 1}"


def _model_dict(model: ModelSizes) -> dict[str, Any]:
    return {
        "name": model.name,
        "architecture": model.config.architecture,
        "parameters": model.parameters,
        "nominal_parameters": model.nominal_parameters,
        "weights_format": model.format,
        "weight_bytes": model.weight_bytes,
        "nominal_weight_bytes": model.nominal_bytes,
        "bytes_read_by_a_pass": model.pass_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "context_length": model.config.context_length,
        "vocab_size": model.config.vocab_size,
    }


def _share_dict(target: ModelSizes, share: float) -> dict[str, Any]:
    return {
        "share": share,
        "parameters": round(share * target.parameters),
        "weight_bytes": round(share * target.weight_bytes),
        "nominal_parameters": round(share * target.nominal_parameters),
        "nominal_weight_bytes": round(share * target.nominal_bytes),
    }


def _estimate_dict(found: Estimate) -> dict[str, Any]:
    return {
        "drafter": found.drafter,
        "acceptance": found.acceptance,
        "cost_ratio": _round(found.cost_ratio),
        "best_k": found.best.drafts,
        "best_speedup": _round(found.best.speed_up),
        "break_even_acceptance": _round(found.break_even),
        "by_k": [
            {
                "k": row.drafts,
                "tokens_per_pass": _round(row.tokens),
                "pass_ratio": _round(row.pass_ratio),
                "speedup": _round(row.speed_up),
                "speedup_flat": _round(row.flat),
                "rule_of_thumb": _round(row.rule_of_thumb),
                "break_even_acceptance": _round(row.break_even),
            }
            for row in found.lengths
        ],
        "by_batch": [_best_dict(best) for best in found.batches],
        "best_k_is_0_from_batch": None if found.pays_until is None else found.pays_until + 1,
    }


def _best_dict(best: BestAt) -> dict[str, Any]:
    return {"batch": best.batch, "best_k": best.drafts, "speedup": _round(best.speed_up)}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
