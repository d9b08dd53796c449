"""The prefix cache under random operations, against a twin that remembers whole prefixes."""

from __future__ import annotations

import random

import pytest

from pilotfish.kv.pool import BlockPool
from pilotfish.kv.radix import Hit, RadixCache

BLOCK = 4


class _Holder:
    """A request: its tokens, the blocks it holds, and where in the tree its blocks follow."""

    def __init__(self, cache: RadixCache, tokens: list[int]) -> None:
        self.cache, self.tokens = cache, tokens
        self.hit: Hit = cache.match(tokens, len(tokens) - 1)
        self.blocks = list(self.hit.blocks)
        self.node = self.hit.node
        if self.hit.copied:
            cache.pool.release([self.hit.source])  # copied by now

    def compute(self) -> bool:
        """One more full block, if there is one and memory for it."""
        index = len(self.blocks)
        if (index + 1) * BLOCK > len(self.tokens):
            return False
        if self.cache.pool.num_free == 0:
            self.cache.evict(1)
        got = self.cache.pool.allocate(1)
        if got is None:
            return False
        self.node = self.cache.insert(self.node, self.tokens[index * BLOCK : (index + 1) * BLOCK], got[0])
        self.blocks.append(self.node.block)
        return True

    def end(self) -> None:
        self.cache.pool.release(self.blocks)


def _check(cache: RadixCache, holders: list[_Holder]) -> None:
    cache.check()
    cache.pool.check([*(holder.blocks for holder in holders), list(cache.blocks())])


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    cache = RadixCache(BlockPool(rng.randint(6, 40)), BLOCK)
    holders: list[_Holder] = []
    content: dict[int, tuple[int, ...]] = {}  # block -> the tokens up to its end, as they were when it was computed
    hits = 0
    for _ in range(600):
        match rng.randrange(4):
            case 0 if len(holders) < 6:
                tokens = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
                holder = _Holder(cache, tokens)
                holders.append(holder)
                for index, block in enumerate(holder.blocks):
                    assert content[block] == tuple(tokens[: (index + 1) * BLOCK])
                length = holder.hit.length(BLOCK)
                assert length < len(tokens)
                if holder.hit.copied:
                    start = len(holder.blocks) * BLOCK
                    assert content[holder.hit.source][: start + holder.hit.copied] == tuple(tokens[:length])
                hits += length
                # Nothing longer is cached.
                whole = {content[block] for block in cache.blocks()}
                longest = max((_shared(known, tokens[:-1]) for known in whole), default=0)
                assert length == longest
            case 1 | 2 if holders:
                holder = rng.choice(holders)
                if holder.compute():
                    end = len(holder.blocks) * BLOCK
                    content[holder.blocks[-1]] = tuple(holder.tokens[:end])
            case 3 if holders:
                if rng.random() < 0.5:
                    holders.pop(rng.randrange(len(holders))).end()
                else:
                    cache.evict(rng.randint(1, 5))
        _check(cache, holders)
    assert hits > 100
    for holder in holders:
        holder.end()
    held = len(cache)
    assert cache.evict(10**6) == held and len(cache) == 0
    assert cache.pool.num_free == cache.pool.num_blocks


def _shared(known: tuple[int, ...], tokens: list[int]) -> int:
    count = 0
    while count < min(len(known), len(tokens)) and known[count] == tokens[count]:
        count += 1
    return count


def _filled(cache: RadixCache, tokens: list[int]) -> _Holder:
    holder = _Holder(cache, tokens)
    while holder.compute():
        pass
    return holder


def test_the_least_recently_used_goes_first() -> None:
    cache = RadixCache(BlockPool(8), BLOCK)
    for first in (1, 2, 3):
        _filled(cache, [first] * 8).end()
    _Holder(cache, [1] * 9).end()  # uses the oldest
    assert cache.evict(2) == 2
    assert _Holder(cache, [2] * 9).hit.length(BLOCK) == 0
    assert _Holder(cache, [3] * 9).hit.length(BLOCK) == 8
    assert _Holder(cache, [1] * 9).hit.length(BLOCK) == 8


def test_what_is_held_stays() -> None:
    cache = RadixCache(BlockPool(4), BLOCK)
    holder = _filled(cache, list(range(8)))
    assert cache.evict(4) == 0
    holder.end()
    assert cache.evict(1) == 1, "the end of a prefix goes before its beginning"
    assert _Holder(cache, list(range(9))).hit.length(BLOCK) == 4


def test_a_hit_ends_inside_a_block() -> None:
    cache = RadixCache(BlockPool(8), BLOCK)
    _filled(cache, [1, 2, 3, 4, 5, 6, 7, 8]).end()
    hit = _Holder(cache, [1, 2, 3, 4, 5, 6, 9, 9, 9]).hit
    assert (len(hit.blocks), hit.copied, hit.length(BLOCK)) == (1, 2, 6)
    assert _Holder(cache, [1, 2, 3, 4]).hit.length(BLOCK) == 3, "the last token is computed, for its logits"
    assert _Holder(cache, [1]).hit.length(BLOCK) == 0


def test_the_same_tokens_are_kept_once() -> None:
    cache = RadixCache(BlockPool(8), BLOCK)
    first, second = _Holder(cache, [1] * 8), _Holder(cache, [1] * 8)
    assert first.compute() and second.compute()
    assert first.blocks == second.blocks and len(cache) == 1
    _check(cache, [first, second])
    assert cache.pool.num_free == 7


def test_many_uses_do_not_grow_the_list_of_leaves() -> None:
    cache = RadixCache(BlockPool(8), BLOCK)
    _filled(cache, [1] * 8).end()
    for _ in range(5000):
        _Holder(cache, [1] * 9).end()
    assert len(cache._leaves) < 200
