"""The controller against brute force, and against the best fixed setting on simulated machines."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.control.acceptance import Experience
from pilotfish.control.controller import (
    FIRST_CHANCES,
    FIRST_ROOM,
    HYSTERESIS,
    LEAST_ROOM,
    LONGEST_REST,
    MISSES,
    MOST_CATCH_UP,
    PROBE_SHARE,
    Controller,
)
from pilotfish.control.cost import CostModel, Load
from pilotfish.control.offers import Candidate, Offer, StepShare
from simulated import (
    CURVE,
    Clock,
    Run,
    SimulatedLookup,
    SimulatedModel,
    Text,
    adaptive,
    calibrated,
    fixed,
    machine,
    text,
)


def _costs(rng: random.Random, sloped: bool = False) -> CostModel:
    """A random machine: flat, linear, in steps."""
    rows = sorted(rng.sample(range(1, 40), 6))
    ms, samples = rng.uniform(1, 10), []
    for count in rows:
        ms += rng.choice([0.0, 0.1, 3.0]) * rng.random()
        samples.append((Load(count), ms))
        if sloped:
            samples.append((Load(count, 100, 100), ms + 0.5))
            samples.append((Load(count, 100, 1000), ms + 2.0))
    return CostModel.fit(samples)


def _tree(rng: random.Random, nodes: int) -> tuple[list[int], list[float]]:
    """Parents and survivals; a child's is no higher than its parent's, often equal."""
    parents: list[int] = []
    survivals: list[float] = []
    for node in range(nodes):
        parent = rng.randrange(-1, node) if node else -1
        parents.append(parent)
        survivals.append((1.0 if parent < 0 else survivals[parent]) * rng.choice([1.0, 0.9, 0.5, rng.random()]))
    return parents, survivals


def _rate(
    costs: CostModel,
    base: Load,
    emitting: int,
    draft_ms: float,
    offers: Sequence[Offer],
    kept: Sequence[Sequence[bool]],
) -> float:
    tokens, rows, work = float(emitting), base.rows, base.work
    for offer, keep in zip(offers, kept, strict=True):
        tokens += sum(survival for survival, there in zip(offer.survivals, keep, strict=True) if there)
        rows += sum(keep)
        work += sum(keep) * offer.context
    outputs = None if base.outputs is None else base.outputs + rows - base.rows
    return tokens / (draft_ms + costs.ms(Load(rows, base.context, work, outputs)))


def _closed(parents: Sequence[int], keep: Sequence[bool]) -> bool:
    return all(parents[node] < 0 or keep[parents[node]] for node in range(len(keep)) if keep[node])


@pytest.mark.parametrize("seed", range(60))
def test_keep_equals_brute_force(seed: int) -> None:
    """Of all sets closed under parents, over all requests, none brings more tokens per millisecond."""
    rng = random.Random(seed)
    costs = _costs(rng)
    sizes = [rng.randrange(0, 6) for _ in range(rng.randrange(1, 4))]
    trees = [_tree(rng, size) for size in sizes]
    offers = [Offer(id, survivals, 50) for id, (_, survivals) in enumerate(trees)]
    emitting = len(offers) + rng.randrange(3)
    ids = range(emitting)
    base = Load(emitting + rng.choice([0, 0, 10]), outputs=emitting if seed % 2 else None)
    draft_ms = rng.choice([0.0, 2.0])
    kept = Controller(costs).keep(base, ids, draft_ms, offers)
    choices = [
        [keep for keep in itertools.product([False, True], repeat=size) if _closed(parents, keep)]
        for size, (parents, _) in zip(sizes, trees, strict=True)
    ]
    best = max(
        _rate(costs, base, emitting, draft_ms, offers, sets)
        for sets in itertools.islice(itertools.product(*choices), 20_000)
    )
    assert all(_closed(parents, keep) for (parents, _), keep in zip(trees, kept, strict=True))
    assert _rate(costs, base, emitting, draft_ms, offers, kept) >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_keep_with_contexts_and_whole_trees(seed: int) -> None:
    """No worse than keeping nothing; closed; whole trees all or none."""
    rng = random.Random(1000 + seed)
    costs = _costs(rng, sloped=True)
    trees = [_tree(rng, rng.randrange(0, 12)) for _ in range(rng.randrange(1, 6))]
    offers = [
        Offer(id, survivals, rng.choice([5, 100, 1000]), whole=rng.random() < 0.4)
        for id, (_, survivals) in enumerate(trees)
    ]
    base = Load(len(offers), 500, 700, rng.choice([None, len(offers)]))
    kept = Controller(costs).keep(base, range(len(offers)), 0.5, offers)
    for (parents, survivals), offer, keep in zip(trees, offers, kept, strict=True):
        assert len(keep) == len(survivals) and _closed(parents, keep)
        assert not offer.whole or all(keep) or not any(keep)
    nothing = [[False] * len(offer.survivals) for offer in offers]
    assert _rate(costs, base, len(offers), 0.5, offers, kept) >= _rate(costs, base, len(offers), 0.5, offers, nothing)


def test_keep_may_keep_nothing_or_all() -> None:
    offers = [Offer(0, [0.9, 0.8, 0.7], 1), Offer(1, [0.5], 1)]
    flat, steep = (CostModel.fit([(Load(1), 1.0), (Load(64), high)]) for high in (1.001, 100.0))
    assert Controller(flat).keep(Load(2), range(2), 0.0, offers) == [[True] * 3, [True]]
    assert Controller(steep).keep(Load(2), range(2), 0.0, offers) == [[False] * 3, [False]]
    assert Controller(steep).keep(Load(2), range(2), 0.0, []) == []


def test_rows_of_prompts_are_priced_in() -> None:
    """Rows are free to 8, dear from there on: with a prompt's rows in the pass, drafts are dear from the first."""
    costs = CostModel.fit([(Load(1), 10.0), (Load(8), 10.1), (Load(16), 100.0), (Load(64), 640.0)])
    offers = [Offer(0, [0.6, 0.4, 0.3], 1)]
    assert Controller(costs).keep(Load(1), range(1), 0.0, offers) == [[True] * 3]
    assert Controller(costs).keep(Load(8), range(1), 0.0, offers) == [[False] * 3]
    # The time of a prompt is no reason for drafts: it is there with and without them.
    assert Controller(costs).keep(Load(512), range(1), 0.0, offers) == [[False] * 3]


