"""The chance that a draft stands, learnt from what became of drafts.

Two things are known of a draft before it is verified: how deep it lies and what its drafter thinks of it. Cells over
these, one set for each drafter, count what stood, recent drafts more; all requests share them. A request's text can be
easier or harder than that, so each request has its own shift of the log-odds of each drafter.

Before a drafter has drafted it can only be judged by depth: those cells are kept beside the others.

What is not tried teaches nothing, so everything fades with the steps that go by: what was bad gets another chance.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish.control.cost import CostModel
from pilotfish.tree import DraftTree

DEPTHS = 8  # deeper drafts count as of this depth
PRIOR_WEIGHT = 4.0  # drafts that the prior counts as
MEMORY = 0.995  # weight of a cell's past at each draft in it
FADE = 0.9995  # of a cell at each step
PRIOR_OF_DEPTH = 0.65  # chance of a draft of a drafter that nothing is known of
SHIFT_STEP = 0.12  # how far one draft moves its request's shift, at most
SHIFT_FADE = 0.995  # of a shift at each step
MOST_SHIFT = 4.0
# Confidences are told apart finely at both ends, where their logarithms differ.
EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 0.995)
_LEAST = 0.01  # no chance is thought nearer to 0 or 1


@dataclass(slots=True)
class _Cell:
    stood: float = 0.0
    tried: float = 0.0
    step: int = 0  # up to which it has faded

    def add(self, stood: bool, step: int) -> None:
        weight = MEMORY * FADE ** (step - self.step)
        self.stood = weight * self.stood + stood
        self.tried = weight * self.tried + 1
        self.step = step

    def chance(self, prior: float, step: int) -> float:
        weight = FADE ** (step - self.step)
        return (weight * self.stood + PRIOR_WEIGHT * prior) / (weight * self.tried + PRIOR_WEIGHT)


@dataclass(slots=True)
class Fading:
    """A number that goes back to `rest` as steps go by."""

    rest: float
    fade: float  # of the distance at each step
    distance: float = 0.0
    step: int = 0

    def at(self, step: int) -> float:
        return self.rest + self.distance * self.fade ** (step - self.step)

    def set(self, value: float, step: int) -> None:
        self.distance, self.step = value - self.rest, step


@dataclass
class Experience:
    """What all requests have taught about each drafter; outlives engines."""

    cells: dict[tuple[str, int, int], _Cell] = field(default_factory=dict)  # (drafter, depth, place among EDGES)
    depths: dict[tuple[str, int], _Cell] = field(default_factory=dict)  # (drafter, depth)
    pass_costs: dict[str, CostModel] = field(default_factory=dict)  # of drafters with passes
    lookup_ms: dict[str, float] = field(default_factory=dict)  # that a drafter without takes for one request
    tried: Counter[str] = field(default_factory=Counter)  # first steps of drafters with passes
    step: int = 0  # steps of all engines


class Acceptance:
    """Chances of drafts of running requests."""

    def __init__(self, experience: Experience | None = None) -> None:
        self.experience = experience or Experience()
        self._shifts: dict[tuple[int, str], Fading] = {}

    def chance(self, id: int, drafter: str, depth: int, confidence: float) -> float:
        """That a draft at `depth` (from 1) with that confidence stands if its parent does."""
        return _shifted(self._cell(drafter, depth, confidence), self._shift(id, drafter))

    def chance_at(self, id: int, drafter: str, depth: int) -> float:
        """The same for a draft that is not made yet."""
        cell = self.experience.depths.get((drafter, min(depth, DEPTHS)))
        known = PRIOR_OF_DEPTH if cell is None else cell.chance(PRIOR_OF_DEPTH, self.experience.step)
        return _shifted(known, self._shift(id, drafter))

    def observe(self, id: int, drafter: str, depth: int, confidence: float, stood: bool) -> None:
        """Take in what became of a draft whose parent stood."""
        place = drafter, min(depth, DEPTHS), bisect_right(EDGES, confidence)
        expected = self.chance(id, drafter, depth, confidence)
        step = self.experience.step
        self.experience.cells.setdefault(place, _Cell()).add(stood, step)
        shift = self._shift(id, drafter) + SHIFT_STEP * (stood - expected)
        fading = self._shifts.setdefault((id, drafter), Fading(0.0, SHIFT_FADE))
        fading.set(min(MOST_SHIFT, max(-MOST_SHIFT, shift)), step)

    def observe_depth(self, drafter: str, depth: int, stood: bool) -> None:
        """Take in whether any draft at a depth stood, of those whose parent did."""
        self.experience.depths.setdefault((drafter, min(depth, DEPTHS)), _Cell()).add(stood, self.experience.step)

    def survivals(self, id: int, tree: DraftTree) -> list[float]:
        """[nodes] the chance of each node to be emitted."""
        survivals: list[float] = []
        depths: list[int] = []
        rows = zip(tree.parents.tolist(), tree.all_confidences(), tree.all_drafters(), strict=True)
        for parent, confidence, drafter in rows:
            depths.append(1 if parent < 0 else depths[parent] + 1)
            above = 1.0 if parent < 0 else survivals[parent]
            survivals.append(above * self.chance(id, drafter, depths[-1], confidence))
        return survivals

    def learn(self, id: int, tree: DraftTree, path: Sequence[int], known: int) -> None:
        """Take in what became of a tree: the text went along `path`, and `known` of its tokens are there.

        Whether a node would have stood shows without verifying it: the token that came is its own or is not.
        """
        drafters, confidences = tree.all_drafters(), tree.all_confidences()
        stood = set(path)
        depths = {-1: 0, **{node: depth for depth, node in enumerate(path, 1)}}
        at_depth: dict[tuple[str, int], bool] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            if parent in depths and depths[parent] < known:
                depth = depths[parent] + 1
                self.observe(id, drafters[node], depth, confidences[node], node in stood)
                at_depth[drafters[node], depth] = at_depth.get((drafters[node], depth), False) or node in stood
        for (drafter, depth), any_stood in at_depth.items():
            self.observe_depth(drafter, depth, any_stood)

    def end(self, id: int) -> None:
        """The request is over."""
        for key in [key for key in self._shifts if key[0] == id]:
            del self._shifts[key]

    def check(self) -> None:
        """Prove that all counts and shifts are in range; raises AssertionError."""
        for cell in (*self.experience.cells.values(), *self.experience.depths.values()):
            assert 0 <= cell.stood <= cell.tried <= 1 / (1 - MEMORY) + 1
        assert all(abs(shift.distance) <= MOST_SHIFT for shift in self._shifts.values())

    def _cell(self, drafter: str, depth: int, confidence: float) -> float:
        cell = self.experience.cells.get((drafter, min(depth, DEPTHS), bisect_right(EDGES, confidence)))
        return confidence if cell is None else cell.chance(confidence, self.experience.step)

    def _shift(self, id: int, drafter: str) -> float:
        shift = self._shifts.get((id, drafter))
        return 0.0 if shift is None else shift.at(self.experience.step)


def _shifted(chance: float, shift: float) -> float:
    chance = min(1 - _LEAST, max(_LEAST, chance))
    if shift:
        odds = chance / (1 - chance) * math.exp(shift)
        chance = odds / (1 + odds)
    return chance
