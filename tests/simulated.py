"""A machine with a clock of its own, texts whose drafts are right or wrong, and the real Drafting over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from pilotfish.control.controller import Controller
from pilotfish.control.cost import CostModel, Load
from pilotfish.control.offers import StepShare
from pilotfish.drafters.base import DraftRequest, Price
from pilotfish.drafting import Drafting
from pilotfish.team import Ask, Team
from pilotfish.tree import DraftTree, Rows, TreeBatch

VOCAB = 64
Cost = Callable[[int], float]  # rows -> ms

# A pass of a memory-bound model on a small machine: flat at first, then as many rows as arithmetic allows.
CURVE = ((1, 20.0), (2, 20.5), (4, 22.0), (8, 28.0), (16, 46.0), (32, 86.0), (64, 168.0), (512, 1320.0))


def machine(scale: float = 1.0, curve: Sequence[tuple[int, float]] = CURVE) -> Cost:
    """The time of a pass by its rows, linear between those of the curve."""
    rows, ms = zip(*curve, strict=True)
    return lambda count: scale * float(np.interp(count, rows, ms))


def calibrated(cost: Cost) -> CostModel:
    return CostModel.fit([(Load(rows), cost(rows)) for rows, _ in CURVE])


@dataclass
class Clock:
    ms: float = 0.0


@dataclass
class Text:
    """For each position of a request's text: whether a draft there is right, and what its drafter thinks of it."""

    right: np.ndarray
    confidence: np.ndarray


def text(rng: np.random.Generator, chances: np.ndarray, told: np.ndarray | None = None) -> Text:
    """Drafts stand with these chances [positions]; the drafter tells `told`, None: the truth."""
    return Text(rng.random(len(chances)) < chances, chances if told is None else told)


def token_at(position: int) -> int:
    return 1 + position % (VOCAB - 1)


@dataclass
class SimulatedModel:
    """A drafter with passes: as passes.grow does it for chains, with the times of a machine."""

    texts: dict[int, Text]
    cost: Cost
    clock: Clock
    shared: bool = False  # it lives in the target's KV, so it has never anything to catch up with
    name: str = "model"
    passes: list[tuple[TreeBatch, float]] = field(default_factory=list)
    computed: dict[int, int] = field(default_factory=dict)
    spent_ms: float = 0.0
    asked: int = 0  # times that a request was drafted for
    typical: dict[int, float] = field(default_factory=dict)  # confidence that is expected of a request's drafts

    def backlog(self, request: DraftRequest) -> int:
        return 0 if self.shared else max(0, len(request.tokens) - 1 - self.computed.get(request.id, 0))

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        self.asked += len(requests)
        drafts: dict[int, list[float]] = {request.id: [] for request in requests}
        survivals = {request.id: 1.0 for request in requests}
        rows = [self.backlog(request) + 1 for request in requests]
        growing = list(requests)
        while growing:
            self._pass(rows)
            for request in growing:
                confidences, id = drafts[request.id], request.id
                confidence = float(self.texts[id].confidence[len(request.tokens) + len(confidences)])
                confidences.append(confidence)
                survivals[id] *= confidence if price is None else price.chance(id, len(confidences), confidence)
            made = sum(map(len, drafts.values()))
            going, worth = [], []
            for request in growing:
                id, depth = request.id, len(drafts[request.id])
                typical = self.typical.get(id, 0.75)
                survival = survivals[id] * (typical if price is None else price.chance(id, depth + 1, typical))
                if depth < min(request.budget, request.max_depth) and (price is None or survival > price.least(made)):
                    going.append(request)
                    worth.append(survival)
            if price is not None and not price.pays(worth, made):
                break
            growing, rows = going, [1] * len(going)
        return [self._tree(request, drafts[request.id]) for request in requests]

    def end(self, id: int) -> None:
        self.computed.pop(id, None)

    def _pass(self, rows: Sequence[int]) -> None:
        ms = self.cost(sum(rows))
        self.spent_ms += ms
        self.clock.ms += ms
        self.passes.append((TreeBatch.build([Rows([1] * count, 0, [0]) for count in rows]), ms))

    def _tree(self, request: DraftRequest, confidences: list[float]) -> DraftTree:
        at, known, typical = len(request.tokens), self.texts[request.id], self.typical.get(request.id, 0.75)
        right = known.right[at : at + len(confidences)].tolist()
        if confidences:
            self.typical[request.id] = typical + 0.2 * (sum(confidences) / len(confidences) - typical)
        self.computed[request.id] = at + (right.index(False) if False in right else len(right))
        return _chain(at, right, confidences, self.name)


