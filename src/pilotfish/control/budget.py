"""How many draft tokens a request may have in its next step, learnt from what became of its last ones.

A budget doubles while everything is accepted and falls to just above what stood when something is not. Where not even
a single token stands, drafting rests, and for longer each time. No clock is read: a cost model can say more.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 2
LONGEST_REST = 32  # steps


@dataclass
class _State:
    budget: int = FIRST
    rest: int = 0  # steps without drafts that are still to come
    next_rest: int = 1


class BudgetController:
    """Budgets of all requests: always what `fix` said where it did, else between 0 and `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._fixed: dict[int, int] = {}
        self._states: dict[int, _State] = {}

    def fix(self, id: int, budget: int) -> None:
        """Whatever is accepted, this request has this budget."""
        self._fixed[id] = budget

    def fixed(self, id: int) -> int | None:
        return self._fixed.get(id)

    def budget(self, id: int) -> int:
        if id in self._fixed:
            return self._fixed[id]
        state = self._states.get(id, _State())
        return 0 if state.rest else min(state.budget, self.most)

    def observe(self, id: int, drafted: int, accepted: int) -> None:
        """Take in one step of a generating request; without drafts only a rest goes by."""
        state = self._states.setdefault(id, _State())
        if state.rest:
            state.rest -= 1
        elif drafted == 0:
            return
        elif accepted == drafted:
            state.budget = min(2 * state.budget, self.most)
            state.next_rest = 1
        elif accepted:
            state.budget = accepted + 1
            state.next_rest = 1
        elif state.budget > 1:
            state.budget = 1
        else:
            state.rest = state.next_rest
            state.next_rest = min(2 * state.next_rest, LONGEST_REST)

    def end(self, id: int) -> None:
        self._states.pop(id, None)
        self._fixed.pop(id, None)
