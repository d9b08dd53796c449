"""The command `verify`: does speculation change a bit on this machine with this model? And what does it accept?"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pilotfish.arguments import AsJson, Context, Model, Threads, Weights
from pilotfish.bench import Sample, machine, read_prompts
from pilotfish.drafters.speculation import parse_speculation
from pilotfish.errors import PilotfishError
from pilotfish.llm import LLM
from pilotfish.params import SamplingParams
from pilotfish.request import Request
from pilotfish.sampling import Logits

# Short tasks whose answers range from free text, where drafts are wrong, to copies, where they are right.
PROMPTS = (
    ("chat", "What should I see in a harbour town on a rainy afternoon?"),
    ("chat", "Explain in three sentences why ice floats on water."),
    ("story", "Write the beginning of a story about a lighthouse keeper who finds a letter."),
    ("code", "Write a Python function that returns the longest common prefix of a list of strings."),
    ("code", "Write a shell script that counts the lines of all .txt files in a folder, file by file."),
    (
        "edit",
        "Repeat this text and change every 'cat' to 'dog': The cat sat by the door. The cat watched the rain. "
        "When the rain stopped, the cat went out and the other cat came in.",
    ),
    (
        "edit",
        "Add type hints to this function and give it back whole:\n\ndef area(width, height):\n    if width < 0 or "
        "height < 0:\n        raise ValueError('sizes must not be negative')\n    return width * height\n",
    ),
    ("extract", "Give as JSON with the keys name, age and city: Mara Lind, 34, has lived in Bergen since 2019."),
    ("translate", "Translate into French: The boats come back in the evening, and the children count them."),
    (
        "summary",
        "Sum up in one sentence: The bakery opens at six. By seven the bread is gone, and by eight the owner sits in "
        "the yard with a cup of coffee and reads yesterday's newspaper, for today's has not yet come.",
    ),
    ("list", "Count from one to thirty in words, one number a line."),
    ("maths", "A train takes 45 minutes for 60 kilometres. How fast is it on average? Show each step."),
)
LIKELIEST = 5  # tokens that the report of a difference shows
POSITIONS = 6  # of drafts whose acceptance is told apart
BATCH = {"max_num_seqs": 8, "token_budget": 40}  # small, so that prompts come in chunks beside generating requests
ADJUSTED: dict[str, Any] = {
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_tokens": 8,
}


@dataclass(frozen=True)
class Job:
    """A prompt with its tokens and the seed of its answers."""

    sample: Sample
    tokens: list[int]
    seed: int


@dataclass
class Trace:
    """An answer, and a digest of the logits [vocab] behind each of its tokens, as the model gave them."""

    request: Request
    digests: list[bytes] = field(default_factory=list)


def verify(
    model: Model,
    speculation: Annotated[list[str] | None, typer.Option(metavar="S", help="what to check; may be repeated")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help='JSON lines {"class": ..., "prompt": ...} instead of our own')
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="T", help="may be repeated (default: 0, 0.8)")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="tokens of each answer")] = 64,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="of the first prompt; the next has N + 1")] = 0,
    context: Context = None,
    weights: Weights = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Compare tokens and logits with and without speculation, bit by bit, and measure what is accepted.

    Without speculation each prompt runs alone. With it each runs alone again, then all run together with their prompts
    in chunks. Every temperature is also tried with filters and penalties. The exit code is 1 if anything differs.
    """
    chosen = list(dict.fromkeys(speculation or ["ngram"]))
    for text in chosen:
        parse_speculation(text)  # before the model is loaded
    samples = read_prompts(prompts) if prompts else [Sample(kind, prompt) for kind, prompt in PROMPTS]
    settings = _settings(temperature or [0.0, 0.8], max_tokens)
    llm = LLM(model, threads=threads, context=context, weights=weights)
    jobs = [
        Job(sample, llm.encode(sample.prompt, chat=llm.tokenizer.has_chat_template), seed + i)
        for i, sample in enumerate(samples)
    ]
    runs: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("answers", total=len(settings) * (1 + 2 * len(chosen)) * len(jobs))

        def run(text: str, jobs: Sequence[Job], params: SamplingParams, **options: int) -> list[Trace]:
            traces = _run(llm, text, jobs, params, **options)
            progress.advance(task, len(jobs))
            return traces

        for name, params in settings.items():
            plain = [run("off", [job], params)[0] for job in jobs]
            for text in chosen:
                alone = [run(text, [job], params)[0] for job in jobs]
                together = run(text, jobs, params, **BATCH)
                found = []
                for how, traces in (("alone", alone), ("in a batch", together)):
                    for job, off, on in zip(jobs, plain, traces, strict=True):
                        where = {"speculation": text, "setting": name, "run": how, "prompt": job.sample.prompt}
                        found += [where | difference for difference in _differences(llm, off, on)]
                differences += found
                runs.append(
                    {"speculation": text, "setting": name, **_counts([*alone, *together]), "differences": len(found)}
                )
    result = {"model": llm.config.name or model, "machine": machine(llm), "runs": runs, "differences": differences}
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        Console().print(_table(f"{result['model']}: the same answers with speculation on", runs))
        for difference in differences[:1]:
            print(_described(difference))
        print(machine(llm))
    if differences:
        raise PilotfishError(f"{len(differences)} answers differ with speculation on; none may")
    if not as_json:
        print("every token is the same, and every bit of the logits behind it")


