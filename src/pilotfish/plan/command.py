"""The command `plan`: its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.errors import InputError
from pilotfish.files import parse_bytes
from pilotfish.plan.estimates import Estimate, drafters, estimate
from pilotfish.plan.machine import Machine, choose
from pilotfish.plan.plot import draw
from pilotfish.plan.report import Report
from pilotfish.plan.sizes import BatchSizes, ModelSizes, model_sizes

DEFAULT_CONTEXT = 2048
_MOST_BATCH = 1 << 20
_BATCHES = [1 << power for power in range(9)]
_REQUESTS, _DEVICE, _OUT = "Requests", "Device", "Output"


def _option(help: str, metavar: str | None = None, panel: str | None = None) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(metavar=metavar, help=help, rich_help_panel=panel)
    return found


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="a .gguf file, a model directory or its config.json, demo, or a public name such as llama-2-7b",
        ),
    ],
    draft: Annotated[str | None, _option("a draft model, named in the same ways", "MODEL")] = None,
    weights_format: Annotated[
        str, _option("fp16, bf16, fp8, int8, int4 or file (as the files have them, else fp16)", "KIND")
    ] = "file",
    draft_weights_format: Annotated[
        str | None, _option("the same for the draft model (default: that of --weights-format)", "KIND")
    ] = None,
    batch: Annotated[int, _option("requests at the same time", "N", _REQUESTS)] = 1,
    context: Annotated[
        int | None, _option(f"tokens of each, prompt and answer (default: {DEFAULT_CONTEXT})", "N", _REQUESTS)
    ] = None,
    acceptance: Annotated[
        str, _option("chance that a draft token stands; several with commas between", "A", _REQUESTS)
    ] = "0.7",
    k: Annotated[int | None, _option("draft tokens to reserve memory for (default: the best)", "N", _REQUESTS)] = None,
    max_k: Annotated[int, _option("the longest draft to look at", "N", _REQUESTS)] = 16,
    memory: Annotated[str | None, _option("what there is, as in 24GB (default: the device's)", "SIZE", _DEVICE)] = None,
    device: Annotated[
        str | None, _option("a GPU by its datasheet: h100, a100, l4, rtx4090 ...", "NAME", _DEVICE)
    ] = None,
    bandwidth: Annotated[float | None, _option("memory bandwidth in GB/s", "GB/s", _DEVICE)] = None,
    peak: Annotated[float | None, _option("peak of dense products in TFLOP/s", "TFLOP/s", _DEVICE)] = None,
    plot: Annotated[Path | None, _option("a PNG with speed-ups over k and batch size", "FILE", _OUT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object", rich_help_panel=_OUT)] = False,
) -> None:
    """Reckon memory and speed-up of speculation from configurations alone: nothing is loaded or downloaded.

    Without a device this machine is measured (a second). docs/planning.md says what each figure means.
    """
    rates = _rates(acceptance)
    _within("--batch", batch, 1, _MOST_BATCH)
    _within("--max-k", max_k, 1, 64)
    if k is not None:
        _within("--k", k, 0, 64)
    if plot is not None:
        _check_plot(plot)
    memory_bytes = None if memory is None else parse_bytes(memory)
    target = model_sizes(model, weights_format, "--weights-format")
    # What was said of the target holds for the draft model, unless something was said of that.
    own_format = draft_weights_format or weights_format
    small = None if draft is None else model_sizes(draft, own_format, "--draft-weights-format")
    if draft is None and draft_weights_format is not None:
        raise InputError("--draft-weights-format is for a --draft MODEL, and none is named")
    tokens = min(DEFAULT_CONTEXT, target.config.context_length) if context is None else context
    if not 1 <= tokens <= target.config.context_length:
        raise InputError(f"--context is {tokens}; {target.name} has 1 to {target.config.context_length} tokens")
    machine = choose(device, bandwidth, peak)
    batches = sorted({*_BATCHES, batch})
    estimates = [
        estimate(
            target,
            drafter,
            machine,
            acceptance=rate,
            batch=batch,
            context=tokens,
            most_drafts=max_k,
            batches=batches,
        )
        for rate in rates
        for drafter in drafters(target, small)
    ]
    reserved = max(found.best.drafts for found in estimates) if k is None else k
    report = Report(
        BatchSizes(target, small, tokens, reserved),
        batch,
        machine,
        machine.memory_bytes if memory_bytes is None else memory_bytes,
        estimates,
        _notes(target, small, tokens, machine, estimates),
    )
    if plot is not None:
        draw(report, plot)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        report.print()


def _notes(
    target: ModelSizes, draft: ModelSizes | None, context: int, machine: Machine, estimates: list[Estimate]
) -> list[str]:
    """What the figures do not say by themselves."""
    found = [f"{model.name}: {model.note}" for model in (target, draft) if model is not None and model.note]
    if draft is None:
        found.append("without --draft the drafters are assumed: one that reads no weights, and shares of the target")
    else:
        sizes = target.config.vocab_size, draft.config.vocab_size
        if sizes[0] != sizes[1]:
            found.append(
                f"vocabularies differ ({sizes[0]:,} and {sizes[1]:,} rows): the draft model needs the target's "
                "tokenizer; padding beside it does not matter"
            )
        if draft.config.context_length < context:
            found.append(f"the draft model's context is {draft.config.context_length:,} tokens, less than {context:,}")
    if machine.measured:
        found.append("this machine's peak is that of small integers; matrices of floats compute more slowly")
    return found


def _rates(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= rate <= 1 for rate in found) or len(found) > 8:
        raise InputError(f"--acceptance {text!r} must be numbers from 0 to 1 with commas between, as in 0.6,0.7,0.8")
    return list(dict.fromkeys(found))


def _within(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InputError(f"{flag} is {value}; it must lie in {low} to {high}")


def _check_plot(file: Path) -> None:
    try:
        __import__("matplotlib")
    except ImportError:
        raise InputError("plan --plot needs matplotlib: pip install 'pilotfish[bench]'") from None
    if file.suffix.lower() != ".png" or not file.parent.is_dir():
        raise InputError(f"--plot {file} must be a .png file in a folder that exists")
