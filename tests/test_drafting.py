"""Who drafts for whom: portfolios, limits of parts, parked drafters, and what they are told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pilotfish.control.controller import Controller
from pilotfish.control.cost import Load
from pilotfish.drafters import speculation as speculation_module
from pilotfish.drafters.base import DraftRequest, Price
from pilotfish.drafters.speculation import (
    Part,
    Speculation,
    check_loaded,
    parse_speculation,
)
from pilotfish.drafting import IDLE_DRAFTERS, Drafting
from pilotfish.errors import InputError
from pilotfish.params import SamplingParams
from pilotfish.team import FIRST_PARK, LONGEST_PARK, Ask
from pilotfish.tree import DraftTree, Ints, Rows, TreeBatch

VOCAB = 32


@dataclass
class Lookup:
    """Proposes what it is told to."""

    name: str
    says: Callable[[DraftRequest], DraftTree]
    asked: list[DraftRequest] = field(default_factory=list)
    prices: list[Price | None] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        self.asked += requests
        self.prices.append(price)
        return [self.says(request) for request in requests]

    def end(self, id: int) -> None:
        self.ended.append(id)


@dataclass
class Model(Lookup):
    """The same with passes."""

    passes: list[tuple[TreeBatch, float]] = field(default_factory=list)
    behind: int = 0

    def backlog(self, request: DraftRequest) -> int:
        return self.behind

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        self.passes.append((TreeBatch.build([Rows([1], 0, [0]) for _ in requests]), 0.5))
        return super().propose(requests, price)


@dataclass
class Watching(Lookup):
    seen: list[tuple[int, list[int], list[int]]] = field(default_factory=list)

    def observe(self, id: int, tree: DraftTree, choices: Ints) -> None:
        self.seen.append((id, tree.tokens.tolist(), choices.tolist()))


def chain(name: str, tokens: Sequence[int], confidence: float = 0.95) -> Callable[[DraftRequest], DraftTree]:
    """As much of the chain as fits; nothing behind drafts."""

    def says(request: DraftRequest) -> DraftTree:
        fits = [] if request.drafted else tokens[: min(request.budget, request.max_depth)]
        return DraftTree.chain(fits, name, [confidence] * len(fits))

    return says


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}


class Bench:
    """Drafting for requests whose drafters are given by the name of their part."""

    def __init__(self, drafters: dict[str, Any], limit_s: float = 30.0) -> None:
        self.made: list[str] = []
        self.controller = Controller()
        self.drafting = Drafting(self.controller, VOCAB, lambda part: self._make(drafters, part), limit_s)
        self.tokens: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}

    def _make(self, drafters: dict[str, Any], part: Part) -> Any:
        self.made.append(part.method)
        return drafters[part.method]

    def begin(self, id: int, *parts: Part, params: SamplingParams | None = None) -> None:
        self.drafting.begin(id, self.drafting.team(Speculation(parts)))
        self.controller.begin(id)
        self.tokens[id], self.params[id] = [1, 2, 3], params or SamplingParams()

    def end(self, id: int) -> None:
        self.drafting.end(id)
        self.controller.end(id)
        del self.tokens[id]

    def propose(self, budget: int = 16, depth: int = 99, forced: Sequence[int] = ()) -> dict[int, DraftTree]:
        self.drafting.step()
        asks = [
            Ask(
                DraftRequest(id, tokens, budget, depth, forced, 3, params=self.params[id]),
                lambda tree: tree,
                len(tokens),
            )
            for id, tokens in self.tokens.items()
        ]
        return dict(zip(self.tokens, self.drafting.propose(asks, Load(len(asks)), list(self.tokens)), strict=True))

    def observe(self, id: int, tree: DraftTree, path: Sequence[int], choices: Sequence[int] | None = None) -> None:
        told = None if choices is None else np.array(choices, np.int32)
        last = -1 if not choices else choices[0 if not path else 1 + path[-1]]
        self.drafting.observe(id, tree, path, len(path), told, [*tree.tokens[list(path)].tolist(), last])


def test_a_portfolio_joins_trees() -> None:
    lookup, model = Lookup("a", chain("a", [4, 5, 6])), Model("b", chain("b", [4, 7, 8]))
    bench = Bench({"a": lookup, "b": model})
    bench.begin(0, Part("a"), Part("b"))
    tree = bench.propose()[0]
    assert paths(tree) == {(4,), (4, 5), (4, 5, 6), (4, 7), (4, 7, 8)}
    # Who drafts at a price is first: what both have is its own.
    by = {tuple(tree.tokens[tree.path(node)].tolist()): name for node, name in enumerate(tree.all_drafters())}
    assert by == {(4,): "b", (4, 7): "b", (4, 7, 8): "b", (4, 5): "a", (4, 5, 6): "a"}
    assert set(lookup.prices) == {None} and None not in model.prices
    assert not model.passes and "b" in bench.controller.draft_costs, "the passes are taken in"


def test_of_lookups_the_best_tree_is_taken() -> None:
    for first, second, winner in ((0.9, 0.6, 4), (0.6, 0.9, 8)):
        a, b = Lookup("a", chain("a", [4, 5], first)), Lookup("b", chain("b", [8, 9], second))
        bench = Bench({"a": a, "b": b})
        bench.begin(0, Part("a"), Part("b"))
        assert bench.propose()[0].tokens[0] == winner


def test_a_lookup_goes_on_behind_anothers_branch() -> None:
    def behind(request: DraftRequest) -> DraftTree:
        known = {(): [], (4, 5): [6, 7], (4, 5, 6, 7): [8]}
        found = known.get(tuple(request.drafted), [])[: request.budget]
        return DraftTree.chain(found, "a", [0.95] * len(found))

    bench = Bench({"a": Lookup("a", behind), "b": Model("b", chain("b", [4, 5]))})
    bench.begin(0, Part("a"), Part("b"))
    tree = bench.propose()[0]
    assert tree.tokens.tolist() == [4, 5, 6, 7]
    assert tree.all_drafters() == ("b", "b", "a", "a")
    assert bench.propose(budget=3)[0].tokens.tolist() == [4, 5, 6]
    assert bench.propose(depth=3)[0].depths().max() <= 3


def test_the_k_of_a_part_bounds_its_drafts_in_a_portfolio() -> None:
    def endless(name: str) -> Callable[[DraftRequest], DraftTree]:
        """It has something to say behind drafts, too."""

        def says(request: DraftRequest) -> DraftTree:
            count = min(request.budget, request.max_depth)
            start = len(request.drafted) + (4 if name == "a" else 14)
            tokens = [(start + depth) % VOCAB for depth in range(count)]
            return DraftTree.chain(tokens, name, [0.99] * count)

        return says

    a, b = Lookup("a", endless("a")), Model("b", endless("b"))
    bench = Bench({"a": a, "b": b})
    bench.begin(0, Part("a", 2), Part("b", 3))
    names = bench.propose()[0].all_drafters()
    assert names.count("a") == 2 and names.count("b") == 3
    assert all(request.budget <= 2 for request in a.asked) and all(request.budget <= 3 for request in b.asked)
    bench.end(0)
    bench.begin(1, Part("a", 2), Part("b"))
    assert bench.propose()[1].all_drafters().count("a") <= 2


def test_a_fixed_k_asks_whatever_it_costs() -> None:
    model = Model("b", chain("b", [4, 5, 6, 7], 0.01), behind=10_000)
    bench = Bench({"b": model})
    bench.begin(0, Part("b", 3))
    for _ in range(20):
        tree = bench.propose(budget=bench.drafting.room(0, 16))[0]
        assert tree.tokens.tolist() == [4, 5, 6], "no node is left out, however little is thought of it"
        bench.observe(0, tree, [])
    assert bench.drafting.fixed(0) == 3 and set(model.prices) == {None}
    # What a grammar forces comes first.
    assert bench.propose(forced=[9, 8])[0].all_drafters() == ("grammar", "grammar")
    assert len(model.asked) == 20


def test_off_asks_nobody() -> None:
    bench = Bench({})
    bench.begin(0)
    assert not bench.drafting.speculates(0) and bench.drafting.room(0, 16) == 0


def test_requests_with_equal_options_share_a_drafter() -> None:
    bench = Bench({"a": Lookup("a", chain("a", [4]))})
    for id, part in enumerate([Part("a"), Part("a", 3), Part("a", options={"n": 2}), Part("a", 2, {"n": 2})]):
        bench.begin(id, part)
    assert bench.made == ["a", "a"], "one for each set of options, whatever the k"


def test_idle_drafters_are_bounded() -> None:
    bench = Bench({"a": Lookup("a", chain("a", [4]))})
    bench.begin(0, Part("a", options={"n": 10_000}))
    for id in range(1, 50):
        bench.begin(id, Part("a", options={"n": id}))
        bench.end(id)
        assert len(bench.drafting._members) <= IDLE_DRAFTERS + 2
    made = len(bench.made)
    bench.begin(100, Part("a", options={"n": 10_000}))  # never idle
    bench.begin(101, Part("a", options={"n": 49}))  # idle, but lately used
    assert len(bench.made) == made
    bench.begin(102, Part("a", options={"n": 1}))
    assert len(bench.made) == made + 1


def test_a_pinned_drafter_is_kept_though_nobody_uses_it() -> None:
    bench = Bench({"a": Lookup("a", chain("a", [4]))})
    pinned = Part("a", options={"n": 10_000})
    bench.drafting.pin(bench.drafting.team(Speculation((pinned,))))
    for id in range(1, 4 * IDLE_DRAFTERS):
        bench.begin(id, Part("a", options={"n": id}))
        bench.end(id)
    made = len(bench.made)
    bench.begin(100, pinned)
    assert len(bench.made) == made


def test_a_lookup_that_rests_is_not_asked_behind_drafts_either() -> None:
    a, b = Lookup("a", chain("a", [])), Model("b", chain("b", [4, 5]))
    bench = Bench({"a": a, "b": b})
    bench.begin(0, Part("a"), Part("b"))
    bench.propose()
    assert any(request.drafted for request in a.asked)
    a.asked.clear()
    bench.controller._requests[0].rests["a"] = 3
    bench.propose()
    assert not a.asked and len(b.asked) == 2


def test_a_drafter_in_use_is_never_dropped() -> None:
    drafters = {"a": Lookup("a", chain("a", [4]))}
    bench = Bench(drafters)
    for id in range(3 * IDLE_DRAFTERS):
        bench.begin(id, Part("a", options={"n": id}))
    for id in range(3 * IDLE_DRAFTERS):
        bench.begin(100 + id, Part("a", options={"n": id}))
    assert len(bench.made) == 3 * IDLE_DRAFTERS
    assert all(len(tree) for tree in bench.propose().values())


def test_a_failed_drafter_is_retried_after_longer_and_longer_rests(caplog: pytest.LogCaptureFixture) -> None:
    works = False

    def says(request: DraftRequest) -> DraftTree:
        if not works:
            raise RuntimeError("not now")
        return DraftTree.chain([4], "a", [0.9])

    drafter = Lookup("a", says)
    bench = Bench({"a": drafter})
    bench.begin(0, Part("a"))
    asked_at, count = [], 0
    with caplog.at_level(logging.ERROR, logger="pilotfish"):
        for step in range(FIRST_PARK * 25):
            bench.propose()
            if len(drafter.asked) > count:
                asked_at.append(step)
                count = len(drafter.asked)
    assert np.diff(asked_at).tolist() == [FIRST_PARK, 4 * FIRST_PARK, 16 * FIRST_PARK]
    assert bench.drafting.failures == 4
    works = True
    member = next(iter(bench.drafting._members.values()))
    while not len(bench.propose()[0]):
        pass
    assert member.failures == 0, "once it works, the next failure is a first one"
    works = False
    with caplog.at_level(logging.ERROR, logger="pilotfish"):
        bench.propose()
    assert member.parked - bench.drafting._step == FIRST_PARK
    member.failures = 50
    with caplog.at_level(logging.ERROR, logger="pilotfish"):
        member.run(lambda: 1 / 0, bench.drafting._watchdog, 1.0, 0)
    assert member.parked == LONGEST_PARK


def test_observers_are_told_of_all_trees() -> None:
    watching, other = Watching("a", chain("a", [])), Lookup("b", chain("b", [4, 5]))
    bench = Bench({"a": watching, "b": other})
    bench.begin(0, Part("a"), Part("b"))
    bench.begin(1, Part("b"))
    assert bench.drafting.observes(0) and not bench.drafting.observes(1)
    trees = bench.propose()
    bench.observe(0, trees[0], [0], [4, 9, 9])
    bench.observe(1, trees[1], [0], None)
    assert watching.seen == [(0, [4, 5], [4, 9, 9])]
    bench.observe(0, DraftTree.empty(), [], [7])  # without drafts there is the last token's choice
    assert watching.seen[-1] == (0, [], [7])


def test_the_end_is_told_to_the_team_only() -> None:
    a, b = Lookup("a", chain("a", [4])), Lookup("b", chain("b", [4]))
    bench = Bench({"a": a, "b": b})
    bench.begin(0, Part("a"))
    bench.begin(1, Part("a"), Part("b"))
    bench.end(0)
    assert a.ended == [0] and b.ended == []
    bench.end(1)
    assert a.ended == [0, 1] and b.ended == [1]


LAW = np.full(VOCAB, 1 / VOCAB)


@pytest.mark.parametrize("drawn", [0, 1])
def test_a_drawn_tree_is_never_mixed_or_pruned(drawn: int) -> None:
    """Two drafters with passes, of which one draws: its tree stands alone, and nobody fails."""

    def says(name: str, tokens: Sequence[int], law: bool) -> Callable[[DraftRequest], DraftTree]:
        def tree(request: DraftRequest) -> DraftTree:
            plain = DraftTree.chain(tokens, name, [0.02] * len(tokens))
            laws = (LAW,) * len(tokens) if law else ()
            return DraftTree(plain.tokens, plain.parents, name, laws, plain.confidences)

        return tree

    params = SamplingParams(temperature=1.0, acceptance="ratio")
    for tokens in ([4, 5], []):  # what the other one says
        a = Model("a", says("a", [6, 7, 8] if drawn == 0 else tokens, drawn == 0))
        b = Model("b", says("b", [6, 7, 8] if drawn == 1 else tokens, drawn == 1))
        bench = Bench({"a": a, "b": b})
        bench.begin(0, Part("a"), Part("b"), params=params)
        tree = bench.propose()[0]
        if tree.laws:
            assert tree.tokens.tolist() == [6, 7, 8], "a drawn tree is not pruned by what is thought of its tokens"
        assert bench.drafting.failures == 0


def test_a_lookup_that_draws_harms_nobody() -> None:
    """Laws that nobody asked for, at the root and behind drafts."""

    def says(request: DraftRequest) -> DraftTree:
        return DraftTree(np.array([9], np.int32), np.array([-1], np.int32), "a", (LAW,), (0.9,))

    for params in (SamplingParams(), SamplingParams(temperature=1.0, acceptance="ratio")):
        bench = Bench({"a": Lookup("a", says), "b": Model("b", chain("b", [4, 5]))})
        bench.begin(0, Part("a"), Part("b"), params=params)
        for _ in range(3):
            bench.propose()[0].check(VOCAB)


def test_what_was_not_proposed_is_no_miss() -> None:
    """A step in which nobody was asked says nothing of lookups."""
    bench = Bench({"a": Lookup("a", chain("a", [4]))})
    bench.begin(0, Part("a"))
    bench.observe(0, bench.propose()[0], [])
    misses = bench.controller._requests[0].misses["a"]
    for _ in range(5):
        bench.observe(0, DraftTree.empty(), [])
    assert bench.controller._requests[0].misses["a"] == misses == 1


def test_useless_lookups_rest_and_come_back() -> None:
    a = Lookup("a", chain("a", [4], 0.5))
    bench = Bench({"a": a})
    bench.begin(0, Part("a"))
    bench.controller.lookup_ms["a"] = 5.0  # so that it is worth resting
    for _ in range(300):
        bench.controller.lookup_ms["a"] = 5.0
        bench.observe(0, bench.propose()[0], [])
    assert 10 < len(a.asked) < 60
    a.says = chain("a", [4], 0.99)
    stood = 0
    for _ in range(120):
        tree = bench.propose()[0]
        stood += len(tree)
        bench.observe(0, tree, list(range(len(tree))))
    assert stood > 0, "it was never tried again"


def test_decisions_are_counted() -> None:
    bench = Bench({"b": Model("b", chain("b", [4, 5]))})
    bench.begin(0, Part("b"))
    bench.observe(0, bench.propose()[0], [])
    assert bench.controller.decisions["b taken up"] == 1


class _AtStart:
    ONLY_AT_START = True


def test_a_server_refuses_what_only_a_start_can_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    real = speculation_module.drafter_class
    monkeypatch.setattr(speculation_module, "drafter_class", lambda name: _AtStart if name == "draft" else real(name))
    small, other = Part("draft", None, {"model": "small"}), Part("draft", None, {"model": "other"})
    started = Speculation((small, Part("suffix")))
    for wanted in (
        Speculation(),
        Speculation((small,)),
        Speculation((Part("draft", 4, {"model": "small"}),)),  # another k is no other drafter
        Speculation((Part("ngram"), Part("lookahead"))),
        started,
    ):
        check_loaded(wanted, started)
    for refused in (
        Speculation((other,)),
        Speculation((Part("ngram"), other)),
        Speculation((Part("draft", None, {"model": "small", "vocab": "16k"}),)),
    ):
        with pytest.raises(InputError, match="the server was not started with this draft; it can not be added"):
            check_loaded(refused, started)
    with pytest.raises(InputError, match="not started"):
        check_loaded(Speculation((small,)), Speculation())


@pytest.mark.parametrize("text", ["draft:/etc/passwd", "suffix+draft:demo", "layer-skip:auto", "layer-skip:exit=4"])
def test_clients_can_not_load_models(text: str) -> None:
    with pytest.raises(InputError, match="the server was not started with this"):
        check_loaded(parse_speculation(text), parse_speculation("auto"))
