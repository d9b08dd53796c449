"""What KV a draft model has in the blocks of the engine, known from keys alone.

The engine tells no drafter that a block was given away, shared or taken back. So every slot carries a key: 64 bits that
stand for the tokens up to the one whose KV lies there. Whatever happened to a block, the KV of a request holds for as
long as the keys of its slots are those of its tokens. Two texts share a key by a chance of about 2^-64, and then drafts
are worse, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.program import BLOCK_SIZE
from pilotfish.tree import Ints

Keys = NDArray[np.uint64]

_START = 0x6A09E667F3BCC909
_MASK = (1 << 64) - 1
_NONE = 0  # the key of a slot that nothing is known of


def next_key(key: int, token: int) -> int:
    """The key of a text that goes on with `token` after the text of `key`; never 0."""
    key = ((key ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    return (key ^ (key >> 29)) or 1


class PrefixKeys:
    """The keys of all prefixes of a list of tokens that grows."""

    def __init__(self) -> None:
        self._keys: Keys = np.empty(64, np.uint64)
        self._count = 0

    def of(self, tokens: Sequence[int]) -> Keys:
        """[tokens] key i stands for the first i + 1 of them. Only those that are new since the last call take time."""
        count = len(tokens)
        if count < self._count:
            self._count = 0
        if count > len(self._keys):
            self._keys = np.resize(self._keys, max(count, 2 * len(self._keys)))
        if count > self._count:
            key = int(self._keys[self._count - 1]) if self._count else _START
            added = []
            for token in tokens[self._count :]:
                key = next_key(key, token)
                added.append(key)
            self._keys[self._count : count] = added
            self._count = count
        return self._keys[:count]


class BlockContents:
    """The keys of the slots of all blocks of one KV tensor.

    A slot whose key changes takes the later ones of its block with it: they belonged to another text. So the key of a
    block's last slot answers for the whole block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._keys: Keys = np.zeros((num_blocks, BLOCK_SIZE), np.uint64)

    def computed(self, blocks: Ints, keys: Keys) -> int:
        """How many tokens of a text with these prefix keys [tokens] have their KV in the slots of `blocks`."""
        full = min(len(keys) // BLOCK_SIZE, len(blocks))
        agree = self._keys[blocks[:full], -1] == keys[BLOCK_SIZE - 1 : full * BLOCK_SIZE : BLOCK_SIZE]
        whole = full if agree.all() else int(agree.argmin())
        if whole == len(blocks):
            return whole * BLOCK_SIZE
        rest = keys[whole * BLOCK_SIZE : (whole + 1) * BLOCK_SIZE]
        differ = self._keys[blocks[whole], : len(rest)] != rest
        return whole * BLOCK_SIZE + (int(differ.argmax()) if differ.any() else len(rest))

    def write(self, blocks: Ints, start: int, keys: Sequence[int] | Keys) -> None:
        """The slots from `start` on hold the KV of the last tokens of the texts with these keys."""
        done = 0
        while done < len(keys):
            block, first = divmod(start + done, BLOCK_SIZE)
            new = np.asarray(keys[done : done + BLOCK_SIZE - first], np.uint64)
            slots = self._keys[blocks[block]]
            last = first + len(new)
            if last < BLOCK_SIZE and not np.array_equal(slots[first:last], new):
                slots[last:] = _NONE
            slots[first:last] = new
            done += len(new)

    def holds(self, blocks: Ints, slot: int, key: int) -> bool:
        """Whether a slot has this key."""
        return int(self._keys[blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE]) == key

    def clear(self) -> None:
        """Nothing is known any more."""
        self._keys[:] = _NONE
