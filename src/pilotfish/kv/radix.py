"""Which blocks hold the KV of which tokens: a tree over token blocks that all requests share. Integers only.

A node is one full block of tokens after its parent's. It holds one reference to its block, so a cached block outlives
the requests that use it until memory runs short: then the least recently used leaves that nobody else holds give up
theirs. A hit may end inside a block: the caller copies the slots that it shares into a block of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pilotfish.kv.pool import BlockPool


@dataclass(eq=False)
class Node:
    """A cached block; the root has none."""

    tokens: tuple[int, ...]
    block: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    used: int = 0  # when it was last hit or inserted, in calls


@dataclass(frozen=True)
class Hit:
    """A cached prefix: whole blocks and then the first `copied` slots of `source`.

    The caller has one reference to each of `blocks`, and to `source` where `copied` is not 0.
    """

    node: Node  # of the last whole block; where the caller's own blocks will follow
    blocks: tuple[int, ...] = ()
    source: int = -1
    copied: int = 0

    def length(self, block_size: int) -> int:
        """Tokens whose KV is there."""
        return len(self.blocks) * block_size + self.copied


class RadixCache:
    """Finds the longest cached prefix of a request, and takes in the blocks that requests have computed."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.root = Node((), -1, None)
        self.queried_tokens = 0  # of requests that began to run, counted by who lets them
        self.hit_tokens = 0
        self._clock = 0
        self._size = 0
        # (used, number, node) of every leaf, oldest first; entries whose node has changed since are skipped.
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushed = 0

    def __len__(self) -> int:
        """Blocks in the cache."""
        return self._size

    def match(self, tokens: Sequence[int], most: int) -> Hit:
        """The longest cached prefix of the first `most` tokens. The caller gets a reference to each block of it."""
        node, start = self.root, 0
        blocks: list[int] = []
        while start + self.block_size <= most:
            child = node.children.get(tuple(tokens[start : start + self.block_size]))
            if child is None:
                break
            node, start = child, start + self.block_size
            blocks.append(node.block)
        rest = tuple(tokens[start : min(start + self.block_size, most)])
        nearest = max(node.children.values(), key=lambda child: _shared(child.tokens, rest), default=None)
        copied = 0 if nearest is None else _shared(nearest.tokens, rest)
        self._use(nearest if nearest is not None and copied else node)
        self.pool.share(blocks)
        if nearest is None or not copied:
            return Hit(node, tuple(blocks))
        self.pool.share([nearest.block])
        return Hit(node, tuple(blocks), nearest.block, copied)

    def insert(self, parent: Node, tokens: Sequence[int], block: int) -> Node:
        """The node of a full block of computed tokens after `parent`, which the caller holds.

        Where the same tokens are cached already, the caller's block is given back, and it holds the cached one instead,
        whose bits are the same: it must use `.block` of the node from now on.
        """
        key = tuple(tokens)
        known = parent.children.get(key)
        if known is None:
            known = parent.children[key] = Node(key, block, parent)
            self._size += 1
            self.pool.share([block])
        elif known.block != block:
            self.pool.share([known.block])
            self.pool.release([block])
        self._use(known)
        return known

    def evict(self, count: int) -> int:
        """Give up the least recently used blocks that no request holds until `count` more are free.

        Returns how many became free.
        """
        freed = 0
        held: list[tuple[int, int, Node]] = []
        while freed < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            node = entry[2]
            if not _is_current(*entry):
                continue
            assert node.parent is not None
            if self.pool.references(node.block) > 1:
                held.append(entry)
                continue
            self.pool.release([node.block])
            del node.parent.children[node.tokens]
            self._size -= 1
            freed += 1
            if not node.parent.children:
                self._push(node.parent)
            node.parent = None
        for entry in held:
            heapq.heappush(self._leaves, entry)
        return freed

    def blocks(self) -> Iterator[int]:
        """The cached blocks."""
        return (node.block for node in self._nodes())

    def check(self) -> None:
        """Prove that the tree is sound; raises AssertionError when it is not."""
        nodes = list(self._nodes())
        assert len(nodes) == self._size
        assert len({node.block for node in nodes}) == self._size, "a block is cached twice"
        listed = {id(entry[2]) for entry in self._leaves if _is_current(*entry)}
        for node in nodes:
            assert node.parent is not None and node.parent.children[node.tokens] is node
            assert len(node.tokens) == self.block_size and self.pool.references(node.block) > 0
            assert node.used <= node.parent.used or node.parent is self.root, "a block was used without those before it"
            assert node.children or id(node) in listed, "a leaf could never be evicted"

    def _use(self, node: Node) -> None:
        """Mark a node and those before it as used now."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.used = self._clock
            at = at.parent
        if not node.children:
            self._push(node)

    def _push(self, leaf: Node) -> None:
        if leaf is self.root:
            return
        self._pushed += 1
        heapq.heappush(self._leaves, (leaf.used, self._pushed, leaf))
        if len(self._leaves) > 4 * self._size + 64:  # mostly entries of nodes that were used again
            self._leaves = [entry for entry in self._leaves if _is_current(*entry)]
            heapq.heapify(self._leaves)

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node


def _is_current(used: int, _: int, node: Node) -> bool:
    """Whether an entry of the leaves speaks of a leaf that has not been used since."""
    return node.parent is not None and node.used == used and not node.children


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
