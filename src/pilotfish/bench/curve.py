"""The command `bench curve`: what a forward pass costs by its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pilotfish.arguments import AsJson, Model, Threads, Weights
from pilotfish.backends.native import NativeExecutable, gmac_per_s, read_gb_per_s
from pilotfish.bench.workload import machine
from pilotfish.errors import InputError
from pilotfish.llm import LLM
from pilotfish.metrics import now_ms
from pilotfish.profile import Cost, costs
from pilotfish.profile import table as profile_table
from pilotfish.program import BLOCK_SIZE
from pilotfish.tree import DraftTree, Rows, TreeBatch

_Key = int | str  # a row count, or "prefill"

CONTEXT = 128  # tokens before the measured rows
PREFILL_ROWS = 512  # at a time


def curve(
    model: Model,
    rows: Annotated[str, typer.Option(metavar="LIST", help="row counts, with commas between")] = "1,2,4,8,16",
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="passes for each row count")] = 15,
    weights: Weights = None,
    threads: Threads = None,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="tokens before the measured rows")] = CONTEXT,
    prefill: Annotated[int, typer.Option(metavar="N", min=0, help="also time a prompt of N tokens")] = 0,
    profile: Annotated[bool, typer.Option("--profile", help="also show where each pass spends its time")] = False,
    as_json: AsJson = False,
) -> None:
    """Time one forward pass of M rows over that of one row.

    Speculation lives or dies by this curve: a draft of k tokens costs a pass of k + 1 rows.
    """
    counts = _row_counts(rows)
    llm = LLM(model, threads=threads, weights=weights)
    prompt = _prompt(llm, prefill) if prefill else None
    batches = _curve_batches(llm, counts, context)
    limit_before = read_gb_per_s(threads)  # virtual machines move, and their memory with them
    times = _measure_curve(llm, batches, repeat)
    medians = [median(times[count]) for count in counts]
    gb = llm.weight_bytes / 1e9
    limit_gb_per_s, limit_gmac_per_s = max(limit_before, read_gb_per_s(threads)), gmac_per_s(threads)
    if prompt:
        batches["prefill"] = prompt
        prefill_ms = median(_measure_curve(llm, {"prefill": prompt}, min(repeat, 3))["prefill"])
    profiles = {str(count): _profile(llm, batch, repeat) for count, batch in batches.items()} if profile else {}
    result = {
        "model": llm.config.name or model,
        "rows": counts,
        "median_ms": [round(value, 3) for value in medians],
        "ratio": [round(value / medians[0], 3) for value in medians],
        "gb_per_s": round(gb / (medians[0] / 1e3), 2),
        "limit_gb_per_s": round(limit_gb_per_s, 2),
        "limit_gmac_per_s": round(limit_gmac_per_s, 1),
        "weight_gb": round(gb, 4),
        "context": context,
        "machine": machine(llm),
    }
    if prompt:
        speed = round(1e3 * prefill / prefill_ms, 1)
        result["prefill"] = {"tokens": prefill, "median_ms": round(prefill_ms, 3), "tokens_per_second": speed}
    if profile:
        result["profile"] = {count: [cost.as_dict() for cost in found] for count, found in profiles.items()}
    if as_json:
        print(json.dumps(result))
        return
    table = Table(title=f"{result['model']}: one forward pass at a context of {context}")
    for heading in ("rows", "median ms", f"over {counts[0]} row(s)", "tokens/s if all stand"):
        table.add_column(heading, justify="right")
    for count, value in zip(counts, medians, strict=True):
        table.add_row(str(count), f"{value:.2f}", f"{value / medians[0]:.2f}", f"{1e3 * count / value:.0f}")
    Console().print(table)
    if prompt:
        print(f"a prompt of {prefill} tokens takes {prefill_ms:.1f} ms: {speed} tokens/s")
    for what, found in profiles.items():
        Console().print(profile_table(found, what, limit_gb_per_s, limit_gmac_per_s))
    print(
        f"the first row count reads {gb:.3f} GB of weights at {result['gb_per_s']} GB/s; "
        f"the machine reads at most {result['limit_gb_per_s']} GB/s ({result['machine']})"
    )


def _row_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--rows {text!r} must be whole numbers with commas between, as in 1,2,4,8") from None
    if not counts or min(counts) < 1 or max(counts) > 512 or len(set(counts)) < len(counts):
        raise InputError(f"--rows {text!r} must be different numbers from 1 to 512")
    return counts


def _tokens(llm: LLM, count: int) -> tuple[list[int], list[int]]:
    """So many tokens and the blocks that hold them. Raises InputError when the model's context is shorter."""
    if count > llm.target.program.context_length:
        raise InputError(f"{count} tokens do not fit the model's context of {llm.target.program.context_length}")
    return [1 + index % (llm.config.vocab_size - 1) for index in range(count)], list(range(-(-count // BLOCK_SIZE)))


def _prompt(llm: LLM, count: int) -> TreeBatch:
    tokens, blocks = _tokens(llm, count)
    return TreeBatch.build([Rows(tokens, 0, blocks)])


def _curve_batches(llm: LLM, counts: Sequence[int], context: int) -> dict[int | str, TreeBatch]:
    """For each row count its rows after `context` tokens, whose KV is there."""
    tokens, blocks = _tokens(llm, context + max(counts))
    for start in range(0, context, PREFILL_ROWS):
        chunk = Rows(tokens[start : min(start + PREFILL_ROWS, context)], start, blocks, logits=False)
        llm.target.executable.forward(TreeBatch.build([chunk]), llm.target.kv, False)
    return {
        count: TreeBatch.build([Rows(tokens[context : context + 1], context, blocks, DraftTree.chain(tokens[1:count]))])
        for count in counts
    }


def _measure_curve(llm: LLM, batches: Mapping[_Key, TreeBatch], repeat: int) -> dict[_Key, list[float]]:
    """Milliseconds of each pass, the row counts taken in turn so that a noisy moment hits all alike."""
    times: dict[_Key, list[float]] = {count: [] for count in batches}
    for turn in range(repeat + 1):
        for count, batch in batches.items():
            started = now_ms()
            llm.target.executable.forward(batch, llm.target.kv, False)
            if turn:  # the first turn warms up
                times[count].append(now_ms() - started)
    return times


def _profile(llm: LLM, batch: TreeBatch, repeat: int) -> list[Cost]:
    executable = llm.target.executable
    assert isinstance(executable, NativeExecutable)
    passes = [executable.profile(batch, llm.target.kv) for _ in range(repeat)]
    return costs(llm.target.program, batch, llm.weights, passes)