def _settings(temperatures: Sequence[float], max_tokens: int) -> dict[str, SamplingParams]:
    settings = {}
    for temperature in temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, logprobs=LIKELIEST)
        adjusted = {**ADJUSTED, "min_tokens": min(ADJUSTED["min_tokens"], max_tokens)}
        settings[f"T={temperature:g}"] = params
        settings[f"T={temperature:g} adjusted"] = replace(params, **adjusted)
    return settings


def _run(llm: LLM, speculation: str, jobs: Sequence[Job], params: SamplingParams, **options: int) -> list[Trace]:
    """All jobs in one engine."""
    traces: dict[int, Trace] = {}

    def watch(request: Request, rows: Sequence[Logits]) -> None:
        traces[request.id].digests += [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]

    engine = llm.engine(speculation, answers=True, watch=watch, **options)
    for job in jobs:
        request = engine.add(job.tokens, replace(params, seed=job.seed))[0]
        traces[request.id] = Trace(request)
    for _ in engine.run():
        pass
    return list(traces.values())


def _differences(llm: LLM, off: Trace, on: Trace) -> list[dict[str, Any]]:
    """The first place where two runs of a prompt differ, in tokens or in logits: none or one."""
    plain, drafted = off.request.output, on.request.output
    pairs = zip(zip(plain, off.digests, strict=True), zip(drafted, on.digests, strict=True), strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(drafted)))
    if at == len(plain) == len(drafted):
        return []
    sides = {}
    for side, trace in (("off", off), ("on", on)):
        output = trace.request.output
        entry = trace.request.logprobs[at] if at < len(output) else None
        sides[side] = {
            "before": llm.tokenizer.decode(output[:at], skip_special=False),
            "token": None if entry is None else _named(llm, entry.token, entry.logprob),
            "likeliest": [] if entry is None else [_named(llm, *other) for other in entry.top],
        }
    only_logits = at < len(plain) and at < len(drafted) and plain[at] == drafted[at]
    return [{"position": at, "what": "logits" if only_logits else "token", **sides}]


def _named(llm: LLM, token: int, logprob: float) -> list[Any]:
    return [token, llm.tokenizer.decode([token], skip_special=False), round(logprob, 6)]


def _counts(traces: Sequence[Trace]) -> dict[str, Any]:
    counts = [trace.request.counts for trace in traces]
    drafted, accepted = [0] * POSITIONS, [0] * POSITIONS
    for one in counts:
        for position in range(min(POSITIONS, len(one.drafted_at))):
            drafted[position] += one.drafted_at[position]
            accepted[position] += one.accepted_at[position]
    steps = sum(one.target_steps for one in counts)
    tokens = sum(len(trace.digests) for trace in traces)
    return {
        "answers": len(traces),
        "tokens": tokens,
        "acceptance_length": round(tokens / steps, 3),
        "acceptance_by_position": [round(a / d, 3) if d else None for a, d in zip(accepted, drafted, strict=True)],
    }


def _table(title: str, runs: Sequence[dict[str, Any]]) -> Table:
    caption = "adjusted: with filters and penalties; accepted: how often drafts at positions 1, 2, ... were, in %"
    table = Table(title=title, caption=caption)
    for heading in ("speculation", "setting"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens", "differ", "acceptance\nlength"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("accepted", no_wrap=True)
    for run in runs:
        rates = " ".join("--" if rate is None else f"{100 * rate:2.0f}" for rate in run["acceptance_by_position"])
        figures = str(run["tokens"]), str(run["differences"] or "none"), f"{run['acceptance_length']:.2f}"
        table.add_row(run["speculation"], run["setting"], *figures, rates)
    return table


def _described(difference: dict[str, Any]) -> str:
    lines = [
        f"first difference: the {difference['what']} at position {difference['position']} of an answer "
        f"({difference['speculation']}, {difference['setting']}, {difference['run']})",
        f"  prompt: {difference['prompt']!r}",
    ]
    for side in ("off", "on"):
        found = difference[side]
        chosen = "the end" if found["token"] is None else f"{found['token'][1]!r} (id {found['token'][0]})"
        lines.append(f"  {side}: after {found['before'][-120:]!r} came {chosen}")
        lines += [f"    {logprob:12.6f}  {text!r}" for _, text, logprob in found["likeliest"]]
    return "\n".join(lines)