def test_drafting_time_that_is_spent_makes_more_rows_pay() -> None:
    costs = CostModel.fit([(Load(1), 10.0), (Load(65), 10.0 + 64 * 4.0)])
    offers = [Offer(0, [0.5, 0.3], 1)]
    assert Controller(costs).keep(Load(1), range(1), 0.0, offers) == [[True, False]]
    assert Controller(costs).keep(Load(1), range(1), 10.0, offers) == [[True, True]]


def test_latency_targets_come_before_the_rate() -> None:
    costs = CostModel.fit([(Load(1), 10.0), (Load(101), 110.0)])  # 9 + rows
    easy = Offer(0, [0.9] * 20, 1)
    free = Controller(costs)
    free.begin(0)
    free.begin(1)
    assert sum(free.keep(Load(2), range(2), 0.0, [easy])[0]) == 20
    # Request 1 has no drafts: a step of at most 15.5 ms leaves 4 rows for the other's.
    bound = Controller(costs)
    bound.begin(0)
    bound.begin(1, latency_target_ms=15.5)
    assert sum(bound.keep(Load(2), range(2), 0.0, [easy])[0]) == 4
    assert sum(bound.keep(Load(2), range(2), 3.0, [easy])[0]) == 1, "drafting took 3 ms of it"
    # Of a target that nothing can keep, what misses it least is taken.
    late = Controller(costs)
    late.begin(0)
    late.begin(1, latency_target_ms=5.0)
    assert sum(late.keep(Load(2), range(2), 0.0, [easy])[0]) == 0
    # For the request's own target its expected tokens count: here more drafts are what keeps it.
    own = Controller(costs)
    own.begin(0, latency_target_ms=4.0)
    kept = sum(own.keep(Load(2), range(2), 0.0, [easy])[0])
    assert (11 + kept) / (1 + 0.9 * kept) <= 4.0
    own.end(0)
    assert sum(own.keep(Load(2), range(2), 0.0, [easy])[0]) == 20


def _candidate(id: int, most: int = 8, backlog: int = 0, remaining: int = 1000, gain: float = 0.0) -> Candidate:
    return Candidate(id, "d", most, backlog, remaining, 1, gain)


