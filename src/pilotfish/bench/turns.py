"""Contestants in turns over the prompts of a workload, and what they bring over speculation off.

What is compared runs one after the other and in alternating order, so that drift of the machine hits all sides: a
prompt's ratio is the median over turns of the ratios within a turn, a class's the median over its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pilotfish.bench.workload import Sample
from pilotfish.drafters.speculation import Speculation, parse_speculation
from pilotfish.errors import PilotfishError
from pilotfish.llm import LLM
from pilotfish.params import SamplingParams

OFF, CONTROL = "off", "off again"
FEWEST_TOKENS = 16  # the speed of a shorter answer is noise
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """One answer."""

    tokens: tuple[int, ...]
    target_steps: int
    tokens_per_second: float  # of decoding; 0 when the step that computed the prompt gave the whole answer
    request_ms: float  # with the time of the prompt


Contestant = Callable[[Sample], Run]


@dataclass(frozen=True)
class Result:
    """A prompt with one contestant: medians over turns, ratios over what `off` did in the same turn."""

    sample: Sample
    contestant: str
    tokens: int  # of the answer
    tokens_per_second: float
    over_off: float
    request_over_off: float  # of whole requests
    acceptance_length: float
    equal: bool  # in every turn the tokens were those of `off`


@dataclass(frozen=True)
class Turns:
    """All that was measured, prompt by prompt, and the prompts whose answers were too short for it."""

    results: list[Result]
    short: list[Sample]

    def groups(self) -> dict[str, dict[str, list[Result]]]:
        """Results by contestant and class."""
        found: dict[str, dict[str, list[Result]]] = {}
        for result in self.results:
            found.setdefault(result.contestant, {}).setdefault(result.sample.kind, []).append(result)
        return found


def parse_settings(speculation: Sequence[str] | None, control: bool = False) -> dict[str, Speculation]:
    """What is compared: off first, off again as a control, then what was asked for. Raises InputError."""
    found = {text: parse_speculation(text) for text in dict.fromkeys([OFF, *(speculation or ())])}
    return {OFF: found.pop(OFF), **({CONTROL: Speculation()} if control else {}), **found}


def contestants(llm: LLM, settings: Mapping[str, Speculation], params: SamplingParams) -> dict[str, Contestant]:
    """One for each setting."""

    def of(speculation: Speculation) -> Contestant:
        return lambda sample: run(llm, sample, speculation, params)

    return {text: of(speculation) for text, speculation in settings.items()}


def run(llm: LLM, sample: Sample, speculation: Speculation, params: SamplingParams) -> Run:
    """One answer, by an engine of its own: without cached prefixes, and without drafts learnt from earlier answers."""
    answer = llm.generate(sample.prompt, params, chat=True, speculation=speculation)[0]
    timings = answer.timings
    return Run(
        tokens=answer.tokens,
        target_steps=answer.speculation["target_steps"],
        tokens_per_second=timings["tokens_per_second"],
        request_ms=timings["prefill_ms"] + timings["decode_ms"],
    )


def warm_up(llm: LLM, settings: Mapping[str, Speculation], sample: Sample, params: SamplingParams) -> None:
    """Run each setting once, unmeasured: drafters load, costs are measured, caches fill."""
    few = replace(params, max_tokens=min(params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS))
    for speculation in settings.values():
        run(llm, sample, speculation, few)


def take_turns(
    samples: Sequence[Sample],
    contestants: Mapping[str, Contestant],
    repeat: int,
    done: Callable[[int, str], None],
    fewest_tokens: int = FEWEST_TOKENS,
) -> Turns:
    """Give every prompt to each contestant, `off` among them, `repeat` times.

    `done` is told of runs that are over, how many and of which class. Raises PilotfishError when all answers of `off`
    are too short.
    """
    results: list[Result] = []
    short: list[Sample] = []
    order = list(contestants)
    for sample in samples:
        turns: list[dict[str, Run]] = []
        for turn in range(repeat):
            order.reverse()  # whoever always came first would always meet colder caches
            runs: dict[str, Run] = {}
            for name in order:
                runs[name] = contestants[name](sample)
                done(1, sample.kind)
            turns.append(runs)
            if len(runs[OFF].tokens) < fewest_tokens or any(run.tokens_per_second == 0 for run in runs.values()):
                short.append(sample)
                done((repeat - 1 - turn) * len(contestants), sample.kind)
                break
        else:
            results += [_result(sample, name, turns) for name in contestants]
    if not results:
        raise PilotfishError(f"every answer had less than {fewest_tokens} tokens, whose speed says nothing")
    return Turns(results, short)


def _result(sample: Sample, name: str, turns: Sequence[Mapping[str, Run]]) -> Result:
    runs = [turn[name] for turn in turns]
    off = [turn[OFF] for turn in turns]
    return Result(
        sample=sample,
        contestant=name,
        tokens=len(runs[0].tokens),
        tokens_per_second=median(run.tokens_per_second for run in runs),
        over_off=median(run.tokens_per_second / plain.tokens_per_second for run, plain in zip(runs, off, strict=True)),
        request_over_off=median(plain.request_ms / run.request_ms for run, plain in zip(runs, off, strict=True)),
        acceptance_length=median(len(run.tokens) / run.target_steps for run in runs),
        equal=all(run.tokens == off[0].tokens for run in runs),
    )


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """One row of a report, of one contestant. Speeds and ratios are medians over prompts."""
    worst = min(results, key=lambda result: result.over_off)
    return {
        "tokens_per_second": round(median(result.tokens_per_second for result in results), 2),
        "over_off": round(median(result.over_off for result in results), 3),
        "worst_over_off": round(worst.over_off, 3),
        "worst_prompt": worst.sample.beginning,
        "request_over_off": round(median(result.request_over_off for result in results), 3),
        "acceptance_length": round(sum(result.acceptance_length for result in results) / len(results), 3),
        "equal": all(result.equal for result in results),
        "prompts": len(results),
    }


def summarise_by_class(turns: Turns) -> dict[str, dict[str, dict[str, Any]]]:
    """Contestant, class, row."""
    return {
        name: {kind: summarise(results) for kind, results in kinds.items()} for name, kinds in turns.groups().items()
    }


def as_entry(result: Result) -> dict[str, Any]:
    """One prompt of a report."""
    return {
        "class": result.sample.kind,
        "prompt": result.sample.beginning,
        "speculation": result.contestant,
        "tokens": result.tokens,
        "tokens_per_second": round(result.tokens_per_second, 2),
        "over_off": round(result.over_off, 3),
        "request_over_off": round(result.request_over_off, 3),
        "acceptance_length": round(result.acceptance_length, 3),
        "equal": result.equal,
    }
