"""Draft trees and the tree batch: what one forward pass computes, in plain integer arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Probs = NDArray[np.float64]

LAW_TOLERANCE = 1e-6  # how far the sum of a law may be from 1


def _ints(values: Sequence[int] | Ints) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int32)


def _check_law(law: Probs, token: int, drawn_before: Sequence[int], vocab_size: int) -> None:
    if not isinstance(law, np.ndarray) or law.dtype != np.float64 or law.shape != (vocab_size,):
        raise ValueError(f"a law must be an array of {vocab_size} float64")
    if not (law >= 0).all() or not abs(law.sum() - 1) <= LAW_TOLERANCE:  # a NaN fails both
        raise ValueError("a law must have no negative number and the sum 1")
    if law[token] == 0:
        raise ValueError(f"token {token} has probability 0 in the law that it was drawn from")
    if law[list(drawn_before)].any():
        raise ValueError("the law of a sibling allows a token that was drawn before it")


@dataclass(frozen=True)
class DraftTree:
    """Proposed tokens of one request, each with a parent.

    `parents[i] < i`; -1 stands for the root, the last committed token, which is not part of the tree.
    Siblings carry different tokens.

    `laws[i]` is the law [vocab] that token i was *drawn* from, given its parent's path and its siblings drawn before:
    without replacement, the parent's distribution less those siblings, renormalised. It is the law of the draw itself,
    after every filter. None: the token was not drawn but fixed by the context (n-gram, greedy, top-k), a point mass.
    No laws at all mean None everywhere. Siblings that were drawn stand in the order of drawing.

    `confidences[i]` is what the drafter thinks of the chance that token i stands if its parent does; the controller
    learns what it means. None at all: the drafter has no opinion.
    """

    tokens: Ints  # [nodes]
    parents: Ints  # [nodes]
    drafter: str = ""
    laws: tuple[Probs | None, ...] = ()
    confidences: tuple[float, ...] = ()
    drafters: tuple[str, ...] = ()  # [nodes] who drafted each, where one drafter went on with another's tree

    @staticmethod
    def empty() -> DraftTree:
        return DraftTree(_ints([]), _ints([]))

    @staticmethod
    def chain(tokens: Sequence[int], drafter: str = "", confidences: Sequence[float] = ()) -> DraftTree:
        """A tree without branches."""
        parents = _ints(range(-1, len(tokens) - 1))
        return DraftTree(_ints(tokens), parents, drafter, confidences=tuple(confidences))

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> Ints:
        """[nodes], 1 for a child of the root."""
        depth = np.zeros(len(self), np.int32)
        for node, parent in enumerate(self.parents):
            depth[node] = 1 if parent < 0 else depth[parent] + 1
        return depth

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to `node`; none for -1, the root."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def first(self, nodes: int) -> DraftTree:
        """The tree of the first `nodes` nodes: parents come before children, so it is a tree too."""
        if nodes >= len(self):
            return self
        return DraftTree(
            self.tokens[:nodes],
            self.parents[:nodes],
            self.drafter,
            self.laws[:nodes],
            self.confidences[:nodes],
            self.drafters[:nodes],
        )

    def select(self, keep: Sequence[bool]) -> DraftTree:
        """The tree of the nodes with `keep` [nodes] whose ancestors are kept too.

        Raises ValueError when `keep` has another length.
        """
        if len(keep) != len(self):
            raise ValueError(f"{len(keep)} choices for a tree of {len(self)} nodes")
        place = {-1: -1}
        for node, parent in enumerate(self.parents.tolist()):
            if keep[node] and parent in place:
                place[node] = len(place) - 1
        kept = [node for node in place if node >= 0]
        return DraftTree(
            self.tokens[kept],
            _ints([place[int(self.parents[node])] for node in kept]),
            self.drafter,
            tuple(self.laws[node] for node in kept) if self.laws else (),
            tuple(self.confidences[node] for node in kept) if self.confidences else (),
            tuple(self.drafters[node] for node in kept) if self.drafters else (),
        )

    def graft(self, at: int, other: DraftTree, most: int) -> DraftTree:
        """This tree with `other` below node `at` (-1: the root), up to `most` nodes in all.

        Where both have the same token in the same place, this tree's node stays. A node without an opinion has the
        confidence 1. Raises ValueError when a drawn node would be added: its law would not fit its new siblings.
        """
        if any(law is not None for law in other.laws):
            raise ValueError("a drawn draft can not be grafted")
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        confidences, drafters = list(self.all_confidences()), list(self.all_drafters())
        laws = list(self.laws)
        at_of = {-1: at}
        places = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        rows = zip(
            other.tokens.tolist(),
            other.parents.tolist(),
            other.all_confidences(),
            other.all_drafters(),
            strict=True,
        )
        for node, (token, parent, confidence, drafter) in enumerate(rows):
            if parent not in at_of:
                continue
            place = at_of[parent], token
            if place not in places:
                if len(tokens) >= most:
                    continue
                places[place] = len(tokens)
                tokens.append(token)
                parents.append(place[0])
                confidences.append(confidence)
                drafters.append(drafter)
                if laws:
                    laws.append(None)
            at_of[node] = places[place]
        return DraftTree(_ints(tokens), _ints(parents), self.drafter, tuple(laws), tuple(confidences), tuple(drafters))

    def all_confidences(self) -> tuple[float, ...]:
        """[nodes] 1 where the drafter has no opinion."""
        return self.confidences or (1.0,) * len(self)

    def all_drafters(self) -> tuple[str, ...]:
        """[nodes] who drafted each."""
        return self.drafters or (self.drafter,) * len(self)

    def law(self, node: int) -> Probs | None:
        """The law that the token of `node` was drawn from; None when it was not drawn."""
        return self.laws[node] if self.laws else None

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that lie along these tokens from the root on, as far as there are any."""
        path: list[int] = []
        for token in tokens:
            node = self.child(path[-1] if path else -1, token)
            if node is None:
                break
            path.append(node)
        return path

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (-1: root) that carries `token`."""
        for index in range(node + 1, len(self)):
            if self.parents[index] == node and self.tokens[index] == token:
                return index
        return None

    def check(self, vocab_size: int) -> None:
        """Raise ValueError unless this is a tree over the vocabulary, with laws its tokens can have been drawn from."""
        if self.tokens.shape != self.parents.shape or self.tokens.ndim != 1:
            raise ValueError("tokens and parents must be two rows of one length")
        if self.tokens.dtype.kind != "i" or self.parents.dtype.kind != "i":
            raise ValueError("tokens and parents must be whole numbers")
        if len(self.laws) not in (0, len(self)):
            raise ValueError(f"{len(self.laws)} laws for {len(self)} nodes")
        for what, values in (("confidences", self.confidences), ("drafters", self.drafters)):
            if len(values) not in (0, len(self)):
                raise ValueError(f"{len(values)} {what} for {len(self)} nodes")
        if not all(0 <= confidence <= 1 for confidence in self.confidences):  # a NaN fails
            raise ValueError("a confidence must lie in 0..1")
        if len(self) == 0:
            return
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            raise ValueError(f"a drafted token lies outside the vocabulary of {vocab_size}")
        if self.parents.min() < -1 or (self.parents >= np.arange(len(self))).any():
            raise ValueError("a parent must come before its child")
        pairs = set(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        if len(pairs) != len(self):
            raise ValueError("two siblings carry the same token")
        drawn: dict[int, list[int]] = {}  # parent -> tokens of its children drawn so far
        for law, token, parent in zip(self.laws, self.tokens.tolist(), self.parents.tolist(), strict=False):
            if law is not None:
                _check_law(law, token, drawn.setdefault(parent, []), vocab_size)
                drawn[parent].append(token)


@dataclass(frozen=True)
class Rows:
    """The rows one request adds to a forward pass: committed tokens without KV, then its draft tree.

    `start` is the position of `tokens[0]`, which is also the number of slots that already hold KV.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]  # block ids; slot s lives in blocks[s // block_size]
    tree: DraftTree = field(default_factory=DraftTree.empty)
    all_logits: bool = False  # want logits of every row, not only of the last token and the drafts
    logits: bool = True  # False: a prefill chunk that ends before the last token


