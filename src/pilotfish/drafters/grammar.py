"""Drafts what a grammar forces: the tokens of structured output that leave the model no choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pilotfish.drafters.base import DraftRequest, Host, Price
from pilotfish.drafters.speculation import Option
from pilotfish.tree import DraftTree

CONFIDENCE = 0.99  # the grammar's spelling of a forced text is not always the model's


class GrammarDrafter:
    """Proposes the forced tokens of requests that have some."""

    name = "grammar"
    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    @classmethod
    def make(cls, host: Host | None) -> GrammarDrafter:
        return cls()

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        return [self._propose(request) for request in requests]

    def end(self, id: int) -> None:
        pass

    def _propose(self, request: DraftRequest) -> DraftTree:
        if request.drafted or not request.forced:
            return DraftTree.empty()
        forced = request.forced[: min(request.budget, request.max_depth)]
        return DraftTree.chain(forced, self.name, [CONFIDENCE] * len(forced))