def _controller(
    pass_ms: float, requests: int, chance: float | None = None, costs: CostModel | None = None
) -> Controller:
    """A drafter whose passes take that long whatever their rows, and whose drafts stand with that chance."""
    controller = Controller(costs or CostModel.fit([(Load(1), 10.0), (Load(64), 11.0)]))
    controller.draft_costs["d"] = CostModel.fit([(Load(1), pass_ms), (Load(1000), pass_ms)])
    controller.acceptance.experience.tried["d"] = FIRST_CHANCES
    for id in range(requests):
        controller.begin(id)
    if chance is not None:
        for depth in range(1, 9):
            for index in range(400):
                controller.acceptance.observe_depth("d", depth, index % 100 < 100 * chance)
    return controller


def test_nobody_is_drafted_for_when_it_can_not_pay() -> None:
    controller = _controller(pass_ms=30.0, requests=3, chance=1.0)
    choice = controller.choose(Load(3), range(3), [_candidate(id) for id in range(3)])
    assert not choice.ids and choice.tokens_per_ms == pytest.approx(3 / controller.costs.ms(Load(3)))
    assert not _controller(0.5, 3, chance=0.0).choose(Load(3), range(3), [_candidate(id) for id in range(3)]).ids


def test_everybody_is_when_it_is_free() -> None:
    controller = _controller(pass_ms=0.01, requests=5, chance=0.7)
    choice = controller.choose(Load(5), range(5), [_candidate(id) for id in range(5)])
    assert choice.ids == frozenset(range(5))
    assert choice.tokens_per_ms > 5 / controller.costs.ms(Load(5))
    assert choice.pass_ms == pytest.approx(0.01) and choice.load.rows == 5


def test_a_drafter_that_was_never_timed_is_tried() -> None:
    controller = Controller()
    controller.begin(0)
    assert controller.choose(Load(1), range(1), [_candidate(0)]).ids == {0}


def test_what_lookups_bring_already_is_not_paid_for_again() -> None:
    controller = _controller(pass_ms=2.0, requests=1, chance=0.7)
    assert controller.choose(Load(1), range(1), [_candidate(0)]).ids
    controller = _controller(pass_ms=2.0, requests=1, chance=0.7)
    assert not controller.choose(Load(1), range(1), [_candidate(0, gain=6.0)]).ids


def test_a_backlog_must_pay_within_what_the_request_has_left() -> None:
    costs = CostModel.fit([(Load(1), 10.0), (Load(64), 11.0)])
    for remaining, chosen in ((1000, True), (4, False)):
        controller = _controller(1.0, 1, chance=0.9, costs=costs)
        controller.draft_costs["d"] = CostModel.fit([(Load(1), 1.0), (Load(201), 101.0)])
        found = controller.choose(
            Load(1), range(1), [_candidate(0, most=min(8, remaining), backlog=150, remaining=remaining)]
        )
        assert bool(found.ids) is chosen


def test_hysteresis() -> None:
    """Between the rates at which a drafter is taken up and given up lies twice the hysteresis."""

    def takes(pass_ms: float, in_use: bool) -> bool:
        controller = _controller(pass_ms, 1, chance=0.7)
        if in_use:
            controller._requests[0].drafting.add("d")
        return bool(controller.choose(Load(1), range(1), [_candidate(0)]).ids)

    def limit(in_use: bool) -> float:
        low, high = 0.01, 50.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if takes(middle, in_use) else (low, middle)
        return low

    up, down = limit(False), limit(True)
    assert up < down
    plain = 1 / _controller(1.0, 1).costs.ms(Load(1))
    for pass_ms, ratio in ((up, 1 / (1 - HYSTERESIS)), (down, 1 / (1 + HYSTERESIS))):
        controller = _controller(pass_ms, 1, chance=0.7)
        survivals = {0: controller._expected(_candidate(0))}
        found = controller._best_depth(
            Load(1), 1, [_candidate(0)], [], survivals, controller.draft_costs["d"], 0.0, math.inf
        )
        assert found.tokens_per_ms / plain == pytest.approx(ratio, rel=1e-3)


def test_room_follows_what_is_accepted() -> None:
    controller = _controller(1.0, 1)
    assert controller.room(0, 100) == 2 * FIRST_ROOM + LEAST_ROOM
    for _ in range(100):
        controller.observe_drafts(0, {}, 0)
    assert controller.room(0, 100) == LEAST_ROOM
    controller.observe_drafts(0, {}, 12)
    assert controller.room(0, 100) == 24 + LEAST_ROOM and controller.room(0, 16) == 16


