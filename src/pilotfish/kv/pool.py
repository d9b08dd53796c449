"""Which blocks are free and who holds the others: integers only."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Hands out block ids 0..num_blocks - 1. One id is valid in the KV cache of every model of the engine."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        # The last entry is handed out next: recently freed blocks are warm in the caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing happens) when there are fewer."""
        if count < 0:
            raise ValueError(f"can not allocate {count} blocks")
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks`."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and can not be shared")
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each of `blocks`; without holders a block is free."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def references(self, block: int) -> int:
        """How many hold `block`; 0: it is free."""
        return self._references[block]

    def check(self, held: Sequence[Sequence[int]] = ()) -> None:
        """Prove free + held = all. `held` lists the blocks of every holder; raises AssertionError when it is not so."""
        references = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                references[block] += 1
        assert references == self._references, "a block's references differ from its holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {block for block, count in enumerate(references) if count == 0}, "free + held is not all"
