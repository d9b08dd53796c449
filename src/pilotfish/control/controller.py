"""How much to speculate, on what, and when not to: the most expected tokens per millisecond of the whole step.

A step of N generating requests whose drafts survive with the chances s brings E = N + sum of s tokens and takes
T = drafting + a pass of all rows, prompts' rows included. Drafts are admitted best first while E / T grows (the greedy
rule gives the best ratio, as chances fall along each branch: Dinkelbach 1967). A drafter that takes passes of its own
is asked only when that is expected to raise E / T, its own time and its backlog counted.
What is not used is tried again when a hundredth of the time since then pays for the attempt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pilotfish.control.acceptance import Acceptance, Experience, Fading
from pilotfish.control.cost import CostModel, Load
from pilotfish.control.offers import Candidate, Choice, Offer, StepShare
from pilotfish.request import Report

HYSTERESIS = 0.03  # a drafter is taken up or given up for more than this share of the rate only
PROBE_SHARE = 0.01  # of the time may go to drafters that did not seem to pay
FIRST_CHANCES = 4  # steps in which a drafter is asked whatever it seems to be worth
MOST_CATCH_UP = 3  # times that, for what they have to catch up before
HORIZON = 32  # tokens over which a backlog must pay for itself: answers often end before their limit
LEAST_ROOM, FIRST_ROOM = 4, 8
MISSES = 4  # proposals of a lookup without any effect before it rests
LONGEST_REST = 4  # power of two: steps
NEGLIGIBLE = 0.004  # share of a step that a lookup may take without ever resting
MEMORY = 0.9  # of running means
YIELD_STEP, YIELD_FADE, MOST_YIELD = 0.08, 0.995, 4.0


def unknown_costs() -> CostModel:
    """A machine that nothing is known of: flat for some rows, then linear. Real passes correct it."""
    return _scaled_costs(10.0)


def _scaled_costs(row_ms: float) -> CostModel:
    return CostModel.fit([(Load(rows), row_ms * max(1.0, rows / 12)) for rows in (1, 2, 4, 8, 16, 32, 64, 512)])


@dataclass
class _Request:
    latency_target_ms: float | None
    room: float = FIRST_ROOM
    misses: Counter[str] = field(default_factory=Counter)
    rests: dict[str, int] = field(default_factory=dict)  # lookup -> steps that it still rests
    drafting: set[str] = field(default_factory=set)  # drafters with passes that seemed to pay in the last step
    expected: dict[str, float] = field(default_factory=dict)  # chance of the first draft of those asked in this step
    yields: dict[str, Fading] = field(default_factory=dict)  # what was kept of it, on the mean
    report: Report = field(default_factory=Report)


class Controller:
    """Decides for all requests of an engine. Times are in milliseconds."""

    def __init__(self, costs: CostModel | None = None, experience: Experience | None = None) -> None:
        self.costs = costs or unknown_costs()  # of the target's passes
        self.acceptance = Acceptance(experience)
        self.draft_costs = self.acceptance.experience.pass_costs
        self.lookup_ms = self.acceptance.experience.lookup_ms
        self.decisions: Counter[str] = Counter()
        self._credit_ms: dict[str, float] = {}  # that may be spent on trying drafters again
        self._requests: dict[int, _Request] = {}

    def step(self) -> None:
        """A step of the engine begins."""
        self.acceptance.experience.step += 1

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

    def rests(self, id: int, drafter: str) -> bool:
        """Whether a lookup rests for the request in this step."""
        return bool(self._requests[id].rests.get(drafter))

    def took_lookup(self, drafter: str, ms: float, requests: int) -> None:
        """A lookup took so long for so many requests."""
        each = ms / max(1, requests)
        before = self.lookup_ms.get(drafter, each)
        self.lookup_ms[drafter] = MEMORY * before + (1 - MEMORY) * min(each, 4 * before)

    def choose(self, base: Load, emitting: Sequence[int], candidates: Sequence[Candidate]) -> Choice:
        """Whom a drafter with passes (the same for all candidates) should draft for, beside a pass of `base`.

        The requests `emitting` get a token of the step whatever is drafted.
        """
        gains = {candidate.id: candidate.gain for candidate in candidates}
        load = self._grown(base, candidates)
        prompts_ms = self._prompts_ms(base, emitting)
        plain_ms = self.costs.ms(load)
        plain_rate = (len(emitting) + sum(gains.values())) / (plain_ms - prompts_ms)
        best = Choice(frozenset(), plain_rate, 0.0, load)
        drafter = candidates[0].drafter
        costs = self.draft_costs.get(drafter)
        if costs is None:  # the first time tells
            self._decide(candidates, frozenset(gains), drafter)
            return Choice(frozenset(gains), plain_rate, 0.0, load)
        survivals = {candidate.id: self._expected(candidate) for candidate in candidates}
        order = sorted(candidates, key=lambda c: sum(survivals[c.id]) - c.gain, reverse=True)
        best_value = plain_rate
        limit_ms = max(plain_ms, self._limit_ms(emitting, gains))
        for count in range(1, len(order) + 1):
            chosen, others = order[:count], order[count:]
            found = self._best_depth(base, len(emitting), chosen, others, survivals, costs, prompts_ms, limit_ms)
            held = sum(drafter in self._requests[c.id].drafting for c in order[:count]) / count
            value = found.tokens_per_ms * (1 + HYSTERESIS * (2 * held - 1))
            if value > best_value:
                best, best_value = found, value
        self._decide(candidates, best.ids, drafter)
        probes = self._probes([candidate for candidate in order if candidate.id not in best.ids], best, costs, plain_ms)
        if probes:
            pass_ms = costs.ms(Load(len(best.ids | probes)))
            best = Choice(best.ids | probes, best.tokens_per_ms, pass_ms, best.load)
        for candidate in candidates:
            if candidate.id in best.ids:
                first = self.acceptance.chance_at(candidate.id, drafter, 1)
                self._requests[candidate.id].expected[drafter] = first
        return best

    def used(self, id: int, kept: Mapping[str, float]) -> None:
        """What was kept of the drafters with passes that were asked for the request: the chance of their first draft.

        A drafter that is asked and then has nothing to say that is worth a row costs time and shows nowhere else.
        """
        request, now = self._requests[id], self.acceptance.experience.step
        for drafter, expected in request.expected.items():
            found = request.yields.setdefault(drafter, Fading(1.0, YIELD_FADE))
            before = found.at(now)
            found.set(before + YIELD_STEP * (min(MOST_YIELD, kept.get(drafter, 0.0) / expected) - before), now)
        request.expected.clear()

    def keep(self, base: Load, emitting: Sequence[int], draft_ms: float, offers: Sequence[Offer]) -> list[list[bool]]:
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
        offered = {offer.id for offer in offers}
        others = min((t for id in emitting if id not in offered and (t := self._target(id)) is not None), default=0.0)
        rows, work, tokens = base.rows, base.work, float(len(emitting))
        prompts_ms = self._prompts_ms(base, emitting)
        expected = [1.0] * len(offers)
        best, best_key = 0, self._key(base, rows, work, tokens, draft_ms, prompts_ms, targets, others, expected)
        for taken, (survival, index, _, count) in enumerate(steps, 1):
            rows += count
            work += count * offers[index].context
            tokens -= survival * count
            expected[index] -= survival * count
            key = self._key(base, rows, work, tokens, draft_ms, prompts_ms, targets, others, expected)
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
            self.draft_costs[drafter] = _scaled_costs(ms / max(1.0, load.rows / 12))
        self.draft_costs[drafter].observe(load, ms)

    def account(self, id: int, what: str, emitted: int, step: StepShare) -> None:
        """One step of a request in its report."""
        report = self._requests[id].report
        report.steps[what] += 1
        report.draft_ms += step.draft_ms
        report.verify_ms += step.verify_ms
        report.step_ms += step.step_ms
        report.plain_ms += step.first_ms + (emitted - 1) * step.more_ms

    def observe_drafts(self, id: int, drafters: Mapping[str, int], accepted: int) -> None:
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
                    request.rests[drafter] = 2 ** min(over, LONGEST_REST)

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
        chosen: Sequence[Candidate],
        others: Sequence[Candidate],
        survivals: Mapping[int, Sequence[float]],
        costs: CostModel,
        prompts_ms: float,
        limit_ms: float,
    ) -> Choice:
        """Drafting for `chosen` to the depth of the best rate, `others` keeping what drafts they have."""
        count = len(chosen)
        pass_ms = costs.ms(Load(count, outputs=count))
        backlog = sum(candidate.backlog for candidate in chosen)
        # What is caught up now serves later steps too: each pays by its tokens.
        tokens_left = max(1, min(HORIZON, max(candidate.remaining for candidate in chosen)))
        catch_up_ms = costs.ms(Load(count + backlog, outputs=count)) - pass_ms
        load = before = self._grown(base, others)
        best = Choice(frozenset(), 0.0, pass_ms, before)
        tokens = emitting + sum(candidate.gain for candidate in others)
        for depth in range(max(candidate.most for candidate in chosen)):
            drafted = [candidate for candidate in chosen if depth < len(survivals[candidate.id])]
            tokens += sum(survivals[candidate.id][depth] for candidate in drafted)
            load = _more(load, len(drafted), sum(candidate.context for candidate in drafted))
            ms = self.costs.ms(load) + (depth + 1) * pass_ms
            rate = tokens / (ms - prompts_ms + min(1.0, tokens / count / tokens_left) * catch_up_ms)
            if ms > limit_ms:
                break
            if rate > best.tokens_per_ms:
                best = Choice(frozenset(c.id for c in chosen), rate, pass_ms, before)
            elif depth > 1:
                break
        return best

    def _expected(self, candidate: Candidate) -> list[float]:
        """The chance that a draft at each depth is made, kept and emitted."""
        survivals: list[float] = []
        survival = 1.0
        if found := self._requests[candidate.id].yields.get(candidate.drafter):
            survival = found.at(self.acceptance.experience.step)
        for depth in range(1, candidate.most + 1):
            survival *= self.acceptance.chance_at(candidate.id, candidate.drafter, depth)
            survivals.append(min(1.0, survival))
        return survivals

    def _probes(self, parked: Sequence[Candidate], best: Choice, costs: CostModel, step_ms: float) -> frozenset[int]:
        """Requests whose drafter is tried again, all together, as one pass serves them all.

        Whatever a drafter seems to be worth, it has one chance; then it takes the time that a share of steps without
        it allows.
        """
        if not parked:
            return frozenset()
        drafter = parked[0].drafter
        tried = self.acceptance.experience.tried
        credit = self._credit_ms.get(drafter, 0.0) + PROBE_SHARE * step_ms
        self._credit_ms[drafter] = credit
        before = len(best.ids)
        before_ms = costs.ms(Load(before)) if before else 0.0

        def affordable(probed: Sequence[Candidate]) -> bool:
            rows = before + len(probed)
            catch_up_ms = costs.ms(Load(rows + sum(candidate.backlog for candidate in probed))) - costs.ms(Load(rows))
            return credit >= costs.ms(Load(rows)) - before_ms and MOST_CATCH_UP * credit >= catch_up_ms

        if tried[drafter] >= FIRST_CHANCES and not affordable(parked):
            # All of them grow faster than the credit does where rows are dear; one of them tells of all.
            parked = [min(parked, key=lambda candidate: candidate.backlog)]
            if not affordable(parked):
                return frozenset()
        tried[drafter] += 1
        self._credit_ms[drafter] = 0
        self.decisions[f"{drafter} tried again"] += 1
        return frozenset(candidate.id for candidate in parked)

    def _decide(self, candidates: Sequence[Candidate], ids: frozenset[int], drafter: str) -> None:
        for candidate in candidates:
            drafting = self._requests[candidate.id].drafting
            if (candidate.id in ids) != (drafter in drafting):
                self.decisions[f"{drafter} {'taken up' if candidate.id in ids else 'parked'}"] += 1
            if candidate.id in ids:
                drafting.add(drafter)
            else:
                drafting.discard(drafter)

    def _limit_ms(self, emitting: Sequence[int], gains: Mapping[int, float]) -> float:
        """How long the step may take so that latency targets hold with what is expected without more drafts."""
        targets = [(self._target(id), 1 + gains.get(id, 0.0)) for id in emitting]
        return min((target * tokens for target, tokens in targets if target is not None), default=math.inf)

    def _target(self, id: int) -> float | None:
        request = self._requests.get(id)
        return None if request is None else request.latency_target_ms

    def _key(
        self,
        base: Load,
        rows: int,
        work: int,
        tokens: float,
        draft_ms: float,
        prompts_ms: float,
        targets: Mapping[int, float],
        others: float,
        expected: Sequence[float],
    ) -> tuple[float, float]:
        """What a set of drafts is worth: how far it misses latency targets, then its rate."""
        ms = draft_ms + self.costs.ms(_more(base, rows - base.rows, work - base.work))
        missed = 1.0
        if targets or others:
            ratios = [ms / (target * expected[index]) for index, target in targets.items()]
            if others:
                ratios.append(ms / others)
            missed = max(1.0, *ratios)
        return -missed, tokens / (ms - prompts_ms)

    def _grown(self, base: Load, grown: Sequence[Candidate]) -> Load:
        """`base` with the rows of drafts that requests have already: about one for each expected token."""
        rows = sum(round(candidate.gain) for candidate in grown)
        return _more(base, rows, sum(round(candidate.gain) * candidate.context for candidate in grown))

    def _prompts_ms(self, base: Load, emitting: Sequence[int]) -> float:
        """What prompts add to the step, whatever is drafted.

        It does not count as time that tokens take: else any draft would seem cheap beside a long prompt.
        """
        count = len(emitting)
        if base.rows <= count:
            return 0.0
        context = base.context * count // base.rows
        return max(0.0, self.costs.ms(base) - self.costs.ms(Load(count, context, context, count)))

    def row_ms(self, load: Load, rows: int) -> float:
        """What one more row costs beside `load` and `rows` others."""
        return self.costs.ms(_more(load, rows + 1, 0)) - self.costs.ms(_more(load, rows, 0))


def _more(load: Load, rows: int, work: int) -> Load:
    outputs = None if load.outputs is None else load.outputs + rows
    return Load(load.rows + rows, load.context, load.work + work, outputs)
