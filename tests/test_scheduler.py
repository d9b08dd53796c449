"""The scheduler under random operations: budgets kept, ledger sound, everyone served."""

from __future__ import annotations

import random

import pytest

from pilotfish.errors import InputError
from pilotfish.kv.pool import BlockPool
from pilotfish.scheduler import Scheduler

BLOCK = 4


def _scheduler(blocks: int, token_budget: int = 16, max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(BlockPool(blocks), BLOCK, token_budget, max_num_seqs)


@pytest.mark.parametrize("seed", range(30))
def test_random_operations(seed: int) -> None:
    """Arrive, grow, draft, accept, reject, preempt and cancel in random order; in the end everyone was served."""
    rng = random.Random(seed)
    scheduler = _scheduler(rng.randint(8, 24), rng.randint(4, 40), rng.randint(1, 6))
    targets: dict[int, int] = {}
    lengths: dict[int, int] = {}
    chunks: dict[int, int | None] = {}
    next_id = 0
    for turn in range(600):
        if turn < 300 and rng.random() < 0.3:
            length = rng.randint(1, 20)
            limit = length + rng.randint(1, 12)
            chunk = rng.choice([None, None, 3])
            for index in range(rng.choice([1, 1, 3])):  # samples of one prompt
                first = next_id - index
                scheduler.add(next_id, length, limit, chunk, first if index else None)
                lengths[next_id], targets[next_id], chunks[next_id] = length, limit, chunk
                next_id += 1
        if lengths and rng.random() < 0.05:
            victim = rng.choice(list(lengths))
            scheduler.finish(victim)
            del lengths[victim], targets[victim]
        plan = scheduler.schedule(lambda id: (id * 7 + turn) % 6)  # noqa: B023
        scheduler.check()
        assert plan.num_rows <= scheduler.token_budget
        assert bool(plan.scheduled) == bool(lengths)
        seen = set()
        for item in plan.scheduled:
            assert item.id not in seen and item.id not in plan.preempted
            seen.add(item.id)
            entry = scheduler.entry(item.id)
            assert item.start == entry.computed and item.count >= 1
            assert item.count <= (chunks[item.id] or item.count)
            assert item.last == (item.start + item.count == lengths[item.id])
            assert len(entry.blocks) * BLOCK >= item.start + item.count + item.draft_budget
            if item.draft_budget:
                assert item.last and 1 <= item.draft_depth == targets[item.id] - lengths[item.id] - 1
        for item in plan.scheduled:
            end = item.start + item.count
            if not item.last:
                scheduler.commit(item.id, end, 0)
                continue
            accepted = rng.randint(0, min(item.draft_budget, item.draft_depth))
            lengths[item.id] += accepted + 1
            scheduler.commit(item.id, end + accepted, accepted + 1)
            if lengths[item.id] == targets[item.id]:
                scheduler.finish(item.id)
                del lengths[item.id], targets[item.id]
        scheduler.check()
    assert not lengths, "a request was starved"
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_generating_requests_go_before_a_long_prompt() -> None:
    scheduler = _scheduler(64, token_budget=16)
    scheduler.add(0, 100, 120)
    scheduler.add(1, 4, 20)
    plan = scheduler.schedule(lambda id: 0)
    assert [(item.id, item.count) for item in plan.scheduled] == [(0, 16)]
    scheduler.commit(0, 16, 0)
    for computed in range(16, 64, 16):
        plan = scheduler.schedule(lambda id: 0)
        scheduler.commit(0, computed + 16, 0)
    # One more chunk of the long prompt leaves no room, so the short one waits its turn; then both go on together.
    scheduler.schedule(lambda id: 0)
    scheduler.commit(0, 80, 0)
    scheduler.schedule(lambda id: 0)
    scheduler.commit(0, 96, 0)
    plan = scheduler.schedule(lambda id: 3)
    assert [(item.id, item.count, item.draft_budget) for item in plan.scheduled] == [(0, 4, 3), (1, 4, 3)]
    scheduler.commit(0, 100, 1)
    scheduler.commit(1, 4, 1)
    scheduler.add(2, 50, 60)
    plan = scheduler.schedule(lambda id: 2)
    assert [(item.id, item.count, item.draft_budget) for item in plan.scheduled] == [(0, 1, 2), (1, 1, 2), (2, 10, 0)]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = _scheduler(6, token_budget=64)
    scheduler.add(0, 7, 24)
    scheduler.add(1, 7, 24)
    plan = scheduler.schedule(lambda id: 0)
    assert {item.id for item in plan.scheduled} == {0, 1}
    for id in (0, 1):
        scheduler.commit(id, 7, 1)
    scheduler.add(2, 4, 8)
    preempted: list[int] = []
    while not preempted:
        plan = scheduler.schedule(lambda id: 0)
        preempted += plan.preempted
        for item in plan.scheduled:
            scheduler.commit(item.id, item.start + item.count, int(item.last))
    assert preempted[0] in (1, 2) and scheduler.entry(0).preemptions == 0
    scheduler.check()


def test_what_never_fits_is_refused() -> None:
    scheduler = _scheduler(4)
    with pytest.raises(InputError, match="may need 17 tokens of KV cache, the cache holds 16"):
        scheduler.add(0, 3, 17)
    with pytest.raises(InputError, match="empty"):
        scheduler.add(0, 0, 4)
    with pytest.raises(ValueError):
        _scheduler(4, token_budget=0)


def test_unknown_requests() -> None:
    with pytest.raises(KeyError):
        _scheduler(4).entry(3)


def test_samples_share_the_full_blocks_of_their_prompt() -> None:
    scheduler = _scheduler(32, token_budget=16)
    for id in range(3):
        scheduler.add(id, 10, 20, sibling=0 if id else None)
    plan = scheduler.schedule(lambda id: 0)
    assert [(item.id, item.start, item.count) for item in plan.scheduled] == [(0, 0, 10)], (
        "the others wait for the first"
    )
    scheduler.commit(0, 10, 1)
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
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_sample_whose_first_is_gone_computes_the_prompt_itself() -> None:
    scheduler = _scheduler(32, max_num_seqs=1)
    scheduler.add(0, 10, 20)
    scheduler.add(1, 10, 20, sibling=0)
    scheduler.schedule(lambda id: 0)
    scheduler.commit(0, 10, 1)
    scheduler.finish(0)
    plan = scheduler.schedule(lambda id: 0)
    assert [(item.id, item.start, item.count) for item in plan.scheduled] == [(1, 0, 10)]


def test_a_chunk_is_no_longer_than_the_request_wants() -> None:
    scheduler = _scheduler(32, token_budget=16)
    scheduler.add(0, 10, 20, chunk=4)
    scheduler.add(1, 10, 20)
    plan = scheduler.schedule(lambda id: 0)
    assert [(item.id, item.count, item.last) for item in plan.scheduled] == [(0, 4, False), (1, 10, True)]
