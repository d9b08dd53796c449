"""Draft trees that grow by passes through a model: what is computed next, what it is worth, when to stop.

A pass gives every request the children of its nodes that were computed in it. A node's *survival* is the product of the
chances along its path (EAGLE-2, Li et al. 2024, calls it the value): the chance that it is emitted, so a tree's
survivals add up to the tokens that it brings.

When to stop: with time worth L tokens per ms, a pass over the requests R brings sum over R of (v_r - L row_ms) -
L pass_ms, where v_r is the survival that the request's next node is expected to have. The cost of the pass is one for
all, so a request belongs in it exactly if v_r > L row_ms, and with those the pass pays or does not (`Price.pays`). To
leave out a request whose node would not carry its share of pass_ms would be wrong: the others pay for the pass anyway.
Survivals only fall along a path, so a pass that does not pay now does not pay later either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pilotfish.drafters.base import DraftRequest, Price
from pilotfish.drafters.choices import Choice
from pilotfish.drafters.contents import next_key
from pilotfish.tree import DraftTree, Ints, Probs, TreeBatch

ROOT = -1
CATCH_UP_ROWS = 512  # of one proposal: what is left waits for the next ones
BESIDE_ROWS = 128  # when there is someone in it who can draft at once, and would wait
READY_ROWS = 16  # so little is left that a request is computed whole
PERSISTENCE = 0.3  # correlation of confidences that follow each other (Qwen2.5-Coder 0.5B, chat and code: 0.29-0.31)


@dataclass(frozen=True)
class PassRows:
    """Rows of one request in a pass, in slots from `start` on. `paths` [rows] are the slots of a row's ancestors that
    do not lie in their own positions, the row's own last; a row without any lies in the slot of its position."""

    tokens: Sequence[int]
    start: int
    blocks: Ints
    wanted: int  # so many of the last rows go through the head
    positions: Sequence[int] | None = None  # None: those of the slots
    paths: Sequence[Sequence[int]] | None = None


