"""Who runs in a step, and on which blocks: continuous batching under one token budget. Integers only.

There are no phases. A request has `length` committed tokens, of which `computed` have KV; each step computes some of
the rest, and when it reaches the last one, the row of that token decides the next (with draft rows behind it).
Generating requests go first, the rest of the budget is for prefill chunks (SplitFuse, Holmes et al. 2024; Sarathi,
Agrawal et al. 2024), so a long prompt stalls nobody; nor do long prompts hold up short ones (`_shares`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pilotfish.errors import InputError
from pilotfish.kv.pool import BlockPool
from pilotfish.kv.radix import Node, RadixCache

# A request of one priority level less goes before those that came so many steps earlier: what waits long enough is
# next whatever comes, and nothing starves.
STEPS_PER_PRIORITY = 256


@dataclass(eq=False)  # compared as objects: they are looked for in lists
class Entry:
    """The ledger's view of one request."""

    id: int
    tokens: Sequence[int]  # grows with the request
    length: int  # committed tokens
    limit: int  # tokens it may have at most
    prompt: int  # tokens it came with
    rank: tuple[int, int]  # the lower goes first
    node: Node  # of the last of its blocks that is in the cache
    chunk: int | None = None  # tokens it computes in a step at most; None: what the token budget leaves
    sibling: int | None = None  # a request with the same prompt, for whose KV it waits
    reuse: bool = True  # may begin with cached KV
    computed: int = 0  # tokens whose KV is in its blocks
    blocks: list[int] = field(default_factory=list)
    shared: int = 0  # the first of its blocks that are in the cache
    cached: int = 0  # prompt tokens that it did not compute when it first ran
    preemptions: int = 0

    @property
    def remaining(self) -> int:
        return self.length - self.computed


@dataclass(frozen=True)
class Scheduled:
    """What one request computes in this step: its tokens [start, start + count) and then `draft_budget` drafts."""

    id: int
    start: int
    count: int
    draft_budget: int
    draft_depth: int  # no draft may lie deeper: what is beyond the request's limit can not be emitted
    last: bool  # the chunk ends with the last committed token, so its row gives the next one


@dataclass(frozen=True)
class Copy:
    """The first `slots` slots of one block to another, before the pass: a cache hit that ends inside a block."""

    source: int
    target: int
    slots: int


@dataclass(frozen=True)
class StepPlan:
    scheduled: tuple[Scheduled, ...]
    preempted: tuple[int, ...]
    copies: tuple[Copy, ...] = ()  # to be done in order

    @property
    def num_rows(self) -> int:
        """Rows of the step if every draft budget is used up."""
        return sum(item.count + item.draft_budget for item in self.scheduled)


