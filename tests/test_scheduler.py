"""The scheduler under random operations: budgets kept, ledger sound, KV right, everyone served."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pilotfish.errors import InputError
from pilotfish.kv.pool import BlockPool
from pilotfish.scheduler import STEPS_PER_PRIORITY, Scheduled, Scheduler, StepPlan

BLOCK = 4


def _scheduler(blocks: int, token_budget: int = 16, max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(BlockPool(blocks), BLOCK, token_budget, max_num_seqs)


def _add(scheduler: Scheduler, id: int, length: int, limit: int, **options: int | None) -> None:
    """A request whose tokens no other has."""
    scheduler.add(id, [1000 * id + at for at in range(length)], limit, **options)  # type: ignore[arg-type]


class _World:
    """What the engine does between two plans, with a KV whose every slot says which tokens it was computed from."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.scheduler = _scheduler(rng.randint(8, 30), rng.randint(6, 40), rng.randint(1, 6))
        self.kv: dict[tuple[int, int], tuple[int, ...] | None] = {}  # block and offset -> all tokens up to it
        self.tokens: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.chunks: dict[int, int | None] = {}
        self.next_id = 0
        self.seen: Counter[str] = Counter()

    def arrive(self) -> None:
        rng = self.rng
        # Few different tokens, so that prefixes are often cached, and sometimes an earlier request's whole text.
        length = rng.randint(1, 20)
        prompt = [rng.randint(0, 1) for _ in range(length)]
        if self.tokens and rng.random() < 0.3:
            prompt = list(rng.choice(list(self.tokens.values())))[:20]
        limit = len(prompt) + rng.randint(1, 12)
        chunk, priority = rng.choice([None, None, 3]), rng.randint(-1, 1)
        for index in range(rng.choice([1, 1, 3])):  # samples of one prompt
            id = self.next_id
            self.tokens[id], self.limits[id], self.chunks[id] = list(prompt), limit, chunk
            self.scheduler.add(
                id,
                self.tokens[id],
                limit,
                chunk=chunk,
                sibling=id - index if index else None,
                priority=priority,
                reuse=rng.random() < 0.9,
            )
            self.next_id += 1

    def cancel(self) -> None:
        self._end(self.rng.choice(list(self.tokens)))
        self.seen["cancelled"] += 1

    def step(self) -> StepPlan:
        rng, scheduler = self.rng, self.scheduler
        turn = rng.randint(0, 9)
        plan = scheduler.schedule(lambda id: (id * 7 + turn) % 6, rng.choice([None, None, 5]))
        scheduler.check()
        self.seen["preempted"] += len(plan.preempted)
        self.seen["copied"] += len(plan.copies)
        assert plan.num_rows <= scheduler.token_budget
        assert bool(plan.scheduled) == bool(self.tokens)
        assert len({item.id for item in plan.scheduled}) == len(plan.scheduled)
        for copy in plan.copies:
            for slot in range(copy.slots):
                self.kv[copy.target, slot] = self.kv[copy.source, slot]
        for item in plan.scheduled:
            self._check(item, plan)
            self._write(item)
        for item in plan.scheduled:
            self._commit(item)
        scheduler.check()
        return plan

    def _check(self, item: Scheduled, plan: StepPlan) -> None:
        entry, tokens = self.scheduler.entry(item.id), self.tokens[item.id]
        assert item.id not in plan.preempted
        assert item.start == entry.computed and item.count >= 1
        assert item.count <= (self.chunks[item.id] or item.count)
        assert item.last == (item.start + item.count == len(tokens))
        assert len(entry.blocks) * BLOCK >= item.start + item.count + item.draft_budget
        if item.draft_budget:
            assert item.last and 1 <= item.draft_depth == self.limits[item.id] - len(tokens) - 1
        for slot in range(item.start):  # what attention will read
            assert self.kv[entry.blocks[slot // BLOCK], slot % BLOCK] == tuple(tokens[: slot + 1])
        self.seen["hit"] += entry.cached

    def _write(self, item: Scheduled) -> None:
        blocks, tokens = self.scheduler.entry(item.id).blocks, self.tokens[item.id]
        end = item.start + item.count
        for slot in range(item.start, end + item.draft_budget):
            key = blocks[slot // BLOCK], slot % BLOCK
            assert slot >= end or self.scheduler.pool.references(key[0]) == 1, "a shared block is written"
            self.kv[key] = tuple(tokens[: slot + 1]) if slot < end else None

    def _commit(self, item: Scheduled) -> None:
        end = item.start + item.count
        if not item.last:
            self.scheduler.commit(item.id, end, 0)
            return
        tokens, blocks = self.tokens[item.id], self.scheduler.entry(item.id).blocks
        accepted = self.rng.randint(0, min(item.draft_budget, item.draft_depth))
        for _ in range(accepted + 1):
            tokens.append(self.rng.randint(0, 1))
        for slot in range(end, end + accepted):  # as the engine moves accepted drafts
            self.kv[blocks[slot // BLOCK], slot % BLOCK] = tuple(tokens[: slot + 1])
        self.scheduler.commit(item.id, end + accepted, accepted + 1)
        if len(tokens) == self.limits[item.id] or self.rng.random() < 0.05:
            self._end(item.id)

    def _end(self, id: int) -> None:
        self.scheduler.finish(id)
        del self.tokens[id]


@pytest.mark.parametrize("seed", range(40))
def test_random_operations(seed: int) -> None:
    """Arrive, fork, grow, draft, accept, reject, preempt, evict and cancel in random order; everyone is served."""
    world = _World(seed)
    for _ in range(300):
        if world.rng.random() < 0.3:
            world.arrive()
        if world.tokens and world.rng.random() < 0.05:
            world.cancel()
        if world.tokens:
            world.step()
    for _ in range(5000):
        if not world.tokens:
            break
        world.step()
    assert not world.tokens, "a request was starved"
    scheduler = world.scheduler
    assert world.seen["hit"] > 50 and world.seen["cancelled"] > 0
    assert scheduler.cache.evict(10**6) + scheduler.pool.num_free >= scheduler.pool.num_blocks
    assert scheduler.pool.num_free == scheduler.pool.num_blocks and len(scheduler) == 0


def test_random_operations_meet_everything() -> None:
    """The worlds above preempt, and copy parts of blocks."""
    seen: Counter[str] = Counter()
    for seed in range(10):
        world = _World(seed)
        for _ in range(150):
            if world.rng.random() < 0.4:
                world.arrive()
            if world.tokens:
                world.step()
        seen += world.seen
    assert seen["preempted"] > 10 and seen["copied"] > 20


def _counts(plan: StepPlan) -> list[tuple[int, int]]:
    return [(item.id, item.count) for item in plan.scheduled]


def _commit(scheduler: Scheduler, plan: StepPlan) -> None:
    """Every request computes what was planned, and no draft stands."""
    for item in plan.scheduled:
        entry = scheduler.entry(item.id)
        if item.last:
            entry.tokens.append(7)  # type: ignore[attr-defined]
        scheduler.commit(item.id, item.start + item.count, int(item.last))


def test_a_long_prompt_stalls_nobody() -> None:
    scheduler = _scheduler(64, token_budget=16)
    _add(scheduler, 0, 100, 120)
    _add(scheduler, 1, 4, 20)
    plan = scheduler.schedule(lambda id: 0)
    assert _counts(plan) == [(0, 12), (1, 4)], "half is for short prompts"
    _commit(scheduler, plan)
    _add(scheduler, 2, 30, 40)
    for long_rows, short_rows in ((8, 7), (8, 7), (8, 7), (8, 7)):
        plan = scheduler.schedule(lambda id: 0)
        assert _counts(plan) == [(1, 1), (0, long_rows), (2, short_rows)], "generating requests first"
        _commit(scheduler, plan)
    plan = scheduler.schedule(lambda id: 3)
    assert [(item.id, item.count, item.draft_budget) for item in plan.scheduled] == [(1, 1, 3), (0, 10, 0), (2, 2, 0)]
    _commit(scheduler, plan)
    plan = scheduler.schedule(lambda id: 3, most_prefill=5)
    assert [(item.id, item.count, item.draft_budget) for item in plan.scheduled] == [(1, 1, 3), (2, 1, 3), (0, 5, 0)]


def test_drafts_never_take_the_row_of_another() -> None:
    scheduler = _scheduler(64, token_budget=6)
    for id in range(4):
        _add(scheduler, id, 1, 40)
    plan = scheduler.schedule(lambda id: 9)
    assert [(item.id, item.count, item.draft_budget) for item in plan.scheduled] == [
        (0, 1, 2),
        (1, 1, 0),
        (2, 1, 0),
        (3, 1, 0),
    ]


def test_a_lower_priority_goes_first_and_none_starves() -> None:
    scheduler = _scheduler(64, max_num_seqs=1)
    _add(scheduler, 0, 4, 8)
    _commit(scheduler, scheduler.schedule(lambda id: 0))
    _add(scheduler, 1, 4, 8, priority=1)
    _add(scheduler, 2, 4, 8)
    _add(scheduler, 3, 4, 8, priority=-1)
    served = []
    for _ in range(3):
        scheduler.finish(next(iter(item.id for item in scheduler.schedule(lambda id: 0).scheduled)))
        served.append(scheduler.schedule(lambda id: 0).scheduled[0].id)
    assert served == [3, 2, 1]
    # A stream of better requests does not hold up one that has waited long enough.
    scheduler = _scheduler(64, max_num_seqs=1)
    _add(scheduler, 0, 4, 8, priority=2)
    for id in range(1, 3 * STEPS_PER_PRIORITY):
        _add(scheduler, id, 4, 8)
        running = scheduler.schedule(lambda id: 0).scheduled[0].id
        if running == 0:
            break
        scheduler.finish(running)
    assert 2 * STEPS_PER_PRIORITY - 2 <= id <= 2 * STEPS_PER_PRIORITY + 2


def test_who_is_preempted_is_the_youngest_of_the_least_priority() -> None:
    scheduler = _scheduler(6, token_budget=64)
    for id, priority in ((0, 1), (1, 0), (2, 0)):
        _add(scheduler, id, 7, 24, priority=priority)
    preempted: list[int] = []
    while not preempted:
        plan = scheduler.schedule(lambda id: 0)
        preempted += plan.preempted
        _commit(scheduler, plan)
        scheduler.check()
    assert preempted == [0]
    while len(preempted) == 1:
        plan = scheduler.schedule(lambda id: 0)
        preempted += plan.preempted
        _commit(scheduler, plan)
    assert preempted == [0, 2]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = _scheduler(6, token_budget=64)
    _add(scheduler, 0, 7, 24)
    _add(scheduler, 1, 7, 24)
    plan = scheduler.schedule(lambda id: 0)
    assert {item.id for item in plan.scheduled} == {0, 1}
    _commit(scheduler, plan)
    _add(scheduler, 2, 4, 8)
    preempted: list[int] = []
    while not preempted:
        plan = scheduler.schedule(lambda id: 0)
        preempted += plan.preempted
        _commit(scheduler, plan)
    assert preempted[0] in (1, 2) and scheduler.entry(0).preemptions == 0
    scheduler.check()


def test_what_never_fits_is_refused() -> None:
    scheduler = _scheduler(4)
    with pytest.raises(InputError, match="may need 17 tokens of KV cache, the cache holds 16"):
        _add(scheduler, 0, 3, 17)
    with pytest.raises(InputError, match="empty"):
        scheduler.add(0, [], 4)
    with pytest.raises(ValueError):
        _scheduler(4, token_budget=0)


def test_unknown_requests() -> None:
    with pytest.raises(KeyError):
        _scheduler(4).entry(3)


def test_samples_share_the_full_blocks_of_their_prompt() -> None:
    scheduler = _scheduler(32, token_budget=16)
    for id in range(3):
        scheduler.add(id, list(range(10)), 20, sibling=0 if id else None)
    plan = scheduler.schedule(lambda id: 0)
    assert [(item.id, item.start, item.count) for item in plan.scheduled] == [(0, 0, 10)], (
        "the others wait for the first"
    )
    _commit(scheduler, plan)
    plan = scheduler.schedule(lambda id: 0)
    scheduler.check()
    assert [(item.id, item.start, item.count) for item in plan.scheduled] == [(0, 10, 1), (1, 8, 2), (2, 8, 2)]
    shared = scheduler.entry(0).blocks[:2]
    assert all(scheduler.entry(id).blocks[:2] == shared for id in (1, 2))
    assert scheduler.pool.num_blocks - scheduler.pool.num_free == 2 + 3
    scheduler.finish(0)
    scheduler.check()
    assert scheduler.entry(1).blocks[:2] == shared, "who is left keeps them"
    for id in (1, 2):
        scheduler.finish(id)
    scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - len(scheduler.cache)


def test_what_was_computed_is_found_again() -> None:
    """A later turn begins where the cache ends, inside a block too; without reuse everything is computed."""
    scheduler = _scheduler(32, max_num_seqs=2)
    scheduler.add(0, list(range(10)), 20)
    _commit(scheduler, scheduler.schedule(lambda id: 0))
    scheduler.finish(0)
    scheduler.add(1, [*range(6), 50, 51, 52], 20)
    scheduler.add(2, list(range(10)), 20, reuse=False)
    plan = scheduler.schedule(lambda id: 0)
    assert [(item.id, item.start, item.count) for item in plan.scheduled] == [(1, 6, 3), (2, 0, 10)]
    (copy,) = plan.copies
    assert copy.slots == 2 and copy.target == scheduler.entry(1).blocks[1]
    assert scheduler.entry(1).cached == 6 and scheduler.cache.hit_tokens == 6 and scheduler.cache.queried_tokens == 19
    _commit(scheduler, plan)
    scheduler.check()


def test_a_chunk_is_no_longer_than_the_request_wants() -> None:
    scheduler = _scheduler(32, token_budget=16)
    _add(scheduler, 0, 10, 20, chunk=4)
    _add(scheduler, 1, 10, 20)
    plan = scheduler.schedule(lambda id: 0)
    assert [(item.id, item.count, item.last) for item in plan.scheduled] == [(0, 4, False), (1, 10, True)]
