"""The block pool under random operations, with its own proof after each."""

from __future__ import annotations

import random

import pytest

from pilotfish.kv.pool import BlockPool


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 40))
    held: list[list[int]] = []
    for _ in range(500):
        action = rng.choice(("allocate", "share", "release"))
        if action == "allocate":
            count = rng.randint(0, 8)
            free = pool.num_free
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > free)
            if blocks is not None:
                assert len(set(blocks)) == count
                held.append(blocks)
        elif action == "share" and held:
            blocks = list(rng.choice(held))
            pool.share(blocks)
            held.append(blocks)
        elif action == "release" and held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check(held)
    for blocks in held:
        pool.release(blocks)
    pool.check()
    assert pool.num_free == pool.num_blocks


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="free already"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="can not be shared"):
        pool.share(blocks)
    with pytest.raises(ValueError, match="can not allocate"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check()
