"""The chance that a draft stands, learnt from what became of drafts.

Two things are known of a draft before it is verified: how deep it lies and what its drafter thinks of it. Cells over
these, one set for each drafter, count what stood, recent drafts more; all requests share them. A request's text can be
easier or harder than that, so each request has its own shift of the log-odds of each drafter.

A drafter that has not drafted yet can only be judged by depth: those cells are kept beside the others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from pilotfish.control.cost import CostModel

DEPTHS = 8  # deeper drafts count as of this depth
PRIOR_WEIGHT = 4.0  # drafts that the prior counts as
MEMORY = 0.995  # weight of a cell's past at each draft in it
PRIOR_OF_DEPTH = 0.65  # chance of a draft of a drafter that nothing is known of
SHIFT_STEP = 0.4  # how far one draft moves its request's shift, at most
SHIFT_FADE = 0.98  # of a shift at each draft
MOST_SHIFT = 4.0
# Confidences are told apart finely at both ends, where their logarithms differ.
EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 0.995)
_LEAST = 0.01  # no chance is thought nearer to 0 or 1


@dataclass(slots=True)
class _Cell:
    stood: float = 0.0
    tried: float = 0.0

    def add(self, stood: bool) -> None:
        self.stood = MEMORY * self.stood + stood
        self.tried = MEMORY * self.tried + 1

    def chance(self, prior: float) -> float:
        return (self.stood + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


@dataclass
class Experience:
    """What all requests have taught about each drafter; outlives engines."""

    cells: dict[tuple[str, int, int], _Cell] = field(default_factory=dict)  # (drafter, depth, place among EDGES)
    depths: dict[tuple[str, int], _Cell] = field(default_factory=dict)  # (drafter, depth)
    pass_costs: dict[str, CostModel] = field(default_factory=dict)  # of drafters with passes
    lookup_ms: dict[str, float] = field(default_factory=dict)  # that a drafter without takes for one request


class Acceptance:
    """Chances of drafts of running requests."""

    def __init__(self, experience: Experience | None = None) -> None:
        self.experience = experience or Experience()
        self._shifts: dict[tuple[int, str], float] = {}

    def chance(self, id: int, drafter: str, depth: int, confidence: float) -> float:
        """That a draft at `depth` (from 1) with that confidence stands if its parent does."""
        return _shifted(self._cell(drafter, depth, confidence), self._shifts.get((id, drafter), 0.0))

    def chance_at(self, id: int, drafter: str, depth: int) -> float:
        """The same for a draft that is not made yet."""
        cell = self.experience.depths.get((drafter, min(depth, DEPTHS)))
        known = PRIOR_OF_DEPTH if cell is None else cell.chance(PRIOR_OF_DEPTH)
        return _shifted(known, self._shifts.get((id, drafter), 0.0))

    def observe(self, id: int, drafter: str, depth: int, confidence: float, stood: bool) -> None:
        """Take in what became of a draft whose parent stood."""
        place = drafter, min(depth, DEPTHS), bisect_right(EDGES, confidence)
        expected = self.chance(id, drafter, depth, confidence)
        self.experience.cells.setdefault(place, _Cell()).add(stood)
        shift = SHIFT_FADE * self._shifts.get((id, drafter), 0.0) + SHIFT_STEP * (stood - expected)
        self._shifts[id, drafter] = min(MOST_SHIFT, max(-MOST_SHIFT, shift))

    def observe_depth(self, drafter: str, depth: int, stood: bool) -> None:
        """Take in whether any draft at a depth stood, of those whose parent did."""
        self.experience.depths.setdefault((drafter, min(depth, DEPTHS)), _Cell()).add(stood)

    def end(self, id: int) -> None:
        """The request is over."""
        for key in [key for key in self._shifts if key[0] == id]:
            del self._shifts[key]

    def check(self) -> None:
        """Prove that all counts and shifts are in range; raises AssertionError."""
        for cell in (*self.experience.cells.values(), *self.experience.depths.values()):
            assert 0 <= cell.stood <= cell.tried <= 1 / (1 - MEMORY) + 1
        assert all(-MOST_SHIFT <= shift <= MOST_SHIFT for shift in self._shifts.values())

    def _cell(self, drafter: str, depth: int, confidence: float) -> float:
        cell = self.experience.cells.get((drafter, min(depth, DEPTHS), bisect_right(EDGES, confidence)))
        return confidence if cell is None else cell.chance(confidence)


def _shifted(chance: float, shift: float) -> float:
    chance = min(1 - _LEAST, max(_LEAST, chance))
    if shift:
        odds = chance / (1 - chance) * math.exp(shift)
        chance = odds / (1 + odds)
    return chance