@dataclass(frozen=True)
class TreeBatch:
    """All query rows of one forward pass, ragged over requests (CSR).

    A row's KV goes to slot `slots[row]` of its request. It attends to positions 0..positions[row]: position p lies in
    slot p while p < prefix_lens[row], and from there on in slot path_slots[path_starts[row] + p - prefix_lens[row]]
    (its ancestors and itself). A chain row has prefix_lens = position + 1 and an empty path.
    """

    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    slots: Ints  # [rows]
    prefix_lens: Ints  # [rows]
    path_starts: Ints  # [rows + 1]
    path_slots: Ints  # [path_starts[-1]]
    row_starts: Ints  # [requests + 1]
    block_tables: Ints  # [requests, most blocks], unused entries are 0
    logit_rows: Ints  # [wanted], ascending rows whose head output is wanted
    logit_starts: Ints  # [requests + 1] into logit_rows

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_requests(self) -> int:
        return len(self.row_starts) - 1

    @staticmethod
    def build(requests: Sequence[Rows]) -> TreeBatch:
        """Lay the rows of all requests one after the other."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        prefix_lens: list[int] = []
        path_starts = [0]
        path_slots: list[int] = []
        row_starts = [0]
        logit_rows: list[int] = []
        logit_starts = [0]
        tables = np.zeros((len(requests), max((len(r.blocks) for r in requests), default=0)), np.int32)
        for index, rows in enumerate(requests):
            tables[index, : len(rows.blocks)] = rows.blocks
            first = len(tokens)
            count = len(rows.tokens)
            end = rows.start + count
            tokens.extend(rows.tokens)
            positions.extend(range(rows.start, end))
            slots.extend(range(rows.start, end))
            prefix_lens.extend(range(rows.start + 1, end + 1))
            path_starts.extend([len(path_slots)] * count)
            paths: list[list[int]] = []
            for node, (token, parent) in enumerate(
                zip(rows.tree.tokens.tolist(), rows.tree.parents.tolist(), strict=True)
            ):
                path = ([] if parent < 0 else paths[parent]) + [end + node]
                paths.append(path)
                position = end + len(path) - 1
                tokens.append(token)
                positions.append(position)
                slots.append(end + node)
                # Ancestors that lie in their own positions need no path: a chain costs nothing extra.
                in_place = path[-1] == position
                prefix_lens.append(position + 1 if in_place else end)
                if not in_place:
                    path_slots.extend(path)
                path_starts.append(len(path_slots))
            if rows.logits:
                logit_rows.extend(range(first if rows.all_logits else first + count - 1, len(tokens)))
            row_starts.append(len(tokens))
            logit_starts.append(len(logit_rows))
        return TreeBatch(
            tokens=_ints(tokens),
            positions=_ints(positions),
            slots=_ints(slots),
            prefix_lens=_ints(prefix_lens),
            path_starts=_ints(path_starts),
            path_slots=_ints(path_slots),
            row_starts=_ints(row_starts),
            block_tables=tables,
            logit_rows=_ints(logit_rows),
            logit_starts=_ints(logit_starts),
        )


@dataclass(frozen=True)
class Verdict:
    """What verification decided for one request.

    `path` are the accepted nodes from the root down; `tokens` the emitted tokens: the accepted drafts and then one
    more, *recovered* after a rejection or *bonus* after full acceptance of a branch.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    bonus: bool
