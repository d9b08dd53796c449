"""What is put before the controller in a step, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.control.cost import Load


@dataclass(frozen=True)
class Offer:
    """The drafts of one request that could be verified."""

    id: int
    survivals: Sequence[float]  # of each node: the chance to be emitted; a child's is no higher than its parent's
    context: int  # tokens that each node attends to
    whole: bool = False  # all of them or none


@dataclass(frozen=True)
class Candidate:
    """A request that a drafter with passes could draft for."""

    id: int
    drafter: str
    most: int  # drafts
    backlog: int  # rows that come first
    remaining: int  # tokens the request may still have
    context: int
    gain: float  # tokens that drafts it has already are expected to bring


@dataclass(frozen=True)
class Choice:
    """Which of the candidates to draft for, and what time is worth in this step."""

    ids: frozenset[int]
    tokens_per_ms: float
    pass_ms: float
    load: Load  # of the target's pass without drafts of theirs


@dataclass(frozen=True)
class StepShare:
    """One request's part of a step's times."""

    draft_ms: float
    verify_ms: float
    step_ms: float
    first_ms: float  # of the step's first token without drafts, prompts beside it included
    more_ms: float  # of each further token
