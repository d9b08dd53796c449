"""The drafters of an engine: who drafts for whom, and that none of them can hurt."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pilotfish.drafters.base import Drafter, DraftRequest, Speculation
from pilotfish.errors import RequestError
from pilotfish.history import History
from pilotfish.node_rows import cut_illegal
from pilotfish.tree import DraftTree

logger = logging.getLogger("pilotfish")

_OWN = "own"  # the key of the engine's own drafter


@dataclass(frozen=True)
class Ask:
    """A request that may be drafted for in this step, and what its drafts have to respect."""

    request: DraftRequest
    history: History | None
    exact_law: bool  # a ratio rule verifies it


class Drafting:
    """Requests choose their drafter; those of the same kind share one. A drafter that fails is parked."""

    def __init__(self, own: Drafter | None, vocab_size: int) -> None:
        self.failures = 0
        self._vocab_size = vocab_size
        self._drafters: dict[Hashable, Drafter | None] = {_OWN: own}
        self._parked: set[Hashable] = set()
        self._keys: dict[int, Hashable] = {}

    def key(self, speculation: Speculation | None) -> Hashable:
        """What stands for the drafter of this speculation, None: the engine's own. Raises InputError if it has none."""
        if speculation is None:
            return _OWN
        key = speculation.method, tuple(sorted(speculation.options.items()))
        if key not in self._drafters:
            self._drafters[key] = speculation.make()
        return key

    def begin(self, id: int, key: Hashable) -> None:
        """A request is drafted for by the drafter of `key`."""
        self._keys[id] = key

    def may_draft(self, id: int) -> bool:
        key = self._keys[id]
        return self._drafters[key] is not None and key not in self._parked

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """A legal tree for every ask. A drafter can fail, a request can not: it then has none."""
        trees = [DraftTree.empty() for _ in asks]
        groups: dict[Hashable, list[int]] = {}
        for index, ask in enumerate(asks):
            groups.setdefault(self._keys[ask.request.id], []).append(index)
        for key, indices in groups.items():
            drafter = self._drafters[key]
            assert drafter is not None
            try:
                proposed = drafter.propose([asks[index].request for index in indices])
                for index, tree in zip(indices, proposed, strict=True):
                    self._check(tree, asks[index].request)
                    trees[index] = tree
            except Exception as error:
                self.failures += 1
                self._parked.add(key)
                logger.warning("drafter %s failed and is parked: %s: %s", drafter.name, type(error).__name__, error)
                for index in indices:
                    trees[index] = DraftTree.empty()
        return [_legal(ask, tree) for ask, tree in zip(asks, trees, strict=True)]

    def end(self, id: int) -> None:
        """The request is over."""
        drafter = self._drafters[self._keys.pop(id)]
        if drafter is None:
            return
        try:
            drafter.end(id)
        except Exception as error:
            logger.warning("drafter %s could not end request %d: %s", drafter.name, id, error)

    def _check(self, tree: DraftTree, request: DraftRequest) -> None:
        tree.check(self._vocab_size)
        if len(tree) > request.budget or tree.depths().max(initial=0) > request.max_depth:
            raise ValueError(f"a tree of {len(tree)} nodes exceeds its budget of {request.budget}")


def _legal(ask: Ask, tree: DraftTree) -> DraftTree:
    if ask.history is None:
        return tree
    try:
        return cut_illegal(tree, ask.history, ask.exact_law)
    except RequestError:  # a grammar at its limits, which the request's own row will tell
        return DraftTree.empty()
