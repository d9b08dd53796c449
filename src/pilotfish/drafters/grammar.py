"""Drafts what a grammar forces: the tokens of structured output that leave the model no choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pilotfish.drafters.base import Drafter, DraftRequest, Option
from pilotfish.tree import DraftTree


class GrammarDrafter:
    """Proposes the forced tokens of requests that have some, and leaves the others to another drafter."""

    name = "grammar"
    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, other: Drafter | None = None) -> None:
        self._other = other

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """One tree for each request. `other` is asked once, for all that it is to draft for, or not at all."""
        trees = [
            DraftTree.chain(request.forced[: min(request.budget, request.max_depth)], self.name)
            if request.forced
            else DraftTree.empty()
            for request in requests
        ]
        free = [index for index, request in enumerate(requests) if not request.forced]
        if self._other is not None and free:
            proposed = self._other.propose([requests[index] for index in free])
            for index, tree in zip(free, proposed, strict=True):
                trees[index] = tree
        return trees

    def end(self, id: int) -> None:
        if self._other is not None:
            self._other.end(id)
