"""Requests: what a caller asks for, and what the engine knows about it so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pilotfish.errors import InputError
from pilotfish.metrics import Timings
from pilotfish.params import SamplingParams
from pilotfish.tree import DraftTree

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability under the model itself, and those of the likeliest (id, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class DraftCounts:
    """What became of the draft tokens of one drafter."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class Report:
    """What was decided about the drafts of one request, and what came of it."""

    steps: Counter[str] = field(default_factory=Counter)  # who drafted what was verified, or "plain"
    draft_ms: float = 0.0  # its share of the time that drafters took
    verify_ms: float = 0.0  # its share of what drafts added to the target's passes, as predicted
    step_ms: float = 0.0  # its share of the steps' real time
    plain_ms: float = 0.0  # what its tokens would have taken without drafts, as predicted

    def add(self, other: Report) -> None:
        """Take another request's in."""
        self.steps.update(other.steps)
        self.draft_ms += other.draft_ms
        self.verify_ms += other.verify_ms
        self.step_ms += other.step_ms
        self.plain_ms += other.plain_ms

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in ms, rounded."""
        return {
            "steps": dict(self.steps),
            "draft_ms": round(self.draft_ms, 3),
            "verify_ms": round(self.verify_ms, 3),
            "step_ms": round(self.step_ms, 3),
            "plain_ms": round(self.plain_ms, 3),
        }


@dataclass
class SpeculationCounts:
    """What speculation did for one request; the engine calls `add` once for each verdict."""

    target_steps: int = 0  # target passes that emitted tokens, plain decoding included
    by_drafter: dict[str, DraftCounts] = field(default_factory=dict)
    # By position after the last committed token, the first entry for the first draft: in how many steps a tree reached
    # that deep, and in how many a draft there was accepted.
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Count one verdict: `path` are the accepted nodes; a step without drafts counts as a step only."""
        self.target_steps += 1
        if len(tree) == 0:
            return
        drafters = tree.all_drafters()
        for drafter in drafters:
            self.by_drafter.setdefault(drafter, DraftCounts()).drafted += 1
        for node in path:
            self.by_drafter[drafters[node]].accepted += 1
        depth = int(tree.depths().max())
        for counted, reached in ((self.drafted_at, depth), (self.accepted_at, len(path))):
            counted.extend([0] * (depth - len(counted)))
            for position in range(reached):
                counted[position] += 1

    @property
    def drafted(self) -> int:
        return sum(counts.drafted for counts in self.by_drafter.values())

    @property
    def accepted(self) -> int:
        return sum(counts.accepted for counts in self.by_drafter.values())

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target pass: the accepted drafts and one more. 0 before the first pass."""
        return 1.0 + self.accepted / self.target_steps if self.target_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(eq=False)  # two requests with the same prompt are two requests
class Request:
    """One prompt and its continuation. Only the engine's step changes what the constructor does not take."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int  # params.seed, or what the engine drew in its place
    tokens: list[int] = field(init=False)  # the prompt, then every committed output token
    finish_reason: FinishReason | None = field(default=None, init=False)  # None while it runs
    error: str | None = field(default=None, init=False)  # why it could not go on
    fault: bool = field(default=False, init=False)  # the engine's, not the request's own doing
    cached_tokens: int = field(default=0, init=False)  # of the prompt, whose KV was there already
    logprobs: list[TokenLogprob] = field(default_factory=list, init=False)  # of each output token, where asked for
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list, init=False)  # of each prompt token but the first
    counts: SpeculationCounts = field(default_factory=SpeculationCounts, init=False)
    timings: Timings = field(default_factory=Timings, init=False)
    report: Report | None = field(default=None, init=False)  # what was decided about drafts, when it is over

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt is empty; it must hold at least one token")
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]
