"""The drafters of an engine: who drafts for whom, in which order, and that none of them can hurt."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from pilotfish.control.controller import Controller
from pilotfish.control.cost import Load
from pilotfish.control.offers import Candidate, Offer
from pilotfish.drafters.base import Drafter, DraftRequest, ModelDrafter, Price, TargetPass
from pilotfish.drafters.grammar import GrammarDrafter
from pilotfish.drafters.speculation import Part, Speculation
from pilotfish.metrics import now_ms
from pilotfish.team import Ask, Member, Offered, Team
from pilotfish.tree import DraftTree, Ints, TreeBatch
from pilotfish.watchdog import Watchdog

DRAFT_LIMIT_S = 10.0  # that a drafter may take for one proposal
IDLE_DRAFTERS = 8  # drafters that are kept though no request uses them

_GRAMMAR = "grammar"

logger = logging.getLogger("pilotfish")


class Drafting:
    """Requests choose their drafters; those that ask for the same share one.

    `make` gives the drafter of a part of a speculation. A drafter that fails is parked, for longer each time.
    """

    def __init__(
        self,
        controller: Controller,
        vocab_size: int,
        make: Callable[[Part], Drafter] | None = None,
        limit_s: float = DRAFT_LIMIT_S,
    ) -> None:
        self.failures = 0
        self.controller = controller
        self._vocab_size = vocab_size
        self._make = make or (lambda part: part.make(None))
        self._limit_s = limit_s
        self._watchdog = Watchdog()
        self._members: dict[Hashable, Member] = {}
        self._grammar = Member(GrammarDrafter())
        self._teams: dict[int, Team] = {}
        self._step = 0
        self._offered: dict[int, DraftTree] = {}  # what was drafted in this step, before nodes were left out
        self._asked: dict[int, list[str]] = {}  # lookups that proposed to a request in this step

    def close(self) -> None:
        self._watchdog.close()

    def team(self, speculation: Speculation) -> Team:
        """The drafters that it names. Raises InputError when one can not be had."""
        members: list[tuple[Member, int | None]] = []
        for part in speculation.parts:
            if part.method == _GRAMMAR:
                continue
            key = part.key()
            if key not in self._members:
                self._members[key] = Member(self._make(part))
                if note := getattr(self._members[key].drafter, "note", ""):
                    logger.warning(note)
            else:  # the latest used stand last
                self._members[key] = self._members.pop(key)
            members.append((self._members[key], part.k))
        return self._with_grammar(members, speculation.k, bool(speculation.parts))

    def team_of(self, drafter: Drafter | None, budget: int | None) -> Team:
        """A team of a single drafter, None: nobody drafts."""
        if drafter is None:
            return Team((), budget)
        member = self._members.setdefault(id(drafter), Member(drafter))
        return self._with_grammar([(member, None)], budget, True)

    def pin(self, team: Team) -> None:
        """Keep the team's drafters, whoever uses them."""
        for member, _ in team.members:
            member.pinned = True

    def _with_grammar(self, members: list[tuple[Member, int | None]], fixed: int | None, any_at_all: bool) -> Team:
        return Team(((self._grammar, None), *members) if any_at_all else (), fixed)

    def begin(self, id: int, team: Team) -> None:
        """A request is drafted for by the team."""
        self._teams[id] = team
        for member, _ in team.members:
            member.requests.add(id)
        idle = [key for key, member in self._members.items() if not member.requests and not member.pinned]
        for key in idle[: max(0, len(idle) - IDLE_DRAFTERS)]:
            del self._members[key]

    def end(self, id: int) -> None:
        """The request is over."""
        for member, _ in self._teams.pop(id).members:
            member.requests.discard(id)
            if not member.lost:
                self._run(member, lambda member=member: member.drafter.end(id))  # type: ignore[misc]

    def speculates(self, id: int) -> bool:
        """Whether anyone drafts for the request."""
        return bool(self._teams[id].members)

    def fixed(self, id: int) -> int | None:
        """The request's draft budget where it is fixed."""
        return self._teams[id].fixed

    def room(self, id: int, most: int) -> int:
        """Draft rows that a plan should keep free for the request."""
        team = self._teams[id]
        if not any(self._ready(member) for member, _ in team.members):
            return 0
        return self.controller.room(id, most) if team.fixed is None else team.fixed

    def step(self) -> None:
        """A step of the engine begins."""
        self._step += 1
        self.controller.step()

    def propose(self, asks: Sequence[Ask], base: Load, emitting: Sequence[int]) -> list[DraftTree]:
        """A legal tree for every ask, beside a pass of `base` in which the requests `emitting` get a token.

        A drafter can fail, a request can not: it then has no drafts of it.
        """
        started = now_ms()
        self._offered = {}
        found = [Offered() for _ in asks]
        adaptive = [index for index, ask in enumerate(asks) if self._teams[ask.request.id].fixed is None]
        self._fixed(asks, found)
        if adaptive:
            self._lookups(asks, found, adaptive)
            self._passes(asks, found, adaptive, base, emitting)
            fixed_rows = sum(len(tree.tree) for index, tree in enumerate(found) if index not in adaptive)
            load = Load(base.rows + fixed_rows, base.context, base.work, base.outputs and base.outputs + fixed_rows)
            offers = [Offer(asks[i].request.id, found[i].survivals, asks[i].context, found[i].whole) for i in adaptive]
            kept = self.controller.keep(load, emitting, now_ms() - started, offers)
            for index, keep in zip(adaptive, kept, strict=True):
                request, tree = asks[index].request, found[index].tree
                self._offered[request.id] = tree
                firsts: dict[str, float] = {}
                for node in range(len(tree)):
                    if keep[node] and tree.parents[node] < 0:
                        name = tree.all_drafters()[node]
                        firsts[name] = max(firsts.get(name, 0.0), found[index].survivals[node])
                self.controller.used(request.id, firsts)
                if not (request.draws and tree.laws) and not all(keep):
                    found[index].tree = tree.select(keep)
        self._asked = {ask.request.id: offered.asked for ask, offered in zip(asks, found, strict=True)}
        return [offered.tree for offered in found]

    def observe(
        self,
        id: int,
        tree: DraftTree,
        path: Sequence[int],
        accepted: int,
        choices: Ints | None,
        tokens: Sequence[int],
    ) -> None:
        """What became of a request's tree: the accepted path, of which the request took `accepted` nodes."""
        team = self._teams[id]
        offered = self._offered.pop(id, tree)
        followed = path if _drawn(offered) else offered.follow(tokens)
        self.controller.acceptance.learn(id, offered, followed, len(tokens))
        on_path = [tree.all_drafters()[node] for node in path[:accepted]]
        asked = {name: on_path.count(name) for name in self._asked.pop(id, ())}
        self.controller.observe_drafts(id, asked, accepted)
        if choices is not None:
            for member, _ in team.members:
                if member.observes and self._ready(member):
                    self._run(member, lambda drafter=member.drafter: drafter.observe(id, tree, choices))  # type: ignore[misc]

    def target_pass(self, batch: TreeBatch, logits: bool, ids: Sequence[int], trees: Sequence[DraftTree]) -> Any:
        """The target's pass (program.Result), where a drafter has computed a part of it; None: nobody has."""
        for member in self._members.values():
            if member.passes_on and member.requests and self._ready(member):
                found: list[Any] = []
                pass_on = partial(cast(TargetPass, member.drafter).target_pass, batch, logits, ids, trees)
                self._run(member, lambda found=found, pass_on=pass_on: found.append(pass_on()))  # type: ignore[misc]
                if found and found[0] is not None:
                    return found[0]
        return None

    def observes(self, id: int) -> bool:
        """Whether a drafter of the request wants to see the target's choices."""
        return any(member.observes for member, _ in self._teams[id].members)

    def _fixed(self, asks: Sequence[Ask], found: list[Offered]) -> None:
        """Requests with a fixed budget: the grammar first, else their drafter, whatever it costs."""
        groups: dict[int, tuple[Member, list[int]]] = {}
        for index, ask in enumerate(asks):
            team = self._teams[ask.request.id]
            if team.fixed is not None:
                for member, _ in team.members:
                    groups.setdefault(_identity(member), (member, []))[1].append(index)
        for member, indices in groups.values():
            wanted = [index for index in indices if not len(found[index].tree)]
            for index, tree in self._ask(member, asks, wanted, [asks[index].request for index in wanted], None):
                found[index].tree = tree

    def _lookups(self, asks: Sequence[Ask], found: list[Offered], adaptive: Sequence[int]) -> None:
        """Drafters without passes propose for everyone; the tree with the most expected tokens is taken."""
        groups: dict[int, tuple[Member, list[int]]] = {}
        for index in adaptive:
            id = asks[index].request.id
            for member, _ in self._teams[id].members:
                if not member.has_passes and self.controller.wants_lookup(id, member.name):
                    groups.setdefault(_identity(member), (member, []))[1].append(index)
        for member, indices in groups.values():
            if member is self._grammar:
                indices = [index for index in indices if asks[index].request.forced]
            requests = [self._capped(member, asks[index].request) for index in indices]
            started = now_ms()
            for index, tree in self._ask(member, asks, indices, requests, None):
                self._offer(asks[index].request.id, member, found[index], tree)
            if indices:
                self.controller.took_lookup(member.name, now_ms() - started, len(indices))
        for index in adaptive:
            self._extend(asks, index, found[index])

    def _offer(self, id: int, member: Member, found: Offered, tree: DraftTree) -> None:
        """Take the tree instead of what there is if more is to be expected of it."""
        if member is not self._grammar:
            found.asked.append(member.name)
        survivals = self.controller.acceptance.survivals(id, tree)
        if sum(survivals) > found.gain:
            found.tree, found.survivals, found.whole = tree, survivals, member.whole

    def _passes(
        self, asks: Sequence[Ask], found: list[Offered], adaptive: Sequence[int], base: Load, emitting: Sequence[int]
    ) -> None:
        """Drafters with passes propose where that is expected to pay, one after the other."""
        groups: dict[int, tuple[Member, list[int]]] = {}
        for index in adaptive:
            for member, _ in self._teams[asks[index].request.id].members:
                if member.has_passes and self._ready(member):
                    groups.setdefault(_identity(member), (member, []))[1].append(index)
        for member, indices in groups.values():
            candidates = []
            for index in indices:
                request = self._capped(member, asks[index].request)
                backlog = self._backlog(member, request)
                if backlog is not None:
                    most = min(request.budget, request.max_depth)
                    left = request.max_depth
                    context, gain = asks[index].context, found[index].gain
                    candidates.append(Candidate(request.id, member.name, most, backlog, left, context, gain))
            if not candidates:
                continue
            choice = self.controller.choose(base, emitting, candidates)
            chosen = [index for index in indices if asks[index].request.id in choice.ids]
            price = Price(
                choice.tokens_per_ms,
                choice.pass_ms,
                partial(self.controller.row_ms, choice.load),
                lambda id, depth, confidence, name=member.name: self.controller.acceptance.chance(  # type: ignore[misc]
                    id, name, depth, confidence
                ),
            )
            requests = [self._capped(member, asks[index].request) for index in chosen]
            for index, tree in self._ask(member, asks, chosen, requests, price):
                self._join(asks[index].request, found[index], tree)
            for index in chosen:
                self._extend(asks, index, found[index])

    def _join(self, request: DraftRequest, found: Offered, tree: DraftTree) -> None:
        """Put what a drafter with passes drafted and what there was into one tree."""
        if len(found.tree) and not _drawn(tree) and not _drawn(found.tree) and not found.whole:
            tree = tree.graft(-1, found.tree, request.budget)
        if len(tree):
            found.tree, found.whole = tree, False
            found.survivals = self.controller.acceptance.survivals(request.id, tree)

    def _extend(self, asks: Sequence[Ask], index: int, found: Offered) -> None:
        """Let the request's lookups go on behind the likeliest branch."""
        request, tree = asks[index].request, found.tree
        if not len(tree) or found.whole or (request.draws and tree.laws):
            return
        path = _likeliest(tree, found.survivals)
        leaf = path[-1]
        budget, depth = request.budget - len(tree), request.max_depth - len(path)
        if budget < 1 or depth < 1 or found.survivals[leaf] < 0.5:
            return
        drafted = tree.tokens[path].tolist()
        for member, _ in self._teams[request.id].members:
            if member.has_passes or member.whole or member is self._grammar or not self._ready(member):
                continue
            if self.controller.rests(request.id, member.name):
                continue
            # What it has in the tree already counts to its own most.
            most = self._cap(member, request) - found.tree.all_drafters().count(member.name)
            if most < 1:
                continue
            more = replace(request, budget=min(budget, most), max_depth=depth, drafted=drafted)
            started = now_ms()
            for _, longer in self._ask(member, asks, [index], [more], None, prefix=drafted):
                if len(longer) and not _drawn(longer):
                    found.tree = asks[index].legal(tree.graft(leaf, longer, request.budget))
                    found.survivals = self.controller.acceptance.survivals(request.id, found.tree)
                    self.controller.took_lookup(member.name, now_ms() - started, 1)
                    return

    def _cap(self, member: Member, request: DraftRequest) -> int:
        cap = next(cap for other, cap in self._teams[request.id].members if other is member)
        return request.budget if cap is None else min(cap, request.budget)

    def _capped(self, member: Member, request: DraftRequest) -> DraftRequest:
        cap = self._cap(member, request)
        return request if cap == request.budget else replace(request, budget=cap)

    def _backlog(self, member: Member, request: DraftRequest) -> int | None:
        drafter = member.drafter
        assert isinstance(drafter, ModelDrafter)
        found: list[int] = []

        def ask() -> None:
            backlog = operator.index(drafter.backlog(request))
            if backlog < 0:
                raise ValueError(f"a backlog of {backlog} rows")
            found.append(backlog)

        if self._ready(member):  # it may have failed a moment ago, for another request
            self._run(member, ask)
        return found[0] if found else None

    def _ask(
        self,
        member: Member,
        asks: Sequence[Ask],
        indices: Sequence[int],
        requests: Sequence[DraftRequest],
        price: Price | None,
        prefix: Sequence[int] = (),
    ) -> list[tuple[int, DraftTree]]:
        """The legal, sound trees that a drafter proposes, none if it fails."""
        if not requests or not self._ready(member):
            return []
        found: list[tuple[int, DraftTree]] = []

        def propose() -> None:
            trees = member.drafter.propose(requests, price)
            for index, request, tree in zip(indices, requests, trees, strict=True):
                tree.check(self._vocab_size)
                if len(tree) > request.budget or tree.depths().max(initial=0) > request.max_depth:
                    raise ValueError(f"a tree of {len(tree)} nodes exceeds its budget of {request.budget}")
                if not isinstance(tree.confidences, tuple) or not all(isinstance(n, str) for n in tree.all_drafters()):
                    raise ValueError("confidences must be a tuple, and drafters have names")
                found.append((index, tree))

        ok = self._run(member, propose)
        drafter = member.drafter
        if isinstance(drafter, ModelDrafter) and not member.lost:
            ok &= self._run(member, lambda: self._take_passes(member.name, drafter))
        if not ok:
            return []
        member.failures = 0
        return [(index, tree if prefix else asks[index].legal(tree)) for index, tree in found]

    def _take_passes(self, name: str, drafter: ModelDrafter) -> None:
        passes, drafter.passes = drafter.passes, []
        for batch, ms in passes:
            self.controller.observe_draft_pass(name, Load.of(batch), ms)

    def _ready(self, member: Member) -> bool:
        return member.ready(self._step)

    def _run(self, member: Member, action: Callable[[], object]) -> bool:
        ok = member.run(action, self._watchdog, self._limit_s, self._step)
        self.failures += not ok
        return ok


def _drawn(tree: DraftTree) -> bool:
    return any(law is not None for law in tree.laws)


def _likeliest(tree: DraftTree, survivals: Sequence[float]) -> list[int]:
    """The branch from the root that takes the likeliest child each time."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    node = -1
    while node in children:
        node = max(children[node], key=lambda child: survivals[child])
        path.append(node)
    return path


def _identity(member: Member) -> int:
    return id(member)
