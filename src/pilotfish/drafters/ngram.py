"""Drafts what followed the last n tokens when they occurred before (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pilotfish.drafters.base import DraftRequest, Option
from pilotfish.errors import InputError
from pilotfish.tree import DraftTree

# An n-gram of every length is keyed by its tokens; the value is where the token after its latest occurrence stands.
Index = dict[tuple[int, ...], int]


class NgramDrafter:
    """Chains copied from the request's own prompt and output; the longest match wins, and of those the latest."""

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
        self._indices: dict[int, tuple[Index, int]] = {}  # request -> (index, tokens that are in it)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._propose(request) for request in requests]

    def end(self, id: int) -> None:
        self._indices.pop(id, None)

    def _propose(self, request: DraftRequest) -> DraftTree:
        tokens = request.tokens
        index, done = self._indices.get(request.id, ({}, 0))
        # The n-gram at the very end has no continuation yet, so it is looked up before it is entered.
        for end in range(done, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    index[tuple(tokens[end - length : end])] = end
        self._indices[request.id] = (index, len(tokens))
        count = min(request.budget, request.max_depth)
        for length in self._lengths:
            start = index.get(tuple(tokens[-length:])) if length < len(tokens) else None
            if start is not None:
                # A match that overlaps the end repeats with its period.
                period = len(tokens) - start
                return DraftTree.chain([tokens[start + i % period] for i in range(count)], self.name)
        return DraftTree.empty()
