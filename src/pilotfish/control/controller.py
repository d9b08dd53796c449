"""How much to speculate, on what, and when not to: the most expected tokens per millisecond of the whole step.

A step of N generating requests whose drafts survive with the chances s brings E = N + sum of s tokens and takes
T = drafting + a pass of all rows, prompts' rows included. Drafts are admitted best first while E / T grows (the greedy
rule gives the best ratio, as chances fall along each branch: Dinkelbach 1967). A drafter that takes passes of its own
is asked only when that is expected to raise E / T, its own time and its backlog counted.
What is not used is tried again when a hundredth of the time since then pays for the attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pilotfish.control.acceptance import Acceptance, Experience
from pilotfish.control.cost import CostModel, Load
from pilotfish.request import Report

HYSTERESIS = 0.03  # a drafter is taken up or given up for more than this share of the rate only
PROBE_SHARE = 0.01  # of the time may go to drafters that did not seem to pay
HORIZON = 64  # tokens over which a backlog must pay for itself, where the request has so many left
LEAST_ROOM, FIRST_ROOM = 4, 8
MISSES = 4  # proposals of a lookup without any effect before it rests
LONGEST_REST = 16  # steps
NEGLIGIBLE = 0.004  # share of a step that a lookup may take without ever resting
MEMORY = 0.9  # of running means


def unknown_costs() -> CostModel:
    """A machine that nothing is known of: flat for some rows, then linear. Real passes correct it."""
    return CostModel.fit([(Load(rows), 10 * max(1.0, rows / 12)) for rows in (1, 2, 4, 8, 16, 32, 64, 512)])


@dataclass(frozen=True)
class Offer:
    """The drafts of one request that could be verified."""

    id: int
    survivals: Sequence[float]  # of each node: the chance to be emitted; a child's is no higher than its parent's
    context: int  # tokens that each node attends to
    whole: bool = False  # all of them or none


@dataclass(frozen=True)
class Candidate:
    """A request that a drafter with passes could draft for."""

    id: int
    drafter: str
    most: int  # drafts
    backlog: int  # rows that come first
    remaining: int  # tokens the request may still have
    context: int
    gain: float  # tokens that drafts it has already are expected to bring


@dataclass(frozen=True)
class Choice:
    """Which of the candidates to draft for, and what time is worth in this step."""

    ids: frozenset[int]
    tokens_per_ms: float
    pass_ms: float
    row_ms: float


@dataclass(frozen=True)
class StepShare:
    """One request's part of a step's times."""

    draft_ms: float
    verify_ms: float
    step_ms: float
    plain_ms: float  # of one token without drafts


@dataclass
class _Request:
    latency_target_ms: float | None
    room: float = FIRST_ROOM
    misses: Counter[str] = field(default_factory=Counter)
    rests: dict[str, int] = field(default_factory=dict)  # lookup -> steps that it still rests
    drafting: set[str] = field(default_factory=set)  # drafters with passes that the last step used
    credit_ms: dict[str, float] = field(default_factory=dict)  # time that may be spent on trying them again
    report: Report = field(default_factory=Report)


class Controller:
    """Decides for all requests of an engine. Times are in milliseconds."""

    def __init__(self, costs: CostModel | None = None, experience: Experience | None = None) -> None:
        self.costs = costs or unknown_costs()  # of the target's passes
        self.acceptance = Acceptance(experience)
        self.draft_costs = self.acceptance.experience.pass_costs
        self.lookup_ms = self.acceptance.experience.lookup_ms
        self.decisions: Counter[str] = Counter()
        self._requests: dict[int, _Request] = {}

    def begin(self, id: int, latency_target_ms: float | None = None) -> None:
        self._requests[id] = _Request(latency_target_ms)

    def end(self, id: int) -> None:
        self._requests.pop(id, None)
        self.acceptance.end(id)

    def report(self, id: int) -> Report:
        return self._requests[id].report

    def room(self, id: int, most: int) -> int:
        """Draft rows to keep free for a request in the plan of a step: twice what it used lately."""
        return min(most, int(2 * self._requests[id].room) + LEAST_ROOM)

    def wants_lookup(self, id: int, drafter: str) -> bool:
        """Whether a lookup is asked in this step; one without effect rests, for longer each time."""
        request = self._requests[id]
        left = request.rests.get(drafter, 0)
        if left:
            request.rests[drafter] = left - 1
            return False
        return True

    def took_lookup(self, drafter: str, ms: float, requests: int) -> None:
        """A lookup took so long for so many requests."""
        each = ms / max(1, requests)
        before = self.lookup_ms.get(drafter, each)
        self.lookup_ms[drafter] = MEMORY * before + (1 - MEMORY) * min(each, 4 * before)

    def choose(self, base: Load, emitting: int, candidates: Sequence[Candidate]) -> Choice:
        """Whom a drafter with passes (the same for all candidates) should draft for, beside a pass of `base`.

        `emitting` requests of the step get a token whatever is drafted.
        """
        gains = {candidate.id: candidate.gain for candidate in candidates}
        spare = sum(gains.values())
        plain_rate = (emitting + spare) / self.costs.ms(self._grown(base, [(c.gain, c.context) for c in candidates]))
        best = Choice(frozenset(), plain_rate, 0.0, self._row_ms(base))
        drafter = candidates[0].drafter
        costs = self.draft_costs.get(drafter)
        if costs is None:  # the first time tells
            self._decide(candidates, frozenset(gains), drafter)
            return Choice(frozenset(gains), plain_rate, 0.0, self._row_ms(base))
        survivals = {candidate.id: self._expected(candidate) for candidate in candidates}
        order = sorted(candidates, key=lambda c: sum(survivals[c.id]) - c.gain, reverse=True)
        best_value = plain_rate
        for count in range(1, len(order) + 1):
            chosen = order[:count]
            found = self._best_depth(base, emitting, spare, chosen, survivals, costs)
            held = sum(drafter in self._requests[c.id].drafting for c in chosen) / count
            value = found.tokens_per_ms * (1 + HYSTERESIS * (2 * held - 1))
            if value > best_value:
                best, best_value = found, value
        probes = self._probes(order, best, costs)
        if probes:
            pass_ms = costs.ms(Load(len(best.ids | probes)))
            best = Choice(best.ids | probes, best.tokens_per_ms, pass_ms, best.row_ms)
        self._decide(candidates, best.ids, drafter)
        return best

    def keep(self, base: Load, emitting: int, draft_ms: float, offers: Sequence[Offer]) -> list[list[bool]]:
        """Which nodes of each offer to verify: those that bring the most tokens per millisecond of the step.

        Where requests have a latency target, only sets that keep it count; if none does, the one nearest to it.
        """
        keep = [[False] * len(offer.survivals) for offer in offers]
        # A whole tree is as good as the mean of its nodes.
        steps: list[tuple[float, int, int, int]] = []  # (-survival, offer, node or -1, nodes)
        for index, offer in enumerate(offers):
            if not offer.survivals:
                continue
            if offer.whole:
                count = len(offer.survivals)
                steps.append((-sum(offer.survivals) / count, index, -1, count))
            else:
                steps += [(-survival, index, node, 1) for node, survival in enumerate(offer.survivals)]
        steps.sort()
        targets = {
            offer_index: target
            for offer_index, offer in enumerate(offers)
            if (target := self._target(offer.id)) is not None
        }
        others = self._other_targets(offers)
        rows, work, tokens = base.rows, base.work, float(emitting)
        expected = [1.0] * len(offers)
        best, best_key = 0, self._key(base, rows, work, tokens, draft_ms, targets, others, expected)
        for taken, (survival, index, _, count) in enumerate(steps, 1):
            rows += count
            work += count * offers[index].context
            tokens -= survival * count
            expected[index] -= survival * count
            key = self._key(base, rows, work, tokens, draft_ms, targets, others, expected)
            if key > best_key:
                best, best_key = taken, key
        for _, index, node, _ in steps[:best]:
            if node < 0:
                keep[index] = [True] * len(keep[index])
            else:
                keep[index][node] = True
        return keep

    def observe_pass(self, load: Load, ms: float) -> None:
        """The target's pass took so long."""
        self.costs.observe(load, ms)

    def observe_draft_pass(self, drafter: str, load: Load, ms: float) -> None:
        """A pass of a drafter took so long."""
        if drafter not in self.draft_costs:
            self.draft_costs[drafter] = CostModel.fit([(Load(1, outputs=1), ms / max(1.0, load.rows / 12))])
        self.draft_costs[drafter].observe(load, ms)

    def account(self, id: int, what: str, emitted: int, step: StepShare) -> None:
        """One step of a request in its report."""
        report = self._requests[id].report
        report.steps[what] += 1
        report.draft_ms += step.draft_ms
        report.verify_ms += step.verify_ms
        report.step_ms += step.step_ms
        report.plain_ms += emitted * step.plain_ms
        for drafter in list(self._requests[id].credit_ms):
            self._requests[id].credit_ms[drafter] += PROBE_SHARE * step.step_ms

    def observe_drafts(self, id: int, drafters: Mapping[str, int], proposed: int, accepted: int) -> None:
        """What became of a step's drafts: how many each lookup has in the accepted path (0 for one without effect)."""
        request = self._requests[id]
        request.room = max(accepted, MEMORY * request.room)
        plain_ms = self.costs.ms(Load(1))
        for drafter, stood in drafters.items():
            if stood:
                request.misses[drafter] = 0
            else:
                request.misses[drafter] += 1
                over = request.misses[drafter] - MISSES
                if over >= 0 and self.lookup_ms.get(drafter, 0.0) > NEGLIGIBLE * plain_ms:
                    request.rests[drafter] = min(2**over, LONGEST_REST)

    def plain_ms(self, contexts: Sequence[int]) -> float:
        """A pass of one row for each request with these contexts."""
        total = sum(contexts)
        return self.costs.ms(Load(len(contexts), total, total))

    def check(self) -> None:
        """Prove the invariants of what was learnt; raises AssertionError."""
        self.acceptance.check()
        self.costs.check()

    def _best_depth(
        self,
        base: Load,
        emitting: int,
        spare: float,
        chosen: Sequence[Candidate],
        survivals: Mapping[int, Sequence[float]],
        costs: CostModel,
    ) -> Choice:
        """Drafting for `chosen` to the depth of the best rate."""
        count = len(chosen)
        pass_ms = costs.ms(Load(count, outputs=count))
        backlog = sum(candidate.backlog for candidate in chosen)
        # What is caught up now serves later steps too: each pays by its tokens.
        tokens_left = max(1, min(HORIZON, max(candidate.remaining for candidate in chosen)))
        catch_up_ms = costs.ms(Load(count + backlog, outputs=count)) - pass_ms
        gained = spare - sum(candidate.gain for candidate in chosen)
        best = Choice(frozenset(), 0.0, pass_ms, 0.0)
        tokens, work, rows = float(emitting + gained), 0, 0
        most = max(candidate.most for candidate in chosen)
        for depth in range(most):
            for candidate in chosen:
                if depth < len(survivals[candidate.id]):
                    tokens += survivals[candidate.id][depth]
                    rows += 1
                    work += candidate.context
            load = Load(base.rows + rows, base.context, base.work + work, base.outputs and base.outputs + rows)
            time = self.costs.ms(load) + (depth + 1) * pass_ms
            share = min(1.0, tokens / count / tokens_left)
            rate = tokens / (time + share * catch_up_ms)
            if rate > best.tokens_per_ms:
                best = Choice(frozenset(c.id for c in chosen), rate, pass_ms, self._row_ms(load))
            elif depth > 1:
                break
        return best

    def _expected(self, candidate: Candidate) -> list[float]:
        """The chance that a draft at each depth is emitted."""
        survivals: list[float] = []
        survival = 1.0
        for depth in range(1, candidate.most + 1):
            survival *= self.acceptance.chance_at(candidate.id, candidate.drafter, depth)
            survivals.append(survival)
        return survivals

    def _probes(self, order: Sequence[Candidate], best: Choice, costs: CostModel) -> frozenset[int]:
        """Requests whose drafter is tried again, as the time that may be spent on that has come together."""
        probes = set()
        for candidate in order:
            request = self._requests[candidate.id]
            if candidate.id in best.ids:
                request.credit_ms.pop(candidate.drafter, None)
            elif request.credit_ms.get(candidate.drafter, 0.0) > costs.ms(Load(1 + candidate.backlog, outputs=1)):
                request.credit_ms[candidate.drafter] = 0
                probes.add(candidate.id)
                self.decisions["tried again"] += 1
        return frozenset(probes)

    def _decide(self, candidates: Sequence[Candidate], ids: frozenset[int], drafter: str) -> None:
        for candidate in candidates:
            drafting = self._requests[candidate.id].drafting
            if (candidate.id in ids) != (drafter in drafting):
                self.decisions[f"{drafter} {'taken up' if candidate.id in ids else 'parked'}"] += 1
            if candidate.id in ids:
                drafting.add(drafter)
            else:
                drafting.discard(drafter)
                self._requests[candidate.id].credit_ms.setdefault(drafter, 0.0)  # from now on time counts

    def _target(self, id: int) -> float | None:
        request = self._requests.get(id)
        return None if request is None else request.latency_target_ms

    def _other_targets(self, offers: Sequence[Offer]) -> float:
        """The tightest target of running requests that have no drafts to be kept."""
        offered = {offer.id for offer in offers}
        targets = [
            request.latency_target_ms
            for id, request in self._requests.items()
            if request.latency_target_ms is not None and id not in offered
        ]
        return min(targets, default=0.0)

    def _key(
        self,
        base: Load,
        rows: int,
        work: int,
        tokens: float,
        draft_ms: float,
        targets: Mapping[int, float],
        others: float,
        expected: Sequence[float],
    ) -> tuple[float, float]:
        """What a set of drafts is worth: how far it misses latency targets, then its rate."""
        outputs = None if base.outputs is None else base.outputs + rows - base.rows
        ms = draft_ms + self.costs.ms(Load(rows, base.context, work, outputs))
        missed = 1.0
        if targets or others:
            ratios = [ms / (target * expected[index]) for index, target in targets.items()]
            if others:
                ratios.append(ms / others)
            missed = max(1.0, *ratios)
        return -missed, tokens / ms

    def _grown(self, base: Load, grown: Sequence[tuple[float, int]]) -> Load:
        """`base` with the rows that bring expected tokens; about one row each."""
        rows = sum(round(gain) for gain, _ in grown)
        work = sum(round(gain) * context for gain, context in grown)
        return Load(base.rows + rows, base.context, base.work + work, base.outputs and base.outputs + rows)

    def _row_ms(self, load: Load) -> float:
        """One more row for the target, as the mean over the next four: times rise in steps."""
        more = Load(load.rows + 4, load.context, load.work, load.outputs and load.outputs + 4)
        return (self.costs.ms(more) - self.costs.ms(load)) / 4