def test_lookups_rest_and_come_back() -> None:
    controller = _controller(1.0, 1)
    controller.took_lookup("slow", 5.0, 1)
    controller.took_lookup("fast", 0.001, 1)
    asked: dict[str, list[int]] = {"slow": [], "fast": []}
    for step in range(400):
        for name, steps in asked.items():
            if controller.wants_lookup(0, name):
                steps.append(step)
                controller.observe_drafts(0, {name: 0}, 0)
    assert asked["fast"] == list(range(400)), "what takes no time never rests"
    gaps = np.diff(asked["slow"]).tolist()
    assert gaps[: MISSES - 1] == [1] * (MISSES - 1)
    assert gaps == sorted(gaps) and gaps[-1] == 2**LONGEST_REST + 1
    controller.observe_drafts(0, {"slow": 2}, 2)  # it comes back at once when it is of use
    assert controller._requests[0].misses["slow"] == 0


def test_reports_add_up() -> None:
    controller, rng = _controller(1.0, 2), random.Random(4)
    steps = [([rng.random() for _ in range(5)], rng.randrange(1, 5)) for _ in range(50)]
    for times, emitted in steps:
        controller.account(0, rng.choice(["d", "plain", "a+d"]), emitted, StepShare(*times))
    report = controller.report(0)
    assert sum(report.steps.values()) == 50 and set(report.steps) == {"d", "plain", "a+d"}
    for index, told_ms in enumerate((report.draft_ms, report.verify_ms, report.step_ms)):
        assert told_ms == pytest.approx(sum(times[index] for times, _ in steps))
    # The first token would have come with the prompts beside it, each further one in a step of its own.
    assert report.plain_ms == pytest.approx(sum(times[3] + (emitted - 1) * times[4] for times, emitted in steps))
    assert not controller.report(1).steps
    report.add(report)
    assert sum(report.steps.values()) == 100
    told = report.as_dict()
    assert sum(told["steps"].values()) == 100 and told["draft_ms"] == pytest.approx(report.draft_ms, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    controller = Controller(_costs(rng, sloped=rng.random() < 0.5))
    running: set[int] = set()
    for turn in range(120):
        if not running or rng.random() < 0.1:
            controller.begin(turn, rng.choice([None, None, rng.uniform(0.1, 100)]))
            running.add(turn)
        if len(running) > 1 and rng.random() < 0.08:
            running.remove(gone := rng.choice(sorted(running)))
            controller.end(gone)
        ids = rng.sample(sorted(running), rng.randrange(1, len(running) + 1))
        base = Load(
            len(ids) + rng.choice([0, 50]), rng.randrange(999), rng.randrange(999), rng.choice([None, len(ids)])
        )
        match rng.randrange(6):
            case 0:
                gain = rng.choice([0.0, 3.0 * rng.random()])
                candidates = [
                    Candidate(id, rng.choice("de") and "d", rng.randrange(1, 17), rng.choice([0, 0, 300]), 9, 50, gain)
                    for id in ids
                ]
                choice = controller.choose(base, ids, candidates)
                assert choice.ids <= set(ids) and choice.tokens_per_ms > 0
                assert choice.pass_ms >= 0 and controller.row_ms(choice.load, 3) >= 0
            case 1:
                trees = [_tree(rng, rng.randrange(10)) for _ in ids]
                offers = [Offer(id, tree[1], 50, rng.random() < 0.2) for id, tree in zip(ids, trees, strict=True)]
                kept = controller.keep(base, ids, rng.choice([0.0, 5.0]), offers)
                assert [len(keep) for keep in kept] == [len(tree[1]) for tree in trees]
            case 2:
                controller.observe_pass(base, rng.choice([rng.uniform(0.01, 1000), 0.0, float("nan")]))
                controller.observe_draft_pass("d", Load(rng.randrange(1, 99)), rng.uniform(0.01, 50))
            case 3:
                id, depth, stood = rng.choice(ids), rng.randrange(1, 20), rng.random() < 0.5
                controller.acceptance.observe(id, "d", depth, rng.random(), stood)
                controller.acceptance.observe_depth("d", depth, stood)
            case 4:
                controller.took_lookup("a", rng.uniform(0, 2), len(ids))
                for id in ids:
                    controller.wants_lookup(id, "a")
                    controller.observe_drafts(id, {"a": rng.choice([0, 0, 2])}, rng.randrange(4))
                    assert 0 <= controller.room(id, 16) <= 16
            case 5:
                for id in ids:
                    controller.account(id, "d", rng.randrange(1, 4), StepShare(rng.random(), 1.0, 2.0, 1.0, 0.5))
        controller.check()
    assert set(controller._requests) == running
    assert {id for id, _ in controller.acceptance._shifts} <= running


# --- A simulated machine: the real Drafting and Controller, drafts that are right or wrong as the scenario says.

POSITIONS, STEPS = 16_000, 400
Chances = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def _steady(chance: float, told: float | None = None) -> Chances:
    """Drafts stand with this chance, the drafter says `told`."""
    return lambda rng, id: (np.full(POSITIONS, chance), np.full(POSITIONS, chance if told is None else told))


def _mixed(rng: np.random.Generator, id: int) -> tuple[np.ndarray, np.ndarray]:
    """The drafter knows one token in four, and knows which."""
    chances = np.where(rng.random(POSITIONS) < 0.25, 0.95, 0.05)
    return chances, chances


def _stretches(rng: np.random.Generator, id: int) -> tuple[np.ndarray, np.ndarray]:
    """Easy and hard stretches of some twenty tokens, which the drafter can tell."""
    chances = np.where(np.cumsum(rng.random(POSITIONS) < 0.05) % 2 == 0, 0.97, 0.2)
    return chances, chances


def _late(rng: np.random.Generator, id: int) -> tuple[np.ndarray, np.ndarray]:
    """Useless for 150 tokens, then nearly perfect; the drafter can not tell."""
    return np.where(np.arange(POSITIONS) < 150, 0.03, 0.95), np.full(POSITIONS, 0.6)


def _phases(rng: np.random.Generator, id: int) -> tuple[np.ndarray, np.ndarray]:
    """200 tokens useless, 200 good, and so on."""
    return np.where(np.arange(POSITIONS) // 200 % 2 == 0, 0.05, 0.95), np.full(POSITIONS, 0.7)


def _unlike(rng: np.random.Generator, id: int) -> tuple[np.ndarray, np.ndarray]:
    """Every other request is easy."""
    return np.full(POSITIONS, 0.95 if id % 2 else 0.03), np.full(POSITIONS, 0.6)


def _texts(chances: Chances, requests: int, seed: int = 0) -> dict[int, Text]:
    found = {}
    for id in range(requests):
        rng = np.random.default_rng([seed, id])
        found[id] = text(rng, *chances(rng, id))
    return found


def _calibrated_drafter(controller: Controller, scale: float) -> None:
    controller.draft_costs["model"] = CostModel.fit([(Load(rows, outputs=rows), scale * ms) for rows, ms in CURVE])


def _best_fixed(texts: dict[int, Text], scale: float | None, tokens: int, most: int = 16) -> Run:
    draft = None if scale is None else machine(scale)
    return max(
        (fixed(texts, draft, machine(), k, tokens) for k in (0, 1, 2, 3, 4, 6, 8, 12, 16) if k <= most),
        key=lambda run: run.rate,
    )


# (what, requests, a draft pass in passes of the target; None: a lookup)
SCENARIOS: list[tuple[str, Chances, int, float | None]] = [
    ("overrated", _steady(0.03, 0.6), 1, 0.35),
    ("overrated", _steady(0.03, 0.6), 4, 0.1),
    ("overrated", _steady(0.03, 0.6), 16, None),
    ("useless", _steady(0.03), 1, 0.1),
    ("useless", _steady(0.03), 1, 0.35),
    ("useless", _steady(0.03), 4, 0.1),
    ("perfect", _steady(0.99, 0.9), 1, 0.1),
    ("perfect", _steady(0.99, 0.9), 4, 0.1),
    ("perfect", _steady(0.99, 0.9), 4, 0.35),
    ("perfect", _steady(0.99, 0.9), 1, None),
    ("medium", _steady(0.6), 1, 0.1),
    ("medium", _steady(0.6), 1, 0.35),
    ("medium", _steady(0.6), 4, 0.1),
    ("medium", _steady(0.6), 16, None),
    ("good", _steady(0.8), 4, 0.1),
    ("good", _steady(0.8), 4, 0.35),
    ("expensive", _steady(0.8), 4, 0.9),
    ("mixed", _mixed, 1, 0.1),
    ("mixed", _mixed, 1, 0.35),
    ("stretches", _stretches, 1, 0.1),
    ("stretches", _stretches, 4, None),
    ("unlike", _unlike, 4, 0.1),
    ("late", _late, 1, 0.1),
    ("late", _late, 4, 0.1),
    ("late", _late, 4, None),
    ("phases", _phases, 1, 0.1),
    ("phases", _phases, 4, None),
]
# What it does not reach yet, and why: its rate as a share of the best fixed setting's.
CATCH_UP = "four backlogs grow faster than the credit of probes, so it is never tried again: "
BEHIND: dict[tuple[str, int, float | None], str] = {
    ("late", 4, 0.1): CATCH_UP + "0.93",
}


@pytest.mark.parametrize(
    ("what", "chances", "requests", "scale"),
    [
        pytest.param(
            *scenario,
            id=f"{scenario[0]}-{scenario[2]}-{scenario[3]}",
            marks=[pytest.mark.xfail(reason=reason, strict=True)]
            if (reason := BEHIND.get((scenario[0], scenario[2], scenario[3])))
            else [],
        )
        for scenario in SCENARIOS
    ],
)
def test_nearly_the_best_fixed_setting(
    monkeypatch: pytest.MonkeyPatch, what: str, chances: Chances, requests: int, scale: float | None
) -> None:
    texts, clock, controller = _texts(chances, requests), Clock(), Controller(calibrated(machine()))
    drafter: SimulatedModel | SimulatedLookup
    if scale is None:
        drafter = SimulatedLookup(texts, clock)
    else:
        drafter = SimulatedModel(texts, machine(scale), clock)
        _calibrated_drafter(controller, scale)
    found = adaptive(monkeypatch, clock, texts, [drafter], machine(), STEPS, controller)
    best = _best_fixed(texts, scale, found.tokens, drafter.most if isinstance(drafter, SimulatedLookup) else 16)
    assert found.rate >= 0.97 * fixed(texts, None, machine(), 0, found.tokens).rate, "it never loses to no drafts"
    assert found.rate >= 0.95 * best.rate


def test_the_second_engine_begins_with_what_the_first_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    experience, rates = Experience(), []
    for _ in range(2):
        texts, clock = _texts(_steady(0.03, 0.6), 1), Clock()
        controller = Controller(calibrated(machine()), experience)
        drafter = SimulatedModel(texts, machine(0.35), clock)
        rates.append(adaptive(monkeypatch, clock, texts, [drafter], machine(), 60, controller).rate)
    assert "model" in experience.pass_costs and rates[1] >= rates[0]


@pytest.mark.parametrize(("requests", "shared"), [(1, True), (4, True), (1, False), (4, False)])
def test_trying_again_takes_about_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, requests: int, shared: bool
) -> None:
    texts, clock, controller = _texts(_steady(0.03, 0.6), requests), Clock(), Controller(calibrated(machine()))
    drafter = SimulatedModel(texts, machine(0.1), clock, shared)
    _calibrated_drafter(controller, 0.1)
    found = adaptive(monkeypatch, clock, texts, [drafter], machine(), 3000, controller)
    if shared:
        assert controller.decisions["model tried again"] > 3, "a parked drafter is tried again"
    assert drafter.spent_ms / clock.ms < (1 + MOST_CATCH_UP * (not shared)) * PROBE_SHARE * 1.25
    assert found.rate > 0.97 * fixed(texts, None, machine(), 0, found.tokens).rate


def test_the_first_chance_is_free_and_pooled() -> None:
    """Whatever seems to pay, a new drafter is asked in a few steps, for all that it could draft for."""
    controller = _controller(pass_ms=30.0, requests=3, chance=0.9)
    controller.acceptance.experience.tried.clear()
    candidates = [_candidate(id, backlog=1000) for id in range(3)]
    for _ in range(FIRST_CHANCES):
        assert controller.choose(Load(3), range(3), candidates).ids == {0, 1, 2}
    assert not controller.choose(Load(3), range(3), candidates).ids
    assert controller.decisions["d tried again"] == FIRST_CHANCES and not controller._requests[0].drafting


@pytest.mark.parametrize("backlog", [0, 80])
def test_probes_wait_for_their_credit(backlog: int) -> None:
    """A share of the time without the drafter pays for its pass, and a few times as much for what it catches up."""
    controller = _controller(pass_ms=30.0, requests=3, chance=0.9)
    controller.draft_costs["d"] = CostModel.fit([(Load(1), 30.0), (Load(3), 30.0), (Load(103), 130.0)])
    candidates, steps = [_candidate(id, backlog=backlog) for id in range(3)], []
    for step in range(2000):
        if found := controller.choose(Load(3), range(3), candidates).ids:
            # One pass serves them all; one tells of all where what they have to catch up is dear.
            assert len(found) == (1 if backlog > 10 else 3)
            steps.append(step)
    earned = PROBE_SHARE * controller.costs.ms(Load(3))
    needed = max(30.0, (1 if backlog > 10 else 3) * backlog / MOST_CATCH_UP)
    gaps = np.diff(steps)
    assert len(steps) > 3 and all(abs(gap - math.ceil(needed / earned)) <= 1 for gap in gaps)


def test_a_drafter_that_has_nothing_to_say_is_parked_and_comes_back() -> None:
    controller = _controller(pass_ms=2.0, requests=1, chance=0.7)
    asked = []
    for _ in range(400):
        controller.step()
        asked.append(bool(controller.choose(Load(1), range(1), [_candidate(0)]).ids))
        controller.used(0, {})
    assert all(asked[:3]) and not all(asked[:40])
    assert 0 < controller._requests[0].yields["d"].at(controller.acceptance.experience.step) < 1
    later = controller.acceptance.experience.step + 2000
    assert controller._requests[0].yields["d"].at(later) == pytest.approx(1.0, abs=0.01), "what it was fades"
    assert any(asked[40:]), "and it is asked again"


def test_yields_follow_what_is_kept() -> None:
    controller = _controller(pass_ms=0.1, requests=2, chance=0.6)
    for _ in range(200):
        controller.step()
        assert controller.choose(Load(2), range(2), [_candidate(id) for id in range(2)]).ids == {0, 1}
        controller.used(0, {"d": controller._requests[0].expected["d"]})
        controller.used(1, {"d": 0.5 * controller._requests[1].expected["d"], "other": 0.9})
        assert not controller._requests[0].expected
    now = controller.acceptance.experience.step
    assert controller._requests[0].yields["d"].at(now) == pytest.approx(1.0)
    assert controller._requests[1].yields["d"].at(now) == pytest.approx(0.5, abs=0.04)  # it fades towards 1
    assert set(controller._requests[1].yields) == {"d"}, "who was not asked has no yield"
    found = controller._requests[1].yields["d"].at(now)
    assert controller._expected(_candidate(1))[0] == pytest.approx(found * controller._expected(_candidate(0))[0])


def test_a_latency_target_bounds_who_is_drafted_for() -> None:
    """Request 1 gets a token of the step and has no drafts: the other's drafts must not take longer than it allows."""
    for target, chosen in ((None, True), (40.0, True), (10.5, False)):
        controller = _controller(pass_ms=2.0, requests=0, chance=0.8)
        controller.begin(0)
        controller.begin(1, target)
        assert bool(controller.choose(Load(2), [0, 1], [_candidate(0)]).ids) is chosen
    # Of a request that gets no token of this step it says nothing.
    assert controller.choose(Load(2), [0], [_candidate(0)]).ids


def test_a_latency_target_counts_the_whole_step_and_the_rate_does_not_count_prompts() -> None:
    """Beside a prompt a target leaves room for few drafts; how many pay beside it is another question."""
    costs = CostModel.fit([(Load(rows), 9.0 + rows) for rows in (1, 8, 64)])
    easy = Offer(0, [0.99**depth for depth in range(1, 21)], 0)

    def kept(rows: int) -> int:
        controller = Controller(costs)
        controller.begin(0)
        controller.begin(1, latency_target_ms=25.5)
        return sum(controller.keep(Load(rows), [0, 1], 0.0, [easy])[0])

    assert kept(2) == 14 and kept(12) == 4
    free = Controller(costs)
    assert sum(free.keep(Load(12), [0, 1], 0.0, [easy])[0]) == 20