class Scheduler:
    """First come, first served within a priority; generating requests before prefill."""

    def __init__(self, pool: BlockPool, block_size: int, token_budget: int, max_num_seqs: int) -> None:
        if token_budget < 1 or max_num_seqs < 1:
            raise ValueError("token_budget and max_num_seqs must be at least 1")
        self.pool = pool
        self.cache = RadixCache(pool, block_size)
        self.block_size = block_size
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.preemptions = 0
        self._entries: dict[int, Entry] = {}
        self._running: list[Entry] = []  # by rank
        self._waiting: list[Entry] = []  # by rank
        self._steps = 0
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that running requests hold, each counted once."""
        return len({block for entry in self._running for block in entry.blocks})

    def generating(self) -> list[Entry]:
        """Running requests whose next row decides a token."""
        return [entry for entry in self._running if entry.remaining == 1]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(
        self,
        id: int,
        tokens: Sequence[int],
        limit: int,
        *,
        priority: int = 0,
        chunk: int | None = None,
        sibling: int | None = None,
        reuse: bool = True,
    ) -> None:
        """Queue a request that may grow to `limit` tokens, computed at most `chunk` at a time.

        Of a lower `priority` it goes earlier. `sibling` is an earlier request with the same prompt, and without `reuse`
        every token is computed. Raises InputError when the request could not run even alone.
        """
        if not tokens:
            raise InputError("the prompt is empty; give at least one token")
        needed = self._blocks_for(limit)
        if needed > self.pool.num_blocks:
            raise InputError(
                f"the request may need {limit} tokens of KV cache, the cache holds "
                f"{self.pool.num_blocks * self.block_size}; ask for fewer tokens or give more memory"
            )
        rank = (priority * STEPS_PER_PRIORITY + self._steps, self._added)
        root = self.cache.root
        entry = Entry(id, tokens, len(tokens), limit, len(tokens), rank, root, chunk, sibling, reuse)
        self._entries[id] = entry
        self._added += 1
        insort(self._waiting, entry, key=_rank)

    def schedule(self, budgets: Callable[[int], int], most_prefill: int | None = None) -> StepPlan:
        """Plan one step; `budgets(id)` is the draft budget a generating request may have.

        `most_prefill` bounds the prompt tokens beside generating requests, whose latency they add to.
        """
        self._steps += 1
        copies = self._admit()
        generating = self.generating()
        prefilling = [entry for entry in self._running if entry.remaining > 1]
        preempted: list[int] = []
        scheduled: dict[int, Scheduled] = {}
        left = self.token_budget
        for index, entry in enumerate(generating):
            if left == 0:
                break
            # Each of those behind gets its row before anyone's drafts.
            reserved = len(generating) - index - 1
            left -= self._place(entry, 1, max(1, left - reserved), budgets, scheduled, preempted)
        if most_prefill is not None and scheduled:
            left = min(left, most_prefill)
        shares = self._shares(prefilling, left)
        reserved = sum(count for _, count in shares)
        for entry, count in shares:
            reserved -= count  # drafts behind a prompt's last token take what no share needs
            left -= self._place(entry, count, max(count, left - reserved), budgets, scheduled, preempted)
        return StepPlan(tuple(scheduled.values()), tuple(preempted), tuple(copies))

    def commit(self, id: int, computed: int, appended: int) -> None:
        """Record that `computed` tokens of the request have KV now and that `appended` tokens were added to it."""
        entry = self.entry(id)
        entry.computed = computed
        entry.length += appended
        size = self.block_size
        while (entry.shared + 1) * size <= computed:
            at = entry.shared
            entry.node = self.cache.insert(entry.node, entry.tokens[at * size : (at + 1) * size], entry.blocks[at])
            entry.blocks[at] = entry.node.block
            entry.shared += 1

    def finish(self, id: int) -> None:
        """Forget a request, wherever it stands, and give up its blocks; what is cached of them stays."""
        entry = self._entries.pop(id)
        self.pool.release(entry.blocks)
        (self._running if entry in self._running else self._waiting).remove(entry)

    def entry(self, id: int) -> Entry:
        return self._entries[id]

    def check(self) -> None:
        """Prove that the ledger is sound; raises AssertionError when it is not."""
        self.cache.check()
        self.pool.check([*(entry.blocks for entry in self._running), list(self.cache.blocks())])
        assert len(self._running) <= self.max_num_seqs
        for entry in self._running:
            assert 0 <= entry.computed < entry.length <= entry.limit
            assert len(entry.blocks) >= self._blocks_for(entry.computed)
            assert entry.shared * self.block_size <= entry.computed
        for entry in self._waiting:
            assert entry.computed == 0 and not entry.blocks
        for entries in (self._running, self._waiting):
            assert all(a.rank < b.rank for a, b in pairwise(entries))
        ids = [entry.id for entry in (*self._running, *self._waiting)]
        assert len(ids) == len(self._entries) and set(ids) == set(self._entries)

    def _blocks_for(self, slots: int) -> int:
        return -(-slots // self.block_size)

    def _admit(self) -> list[Copy]:
        """Let waiting requests run while there is room for them beside the running ones."""
        copies: list[Copy] = []
        if not self._waiting or len(self._running) == self.max_num_seqs:
            return copies
        held = {block for entry in self._running for block in entry.blocks}
        for entry in list(self._waiting):
            if len(self._running) == self.max_num_seqs:
                break
            sibling = None if entry.sibling is None else self._entries.get(entry.sibling)
            if sibling is not None and sibling.computed < (entry.prompt - 1) // self.block_size * self.block_size:
                continue  # computes what this one can use
            # A first chunk must fit beside the running ones, else it would be preempted at once.
            chunk = min(entry.length, self.token_budget)
            hit = self.cache.match(entry.tokens, entry.length - 1 if entry.reuse else 0)
            found = len(held.union(hit.blocks))
            needed = max(0, self._blocks_for(chunk) - len(hit.blocks)) + len(self._running)
            if self._running and self.pool.num_blocks - found < needed:
                self.pool.release(hit.blocks)
                if hit.copied:
                    self.pool.release([hit.source])
                break
            entry.node, entry.blocks, entry.shared = hit.node, list(hit.blocks), len(hit.blocks)
            entry.computed = len(hit.blocks) * self.block_size
            if hit.copied:
                if self._grow(entry, entry.computed + 1):
                    copies.append(Copy(hit.source, entry.blocks[-1], hit.copied))
                    entry.computed += hit.copied
                # Whoever takes the block from now on writes to it after the copy.
                self.pool.release([hit.source])
            if entry.preemptions == 0 and entry.reuse:
                entry.cached = entry.computed
                self.cache.queried_tokens += entry.length
                self.cache.hit_tokens += entry.computed
            held.update(entry.blocks)
            self._waiting.remove(entry)
            insort(self._running, entry, key=_rank)
        return copies

    def _shares(self, prefilling: Sequence[Entry], left: int) -> list[tuple[Entry, int]]:
        """How many tokens each prompt computes of `left`, in the order of rank.

        The first has half of them, or all that others do not need, so it goes on whatever comes. The other half is for
        those that have least left: a short prompt does not wait for a long one.
        """
        wants = {entry.id: min(entry.remaining, entry.chunk or entry.remaining) for entry in prefilling}
        shares = dict.fromkeys(wants, 0)
        if prefilling:
            first = prefilling[0].id
            for_others = left - min(wants[first], -(-left // 2))
            for entry in sorted(prefilling[1:], key=lambda entry: (entry.remaining, entry.rank)):
                shares[entry.id] = min(wants[entry.id], for_others)
                for_others -= shares[entry.id]
            shares[first] = min(wants[first], left - sum(shares.values()))
        return [(entry, shares[entry.id]) for entry in prefilling if shares[entry.id]]

    def _place(
        self,
        entry: Entry,
        count: int,
        most_rows: int,
        budgets: Callable[[int], int],
        scheduled: dict[int, Scheduled],
        preempted: list[int],
    ) -> int:
        """Plan `count` tokens and the drafts that fit in `most_rows`; worse ranks may lose their blocks. Rows used."""
        if entry not in self._running:  # preempted for one of better rank
            return 0
        last = entry.remaining == count
        depth = max(0, entry.limit - entry.length - 1) if last else 0
        budget = min(budgets(entry.id), most_rows - count) if depth else 0
        if not self._grow(entry, entry.computed + count + budget):
            budget = 0  # drafts are a luxury: no one is preempted for them
            while not self._grow(entry, entry.computed + count):
                victim = self._running[-1]
                self._preempt(victim)
                preempted.append(victim.id)
                scheduled.pop(victim.id, None)
                if victim is entry:
                    return 0
        scheduled[entry.id] = Scheduled(entry.id, entry.computed, count, budget, depth, last)
        return count + budget

    def _grow(self, entry: Entry, slots: int) -> bool:
        """Give the entry blocks for so many slots; cached ones that nobody holds make room."""
        missing = max(0, self._blocks_for(slots) - len(entry.blocks))
        if missing > self.pool.num_free:
            self.cache.evict(missing - self.pool.num_free)
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        entry.blocks.extend(blocks)
        return True

    def _preempt(self, entry: Entry) -> None:
        """Give up the blocks; the request comes back by its rank and computes what is not cached: the same bits."""
        self.pool.release(entry.blocks)
        entry.blocks.clear()
        entry.node, entry.shared, entry.computed = self.cache.root, 0, 0
        entry.preemptions += 1
        self.preemptions += 1
        self._running.remove(entry)
        insort(self._waiting, entry, key=_rank)


def _rank(entry: Entry) -> tuple[int, int]:
    return entry.rank