@dataclass
class SimulatedLookup:
    """A drafter without passes that proposes up to `most` tokens."""

    texts: dict[int, Text]
    clock: Clock
    ms: float = 0.02
    most: int = 8
    name: str = "lookup"
    asked: int = 0

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        self.asked += len(requests)
        self.clock.ms += self.ms * len(requests)
        return [self._propose(request) for request in requests]

    def end(self, id: int) -> None:
        pass

    def _propose(self, request: DraftRequest) -> DraftTree:
        if request.drafted:
            return DraftTree.empty()
        at, known = len(request.tokens), self.texts[request.id]
        count = min(request.budget, request.max_depth, self.most)
        right = known.right[at : at + count].tolist()
        return _chain(at, right, [float(c) for c in known.confidence[at : at + count]], self.name)


def _chain(at: int, right: Sequence[bool], confidences: Sequence[float], name: str) -> DraftTree:
    tokens = [token_at(at + depth) if fine else 0 for depth, fine in enumerate(right)]
    return DraftTree.chain(tokens, name, confidences)


@dataclass
class Run:
    tokens: int
    ms: float
    steps: int

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


def adaptive(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    texts: dict[int, Text],
    drafters: Sequence[SimulatedModel | SimulatedLookup],
    target: Cost,
    steps: int,
    controller: Controller,
    watch: Callable[[int, list[DraftTree]], None] | None = None,
    prefill: int = 0,
) -> Run:
    """So many steps of all requests with the real Drafting and its controller."""
    monkeypatch.setattr("pilotfish.drafting.now_ms", lambda: clock.ms)
    drafting = Drafting(controller, VOCAB)
    members = [drafting.team_of(drafter, None).members[1] for drafter in drafters]
    team = Team((drafting.team_of(drafters[0], None).members[0], *members), None)
    lines = {id: [1] for id in texts}
    for id in texts:
        drafting.begin(id, team)
        controller.begin(id)
    started, emitted = clock.ms, 0
    for step in range(steps):
        base = Load(len(texts) + prefill)
        before = clock.ms
        drafting.step()
        asks = [
            Ask(DraftRequest(id, line, drafting.room(id, 16), 1000, prompt=1), lambda tree: tree, len(line))
            for id, line in lines.items()
        ]
        trees = drafting.propose(asks, base, list(texts))
        draft_ms = clock.ms - before
        rows = base.rows + sum(len(tree) for tree in trees)
        ms = target(rows)
        clock.ms += ms
        controller.observe_pass(Load(rows), ms)
        step_ms = clock.ms - before
        if watch is not None:
            watch(step, trees)
        for (id, line), tree in zip(lines.items(), trees, strict=True):
            path: list[int] = []
            while True:
                child = tree.child(path[-1] if path else -1, token_at(len(line) + len(path)))
                if child is None:
                    break
                path.append(child)
            line += [token_at(len(line) + depth) for depth in range(len(path) + 1)]
            emitted += len(path) + 1
            drafting.observe(id, tree, path, len(path), None, line[-len(path) - 1 :])
            first_ms, more_ms = target(base.rows) / len(texts), target(len(texts)) / len(texts)
            share = StepShare(draft_ms / len(texts), 0.0, step_ms / len(texts), first_ms, more_ms)
            controller.account(id, "+".join(dict.fromkeys(tree.all_drafters())) or "plain", len(path) + 1, share)
        controller.check()
    for id in texts:
        drafting.end(id)
        controller.end(id)
    drafting.close()
    return Run(emitted, clock.ms - started, steps)


def fixed(texts: dict[int, Text], draft: Cost | None, target: Cost, k: int, tokens: int, prefill: int = 0) -> Run:
    """The same machine when every step drafts `k` tokens for every request; None: drafts cost nothing."""
    at = dict.fromkeys(texts, 1)
    ms, emitted, steps, count = 0.0, 0, 0, len(texts)
    while emitted < tokens:
        ms += target(count * (1 + k) + prefill) + (0.0 if draft is None else k * draft(count))
        for id, known in texts.items():
            right = known.right[at[id] : at[id] + k].tolist()
            stood = right.index(False) if False in right else len(right)
            at[id] += stood + 1
            emitted += stood + 1
        steps += 1
    return Run(emitted, ms, steps)
