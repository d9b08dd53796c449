"""Who runs in a step, and on which blocks: continuous batching under one token budget. Integers only.

There are no phases. A request has `length` committed tokens, of which `computed` have KV; each step computes some of
the rest, and when it reaches the last one, the row of that token decides the next (with draft rows behind it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pilotfish.errors import InputError
from pilotfish.kv.pool import BlockPool


@dataclass(eq=False)  # compared as objects: they are looked for in lists
class Entry:
    """The ledger's view of one request."""

    id: int
    length: int  # committed tokens
    limit: int  # tokens it may have at most
    prompt: int  # tokens it came with
    chunk: int | None = None  # tokens it computes in a step at most; None: what the token budget leaves
    sibling: int | None = None  # a request with the same prompt, whose blocks it shares once they are computed
    computed: int = 0  # tokens whose KV is in its blocks
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0


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
class StepPlan:
    scheduled: tuple[Scheduled, ...]
    preempted: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the step if every draft budget is used up."""
        return sum(item.count + item.draft_budget for item in self.scheduled)


class Scheduler:
    """First come, first served; generating requests before prefill, so that a long prompt never stalls them."""

    def __init__(self, pool: BlockPool, block_size: int, token_budget: int, max_num_seqs: int) -> None:
        if token_budget < 1 or max_num_seqs < 1:
            raise ValueError("token_budget and max_num_seqs must be at least 1")
        self.pool = pool
        self.block_size = block_size
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self._entries: dict[int, Entry] = {}
        self._running: list[Entry] = []  # oldest first
        self._waiting: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, id: int, length: int, limit: int, chunk: int | None = None, sibling: int | None = None) -> None:
        """Queue a request of `length` tokens that may grow to `limit`, computed at most `chunk` at a time.

        `sibling` is an earlier request whose first `length` tokens are the same. Raises InputError when the request
        could not run even alone.
        """
        if length < 1:
            raise InputError("the prompt is empty; give at least one token")
        needed = self._blocks_for(limit)
        if needed > self.pool.num_blocks:
            raise InputError(
                f"the request may need {limit} tokens of KV cache, the cache holds "
                f"{self.pool.num_blocks * self.block_size}; ask for fewer tokens or give more memory"
            )
        self._entries[id] = Entry(id, length, limit, length, chunk, sibling)
        self._waiting.append(self._entries[id])

    def schedule(self, budgets: Callable[[int], int]) -> StepPlan:
        """Plan one step; `budgets(id)` is the draft budget a generating request may have."""
        preempted: list[int] = []
        self._admit()
        order = [e for e in self._running if e.length - e.computed == 1]
        order += [e for e in self._running if e.length - e.computed > 1]
        left = self.token_budget
        scheduled: list[Scheduled] = []
        for entry in order:
            if left == 0:
                break
            if entry not in self._running:  # preempted below for an older one
                continue
            count = min(entry.length - entry.computed, left, entry.chunk or left)
            last = entry.computed + count == entry.length
            depth = max(0, entry.limit - entry.length - 1) if last else 0
            budget = min(budgets(entry.id), left - count) if depth else 0
            if not self._grow(entry, entry.computed + count + budget):
                # Drafts are a luxury: no one is preempted for them.
                budget = 0
                while not self._grow(entry, entry.computed + count):
                    victim = self._running[-1]
                    self._preempt(victim)
                    preempted.append(victim.id)
                    scheduled = [item for item in scheduled if item.id != victim.id]
                    if victim is entry:
                        break
                if entry not in self._running:
                    continue
            left -= count + budget
            scheduled.append(Scheduled(entry.id, entry.computed, count, budget, depth, last))
        return StepPlan(tuple(scheduled), tuple(preempted))

    def commit(self, id: int, computed: int, appended: int) -> None:
        """Record that `computed` tokens of the request have KV now and that `appended` tokens were added to it."""
        entry = self.entry(id)
        entry.computed = computed
        entry.length += appended

    def finish(self, id: int) -> None:
        """Forget a request, wherever it stands, and free its blocks."""
        entry = self._entries.pop(id)
        self.pool.release(entry.blocks)
        (self._running if entry in self._running else self._waiting).remove(entry)

    def entry(self, id: int) -> Entry:
        return self._entries[id]

    def check(self) -> None:
        """Prove that the ledger is sound; raises AssertionError when it is not."""
        self.pool.check([entry.blocks for entry in self._running])
        assert len(self._running) <= self.max_num_seqs
        for entry in self._running:
            assert 0 <= entry.computed < entry.length <= entry.limit
            assert len(entry.blocks) >= self._blocks_for(entry.computed)
        for entry in self._waiting:
            assert entry.computed == 0 and not entry.blocks
        ids = [entry.id for entry in (*self._running, *self._waiting)]
        assert len(ids) == len(self._entries) and set(ids) == set(self._entries)

    def _blocks_for(self, slots: int) -> int:
        return -(-slots // self.block_size)

    def _admit(self) -> None:
        if len(self._running) == self.max_num_seqs:
            return
        for entry in list(self._waiting):
            if len(self._running) == self.max_num_seqs:
                break
            shared = self._shared_blocks(entry)
            if shared is None:
                continue  # its sibling computes them now or stands before it in the queue
            # A first chunk must fit beside the running ones, else it would be preempted at once.
            chunk = min(entry.length, self.token_budget)
            if self._running and self.pool.num_free < self._blocks_for(chunk) + len(self._running):
                break
            self.pool.share(shared)
            entry.blocks.extend(shared)
            entry.computed = len(shared) * self.block_size
            self._waiting.remove(entry)
            self._running.append(entry)

    def _shared_blocks(self, entry: Entry) -> list[int] | None:
        """The sibling's full blocks before the prompt's last token, None while they are not all computed."""
        sibling = None if entry.sibling is None else self._entries.get(entry.sibling)
        if sibling is None:  # ended, or there never was one
            return []
        full = (entry.prompt - 1) // self.block_size
        return sibling.blocks[:full] if sibling.computed >= full * self.block_size else None

    def _grow(self, entry: Entry, slots: int) -> bool:
        blocks = self.pool.allocate(max(0, self._blocks_for(slots) - len(entry.blocks)))
        if blocks is None:
            return False
        entry.blocks.extend(blocks)
        return True

    def _preempt(self, entry: Entry) -> None:
        """Give up the blocks; the request comes back first and computes its tokens anew, with the same bits."""
        self.pool.release(entry.blocks)
        entry.blocks.clear()
        entry.computed = 0
        entry.preemptions += 1
        self._running.remove(entry)
        self._waiting.insert(0, entry)
