"""The command `bench decode`: one workload at one temperature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.arguments import AsJson, Model, Threads, Weights
from pilotfish.bench.arguments import PROMPTS_HELP, Classes, Control, MaxTokens, PerClass, Repeat
from pilotfish.bench.report import progress, show
from pilotfish.bench.turns import FEWEST_TOKENS, contestants, parse_settings, summarise_by_class, take_turns, warm_up
from pilotfish.bench.workload import machine, read_prompts
from pilotfish.files import read_text
from pilotfish.llm import LLM
from pilotfish.params import SamplingParams, StructuredOutput


def decode(
    model: Model,
    prompts: Annotated[Path, typer.Option(metavar="PATH", help=PROMPTS_HELP)],
    speculation: Annotated[list[str] | None, typer.Option(metavar="S", help="may be repeated; off always runs")] = None,
    classes: Classes = None,
    per_class: PerClass = None,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(metavar="T")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--until-eos", help="all answers of full length, or where the model ends them")
    ] = True,
    json_schema: Annotated[Path | None, typer.Option(metavar="FILE", help="answers are JSON of this schema")] = None,
    repeat: Repeat = 1,
    control: Control = False,
    weights: Weights = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Decode a workload with each speculation in turn and compare speed and text with speculation off."""
    settings = parse_settings(speculation, control)
    samples = read_prompts(prompts, classes, per_class)
    structured = (
        None if json_schema is None else StructuredOutput(json_schema=read_text(str(json_schema), "JSON schema"))
    )
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=ignore_eos, structured=structured
    )
    llm = LLM(model, threads=threads, weights=weights)
    warm_up(llm, settings, samples[0], params)
    with progress(len(samples) * len(settings) * repeat) as done:
        rivals = contestants(llm, settings, params)
        turns = take_turns(samples, rivals, repeat, done, min(FEWEST_TOKENS, max_tokens))
    report = summarise_by_class(turns)
    if as_json:
        print(json.dumps({"settings": report, "model": llm.config.name or model, "machine": machine(llm)}))
        return
    show(f"{llm.config.name or model}: decoding, {max_tokens} tokens a prompt", report)
    if turns.short:
        print(f"{len(turns.short)} prompts are not counted: their answers were too short")
    print(machine(llm))