def lay(requests: Sequence[PassRows]) -> TreeBatch:
    """The tree batch of these rows, one request after the other."""
    counts = [len(rows.tokens) for rows in requests]
    slots = [np.arange(rows.start, rows.start + count) for rows, count in zip(requests, counts, strict=True)]
    places = [
        slot if rows.positions is None else np.asarray(rows.positions)
        for rows, slot in zip(requests, slots, strict=True)
    ]
    paths = [path for rows in requests for path in (rows.paths or ((),) * len(rows.tokens))]
    lengths = np.array([len(path) for path in paths], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate(places)
    tables = np.zeros((len(requests), max(len(rows.blocks) for rows in requests)), np.int32)
    for index, rows in enumerate(requests):
        tables[index, : len(rows.blocks)] = rows.blocks
    wanted = [np.arange(stop - rows.wanted, stop) for rows, stop in zip(requests, starts[1:].tolist(), strict=True)]
    return TreeBatch(
        tokens=np.concatenate([np.asarray(rows.tokens, np.int32) for rows in requests]),
        positions=positions.astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        prefix_lens=(positions + 1 - lengths).astype(np.int32),
        path_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        path_slots=np.array([slot for path in paths for slot in path], np.int32),
        row_starts=starts.astype(np.int32),
        block_tables=tables,
        logit_rows=np.concatenate(wanted).astype(np.int32),
        logit_starts=np.concatenate([[0], np.cumsum([rows.wanted for rows in requests])]).astype(np.int32),
    )


def shares(rests: Sequence[int]) -> list[int]:
    """How many rows each request computes in the first pass of a proposal, of the `rests` that it has to.

    Those with little left go first, and what is for the others is bounded: nobody waits for a long prompt.
    """
    ready_rows = sum(rest for rest in rests if rest <= READY_ROWS)
    left = ready_rows + BESIDE_ROWS if ready_rows else CATCH_UP_ROWS
    given = [0] * len(rests)
    for index in sorted(range(len(rests)), key=rests.__getitem__):
        given[index] = min(rests[index], left)
        left -= given[index]
    return given


@dataclass
class Node:
    """A drafted token. `slot` is where its KV lies once it was computed; `key` stands for its path (contents.py)."""

    token: int
    parent: int
    depth: int
    survival: float
    confidence: float
    key: int
    law: Probs | None = None
    slot: int | None = None
    path: tuple[int, ...] = ()  # slots from the first that is not in its own position; empty: in place


@dataclass
class Growth:
    """The draft tree of one request as it grows behind `length` tokens; nodes have slots from there on."""

    request: DraftRequest
    blocks: Ints
    length: int  # committed tokens and drafts that stood behind them
    key: int  # of those tokens
    most_slots: int  # that nodes may take
    most_depth: int
    branches: int  # nodes that are computed in one pass
    children: int  # of a node: those that are not computed cost a row only, if the controller keeps them
    typical: float  # confidence that is expected of a node
    ends: frozenset[int] = frozenset()  # tokens that nothing can follow
    nodes: list[Node] = field(default_factory=list)
    used: int = 0  # slots taken

    def add(self, parent: int, choices: Sequence[Choice], price: Price | None) -> None:
        """Take the children of a node that was computed (ROOT: the last token)."""
        above = self.nodes[parent] if parent >= 0 else None
        depth, survival, key = (above.depth, above.survival, above.key) if above else (0, 1.0, self.key)
        for choice in choices:
            chance = choice.confidence if price is None else self._chance(price, depth + 1, choice.confidence)
            self.nodes.append(
                Node(
                    choice.token,
                    parent,
                    depth + 1,
                    survival * chance,
                    choice.confidence,
                    next_key(key, choice.token),
                    choice.law,
                )
            )

    def next(self, price: Price | None, rows: int) -> tuple[list[int], list[float]]:
        """Nodes to compute in the next pass, and the survivals that their best children are expected to have.

        `rows` is how many nodes all requests of the proposal have.
        """
        kept = self._kept()
        least = -1.0 if price is None else price.least(rows)
        if len(kept) == self.request.budget:
            if self.children == 1:  # a chain that is full can not change
                return [], []
            least = self.nodes[kept[-1]].survival
        chosen: list[int] = []
        worth: list[float] = []
        room = min(self.branches, self.most_slots - self.used)
        for index in kept:
            if len(chosen) >= room:
                break
            node = self.nodes[index]
            if node.slot is not None or node.depth >= self.most_depth or node.token in self.ends:
                continue
            confidence = self.typical + PERSISTENCE * (node.confidence - self.typical)
            chance = confidence if price is None else self._chance(price, node.depth + 1, confidence)
            if node.survival * chance > least:
                chosen.append(index)
                worth.append(node.survival * chance)
        return chosen, worth

    def rows(self, indices: Sequence[int]) -> PassRows:
        """The rows of these nodes, which take the next slots."""
        start = self.length + self.used
        for slot, index in enumerate(indices, start):
            node = self.nodes[index]
            node.slot = slot
            parent = self.nodes[node.parent] if node.parent >= 0 else None
            if slot != self.length + node.depth - 1 or (parent is not None and parent.path):
                node.path = (*(parent.path if parent is not None else ()), slot)
        self.used += len(indices)
        nodes = [self.nodes[index] for index in indices]
        return PassRows(
            [node.token for node in nodes],
            start,
            self.blocks,
            len(nodes),
            [self.length + node.depth - 1 for node in nodes],
            [node.path for node in nodes],
        )

    def tree(self, name: str) -> DraftTree:
        """The nodes that are likeliest to be emitted, up to the budget."""
        kept = sorted(self._kept())
        place = {ROOT: ROOT} | {index: at for at, index in enumerate(kept)}
        nodes = [self.nodes[index] for index in kept]
        laws = tuple(node.law for node in nodes)
        return DraftTree(
            np.array([node.token for node in nodes], np.int32),
            np.array([place[node.parent] for node in nodes], np.int32),
            name,
            laws if any(law is not None for law in laws) else (),
            tuple(node.confidence for node in nodes),
        )

    def _kept(self) -> list[int]:
        """Indices, the highest survival first. A parent is never below its children, and of equals it comes first."""
        order = sorted(range(len(self.nodes)), key=lambda index: (-self.nodes[index].survival, index))
        return order[: self.request.budget]

    def _chance(self, price: Price, depth: int, confidence: float) -> float:
        return min(1.0, max(0.0, price.chance(self.request.id, depth, confidence)))


Compute = Callable[[list[tuple[Growth, list[int]]]], None]


def grow(growing: Sequence[Growth], compute: Compute, price: Price | None) -> None:
    """Let trees grow while a pass pays. `compute` makes one pass over nodes and adds their children."""
    while True:
        asked: list[tuple[Growth, list[int]]] = []
        survivals: list[float] = []
        rows = sum(min(len(growth.nodes), growth.request.budget) for growth in growing)
        for growth in growing:
            nodes, worth = growth.next(price, rows)
            if nodes:
                asked.append((growth, nodes))
                survivals += worth
        if not asked or (price is not None and not price.pays(survivals, rows)):
            return
        compute(asked)
