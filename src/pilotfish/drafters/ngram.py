"""Drafts what followed the last n tokens when they occurred before (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pilotfish.drafters.base import DraftRequest, Host, Price
from pilotfish.drafters.reliability import Reliability
from pilotfish.drafters.speculation import Option
from pilotfish.errors import InputError
from pilotfish.tree import DraftTree


@dataclass
class _Request:
    # An n-gram of every length is keyed by its tokens; the value is where the token after its latest occurrence stands.
    index: dict[tuple[int, ...], int] = field(default_factory=dict)
    done: int = 0  # tokens that are in it
    reliability: Reliability = field(default_factory=Reliability)
    guess: tuple[int, int, list[int]] | None = None  # tokens there were, length of the match, what was drafted


class NgramDrafter:
    """Chains copied from the request's own prompt and output; the longest match wins, and of those the latest.

    Confidences come from how matches of that length have fared in the request; a draft that stands makes it longer.
    """

    name = "ngram"
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "n": Option(4, 1, 16, "longest n-gram that is looked up"),
        "min": Option(None, 1, 16, "shortest n-gram that is looked up; 2 where n allows it"),
    }

    def __init__(self, n: int = 4, min: int | None = None) -> None:
        shortest = (2 if n > 1 else 1) if min is None else min
        if shortest > n:
            raise InputError(f"ngram: min={shortest} must not be greater than n={n}")
        self._lengths = range(n, shortest - 1, -1)
        self._requests: dict[int, _Request] = {}

    @classmethod
    def make(cls, host: Host | None, n: int, min: int | None = None) -> NgramDrafter:
        """Raises InputError when `min` is above `n`."""
        return cls(n, min)

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        return [self._propose(request) for request in requests]

    def end(self, id: int) -> None:
        self._requests.pop(id, None)

    def _propose(self, request: DraftRequest) -> DraftTree:
        tokens, drafted = request.tokens, list(request.drafted)
        kept = self._requests.get(request.id)
        if kept is None:
            kept = self._requests[request.id] = _Request()
        if kept.guess is not None and len(tokens) > kept.guess[0]:
            at, length, guess = kept.guess
            kept.reliability.learn(length, guess, tokens[at:])
            kept.guess = None
        # The n-gram at the very end has no continuation yet and is entered when it has one.
        index = kept.index
        for end in range(kept.done, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    index[tuple(tokens[end - length : end])] = end
        kept.done = len(tokens)
        count = min(request.budget, request.max_depth)
        longest = self._lengths[0]
        context = [*tokens[-longest:], *drafted][-longest:]
        for length in self._lengths:
            start = index.get(tuple(context[-length:])) if length < len(tokens) + len(drafted) else None
            if start is not None:
                # A match that overlaps the end repeats with its period.
                rest = [*tokens[start : start + count], *drafted[: max(0, start + count - len(tokens))]]
                guess = (rest * -(-count // len(rest)))[:count]
                if not drafted:
                    kept.guess = len(tokens), length, guess
                return DraftTree.chain(guess, self.name, kept.reliability.chances[length : length + count])
        return DraftTree.empty()
