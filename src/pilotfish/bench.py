"""Benchmarks: the cost of a forward pass by its rows, and decoding speed by class of prompt.

Machines are shared and noisy: what is compared runs alternately in one process, and medians are printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pilotfish.backends.native import NativeExecutable, gmac_per_s, read_gb_per_s
from pilotfish.drafters.base import parse_speculation
from pilotfish.errors import InputError
from pilotfish.files import read_text
from pilotfish.llm import LLM
from pilotfish.metrics import now_ms
from pilotfish.params import SamplingParams, StructuredOutput
from pilotfish.profile import Cost, costs
from pilotfish.profile import table as profile_table
from pilotfish.program import BLOCK_SIZE
from pilotfish.tree import DraftTree, Rows, TreeBatch

app = typer.Typer(help="Measure this machine with a model.", no_args_is_help=True)

_Key = int | str  # a row count, or "prefill"

CONTEXT = 128  # tokens before the measured rows
PREFILL_ROWS = 512  # at a time


@dataclass(frozen=True)
class Sample:
    """One prompt of a workload."""

    kind: str
    prompt: str


@app.command()
def curve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a .gguf file, a model directory, or demo")],
    rows: Annotated[str, typer.Option(metavar="LIST", help="row counts, with commas between")] = "1,2,4,8,16",
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="passes for each row count")] = 15,
    weights: Annotated[str | None, typer.Option(metavar="KIND", help="requantise on load: bf16, int8 or int4")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="worker threads")] = None,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="tokens before the measured rows")] = CONTEXT,
    prefill: Annotated[int, typer.Option(metavar="N", min=0, help="also time a prompt of N tokens")] = 0,
    profile: Annotated[bool, typer.Option("--profile", help="also show where each pass spends its time")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
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


@app.command()
def decode(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a .gguf file, a model directory, or demo")],
    prompts: Annotated[Path, typer.Option(metavar="FILE", help='JSON lines: {"class": ..., "prompt": ...}')],
    speculation: Annotated[list[str] | None, typer.Option(metavar="S", help="may be repeated; off always runs")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="tokens of each answer")] = 128,
    temperature: Annotated[float, typer.Option(metavar="T")] = 0.0,
    json_schema: Annotated[Path | None, typer.Option(metavar="FILE", help="answers are JSON of this schema")] = None,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="runs of each prompt and setting")] = 1,
    weights: Annotated[str | None, typer.Option(metavar="KIND", help="requantise on load: bf16, int8 or int4")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="worker threads")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Decode a workload with each speculation in turn and compare speed and text with speculation off."""
    settings = ["off", *(text for text in speculation or [] if text != "off")]
    parsed = {text: parse_speculation(text) for text in settings}
    samples = read_prompts(prompts)
    llm = LLM(model, threads=threads, weights=weights)
    structured = (
        None if json_schema is None else StructuredOutput(json_schema=read_text(str(json_schema), "JSON schema"))
    )
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True, structured=structured
    )
    runs: dict[str, dict[str, list[_Run]]] = {text: {} for text in settings}
    settings_in_turn = list(settings)
    for sample in track(samples, description="prompts", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        found: dict[str, list[_Run]] = {text: [] for text in settings}
        for _ in range(repeat):
            settings_in_turn.reverse()  # whoever always came first would always meet colder caches
            for text in settings_in_turn:
                completion = llm.generate(sample.prompt, params, chat=True, speculation=parsed[text])[0]
                found[text].append(
                    _Run(
                        completion.tokens,
                        len(completion.tokens) / completion.speculation["target_steps"],
                        completion.timings["tokens_per_second"],
                    )
                )
        plain = found["off"][0].tokens
        for text in settings:
            speed = median(run.tokens_per_second for run in found[text])
            length = found[text][0].acceptance_length
            equal = all(run.tokens == plain for run in found[text])
            runs[text].setdefault(sample.kind, []).append(_Run(plain if equal else (), length, speed))
    report = {
        text: {kind: _summarise(found, runs["off"][kind]) for kind, found in runs[text].items()} for text in settings
    }
    if as_json:
        print(json.dumps({"settings": report, "model": llm.config.name or model, "machine": machine(llm)}))
        return
    table = Table(title=f"{llm.config.name or model}: decoding, {max_tokens} tokens a prompt")
    for heading in ("speculation", "class", "tokens/s", "over off", "acceptance length", "equal"):
        table.add_column(heading, justify="left" if heading in ("speculation", "class") else "right")
    for text, kinds in report.items():
        for kind, row in kinds.items():
            table.add_row(
                text,
                kind,
                f"{row['tokens_per_second']:.1f}",
                f"{row['over_off']:.2f}",
                f"{row['acceptance_length']:.2f}",
                "yes" if row["equal"] else "NO",
            )
    Console().print(table)
    print(machine(llm))


def read_prompts(path: Path) -> list[Sample]:
    """Read a workload. Raises InputError with the line that is wrong."""
    lines = read_text(str(path), "prompts").splitlines()
    samples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("class", "prompt")):
            raise InputError(f'{path}, line {number} must be {{"class": TEXT, "prompt": TEXT}}')
        samples.append(Sample(item["class"], item["prompt"]))
    if not samples:
        raise InputError(f"{path} holds no prompts")
    return samples


def machine(llm: LLM) -> str:
    """What ran, in words."""
    cpu = next(iter(_cpu_names()), "unknown CPU")
    return f"{cpu}, {llm.backend_description}"


@dataclass(frozen=True)
class _Run:
    tokens: tuple[int, ...]  # () when a run differed from speculation off
    acceptance_length: float
    tokens_per_second: float


def _summarise(runs: Sequence[_Run], off: Sequence[_Run]) -> dict[str, Any]:
    """Speeds are medians over prompts; `over_off` is the median of the ratios prompt by prompt."""
    return {
        "tokens_per_second": round(median(run.tokens_per_second for run in runs), 2),
        "over_off": round(
            median(run.tokens_per_second / plain.tokens_per_second for run, plain in zip(runs, off, strict=True)), 3
        ),
        "acceptance_length": round(sum(run.acceptance_length for run in runs) / len(runs), 3),
        "equal": all(run.tokens for run in runs),
    }


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


def _cpu_names() -> Iterable[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                yield line.partition(":")[2].strip()
    except OSError:
        return
