"""The command `bench suite`: all classes of prompts and temperatures for one model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pilotfish.arguments import AsJson, Model, Threads, Weights
from pilotfish.bench.arguments import PROMPTS_HELP, Classes, Control, MaxTokens, PerClass, Repeat
from pilotfish.bench.neighbours import Neighbours
from pilotfish.bench.report import progress, show
from pilotfish.bench.turns import (
    FEWEST_TOKENS,
    OFF,
    Result,
    Turns,
    as_entry,
    contestants,
    parse_settings,
    summarise,
    summarise_by_class,
    take_turns,
    warm_up,
)
from pilotfish.bench.workload import machine, read_prompts
from pilotfish.errors import InputError
from pilotfish.llm import LLM
from pilotfish.params import SamplingParams

PROMPTS = Path("benchmarks/prompts")
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class _Placed:
    """A prompt's result and its temperature."""

    temperature: float
    result: Result


def suite(
    model: Model,
    prompts: Annotated[Path, typer.Option(metavar="PATH", help=PROMPTS_HELP)] = PROMPTS,
    speculation: Annotated[
        list[str] | None, typer.Option(metavar="S", help="may be repeated (default: auto); off always runs")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="T", help="may be repeated (default: 0, 0.8)")
    ] = None,
    classes: Classes = None,
    per_class: PerClass = None,
    max_tokens: MaxTokens = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="go on after the end of an answer, where models repeat themselves")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="of every answer")] = 0,
    repeat: Repeat = 3,
    control: Control = False,
    weights: Weights = None,
    threads: Threads = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print tables in Markdown")] = False,
    as_json: AsJson = False,
) -> None:
    """Decode all classes of prompts at several temperatures and compare each speculation with speculation off.

    Answers end where the model ends them: what comes after is repetition, which flatters speculation. Ratios are
    medians of repeated runs in alternating order; `over off` compares decoding, `whole request` includes the prompt.
    """
    if as_json and markdown:
        raise InputError("--json and --markdown exclude each other")
    settings = parse_settings(speculation or ["auto"], control)
    samples = read_prompts(prompts, classes, per_class)
    every = {
        value: SamplingParams(max_tokens=max_tokens, temperature=value, seed=seed, ignore_eos=ignore_eos)
        for value in dict.fromkeys(temperature or TEMPERATURES)
    }
    llm = LLM(model, threads=threads, weights=weights)
    warm_up(llm, settings, samples[0], next(iter(every.values())))
    turns: dict[float, Turns] = {}
    neighbours = Neighbours()
    with progress(len(every) * len(samples) * len(settings) * repeat, lines=True) as done:
        for value, params in every.items():

            def tell(count: int, kind: str, value: float = value) -> None:
                done(count, f"T={value:g}, {kind}")

            rivals = contestants(llm, settings, params)
            turns[value] = take_turns(samples, rivals, repeat, tell, min(FEWEST_TOKENS, max_tokens))
    placed = [_Placed(value, result) for value, found in turns.items() for result in found.results]
    report: dict[str, Any] = {
        "model": llm.config.name or model,
        "machine": machine(llm),
        "other_cores": neighbours.cores(),
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "repeat": repeat,
        "temperatures": {f"{value:g}": _part(found) for value, found in turns.items()},
        "worst": {text: _worst(placed, text) for text in settings if text != OFF},
        "results": [{"temperature": one.temperature, **as_entry(one.result)} for one in placed],
    }
    if as_json:
        print(json.dumps(report))
        return
    for name, part in report["temperatures"].items():
        rows = {text: {**kinds, "all": part["all"][text]} for text, kinds in part["settings"].items()}
        show(f"{report['model']}: decoding at temperature {name}, up to {max_tokens} tokens a prompt", rows, markdown)
        if part["short"]:
            print(f"not counted, as the answers were too short: {_words(part['short'])}")
    for text, worst in report["worst"].items():
        places = (f"worst {what} {row['over_off']:.2f} ({_place(row)})" for what, row in worst.items())
        print(f"{text}: {', '.join(places)}")
    others = "" if report["other_cores"] is None else f"; other work kept {report['other_cores']} cores busy"
    print(f"{report['machine']}{others}")


def _part(turns: Turns) -> dict[str, Any]:
    """What is reported of one temperature."""
    return {
        "settings": summarise_by_class(turns),
        "all": {
            text: summarise([result for results in kinds.values() for result in results])
            for text, kinds in turns.groups().items()
        },
        "short": dict(Counter(sample.kind for sample in turns.short)),
    }


def _worst(placed: list[_Placed], text: str) -> dict[str, dict[str, Any]]:
    """The class, at its temperature, and the prompt where a setting gains least."""
    groups: dict[tuple[float, str], list[Result]] = {}
    for one in placed:
        if one.result.contestant == text:
            groups.setdefault((one.temperature, one.result.sample.kind), []).append(one.result)
    rows = [{"class": kind, "temperature": value, **summarise(results)} for (value, kind), results in groups.items()]
    in_class = min(rows, key=lambda row: row["over_off"])
    prompt = min(rows, key=lambda row: row["worst_over_off"])
    return {
        "class": {key: in_class[key] for key in ("over_off", "class", "temperature")},
        "prompt": {
            "over_off": prompt["worst_over_off"],
            "class": prompt["class"],
            "temperature": prompt["temperature"],
            "prompt": prompt["worst_prompt"],
        },
    }


def _place(row: dict[str, Any]) -> str:
    words = f"{row['class']}, T={row['temperature']:g}"
    return f"{words}: {row['prompt']}" if "prompt" in row else words


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} of {kind}" for kind, count in counts.items())
