"""Requests: what a caller asks for, and what the engine knows about it so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr as short_repr
from typing import Literal

from pilotfish.errors import InputError
from pilotfish.metrics import Timings

FinishReason = Literal["stop", "length"]


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(ok: bool, name: str, value: object, legal: str) -> None:
    if not ok:
        raise InputError(f"{name} is {short_repr(value)}; it must be {legal}")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end. Raises InputError on a value out of range.

    Filters apply in the order temperature, min_p, top_k, top_p (sampling.support says exactly how).
    """

    max_tokens: int | None = 128  # None: until the context is full
    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # keep this many tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that hold this much probability together
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest
    seed: int | None = None  # None: the engine draws one and reports it
    stop: Sequence[str] = ()  # kept as a tuple
    stop_token_ids: Sequence[int] = ()  # kept as a tuple
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        count, seed = self.max_tokens, self.seed
        _require(count is None or _is_int(count, 1), "max_tokens", count, "a whole number from 1, or None for no limit")
        temperature, top_p, min_p = self.temperature, self.top_p, self.min_p
        _require(
            _is_number(temperature) and 0 <= temperature <= 100, "temperature", temperature, "a number in [0, 100]"
        )
        _require(_is_int(self.top_k, 0), "top_k", self.top_k, "a whole number from 1, or 0 to keep all tokens")
        _require(_is_number(top_p) and 0 < top_p <= 1, "top_p", top_p, "a number in (0, 1]")
        _require(_is_number(min_p) and 0 <= min_p <= 1, "min_p", min_p, "a number in [0, 1]")
        _require(seed is None or _is_int(seed, 0, 2**64 - 1), "seed", seed, "a whole number in [0, 2**64), or None")
        texts, ids = self.stop, self.stop_token_ids
        texts_fit = isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts)
        _require(texts_fit, "stop", texts, "a list of non-empty strings")
        ids_fit = isinstance(ids, list | tuple) and all(_is_int(token, 0) for token in ids)
        _require(ids_fit, "stop_token_ids", ids, "a list of token ids, whole numbers from 0")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        # Tuples can not change under a request, and make the parameters hashable.
        object.__setattr__(self, "stop", tuple(texts))
        object.__setattr__(self, "stop_token_ids", tuple(ids))


@dataclass
class DraftCounts:
    """What became of the draft tokens of one drafter."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class SpeculationCounts:
    """What speculation did for one request; the engine calls `add` once for each verdict."""

    target_steps: int = 0  # target passes that emitted tokens, plain decoding included
    by_drafter: dict[str, DraftCounts] = field(default_factory=dict)

    def add(self, drafter: str, drafted: int, accepted: int) -> None:
        """Count one verdict; a step without drafts counts as a step only."""
        self.target_steps += 1
        if drafted:
            counts = self.by_drafter.setdefault(drafter, DraftCounts())
            counts.drafted += drafted
            counts.accepted += accepted

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
    counts: SpeculationCounts = field(default_factory=SpeculationCounts, init=False)
    timings: Timings = field(default_factory=Timings, init=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt is empty; it must hold at least one token")
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]
