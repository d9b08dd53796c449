"""Lookahead: the target solves for later tokens in parallel, and drafts are the n-grams it met (Fu et al. 2024).

Each step's tree has two parts. The *verification branch*: n-grams of a pool that begin with the last committed token.
The *window*: W columns of guessed tokens on N - 1 levels; level 0 is a chain behind the last committed token, level i
of a column is what the target thought, a step ago, would follow level i - 1 of that column. The target's likeliest
token after a column's lowest level completes an n-gram, which goes to the pool, and is the column's new lowest level;
level 0 falls away.

Lookahead is defined by an attention mask: level 0 of column j sees the committed tokens and level 0 of the columns up
to j; level i > 0 sees these and levels 1..i of its own column; its position is that of the last committed token
+ 1 + j + i. That is a draft tree: node (0, j) has the parent (0, j - 1), node (i, j) the parent (i - 1, j). The
ancestors of (i, j) are (0, 0)..(0, j) and (1, j)..(i - 1, j), which is what the mask lets it see, and its depth is
1 + j + i, so position and order of KV are right as well. Where (0, j + 1) and (1, j), or the beginnings of guesses and
window, carry the same token, they are children of one parent with the same path, so the same row, and are one node.
Guesses see nothing of the window and the reverse unless they share a path. So the tree batch needs nothing new, and
whatever the window holds, the rule of verification sees one more draft tree: the output is the target's own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from pilotfish.drafters.base import DraftRequest, Host, Price
from pilotfish.drafters.reliability import Reliability
from pilotfish.drafters.speculation import Option
from pilotfish.tree import DraftTree, Ints

POOL = 8192  # n-grams that are kept for a request
WINDOW_CONFIDENCE = 0.03  # the window is there to be computed, not to stand
MOST_SEEN = 16  # sightings of an n-gram that are counted

Ngram = tuple[int, ...]


class NgramPool:
    """N-grams by their first token, each with how often it was seen: at most `each` of one token and `most` in all.

    The n-gram, and the first token, that was seen the longest ago goes first.
    """

    def __init__(self, each: int, most: int = POOL) -> None:
        self._each, self._most = each, most
        self._rests: dict[int, dict[Ngram, int]] = {}  # first token -> rest -> times seen; the latest last
        self.size = 0

    def add(self, first: int, rest: Ngram) -> None:
        """An n-gram was seen."""
        if self._each == 0:
            return
        rests = self._rests.pop(first, {})
        seen = rests.pop(rest, 0)
        self._rests[first] = rests
        rests[rest] = min(seen + 1, MOST_SEEN)
        self.size += seen == 0
        if len(rests) > self._each:
            del rests[next(iter(rests))]
            self.size -= 1
        while self.size > self._most:
            oldest = next(iter(self._rests))
            others = self._rests[oldest]
            del others[next(iter(others))]
            self.size -= 1
            if not others:
                del self._rests[oldest]

    def guesses(self, first: int) -> list[tuple[Ngram, int]]:
        """What followed the token, and how often it was seen; the latest first."""
        return list(self._rests.get(first, {}).items())[::-1]

    def latest(self, first: int) -> int | None:
        """The token that followed last."""
        rests = self._rests.get(first)
        return next(reversed(rests))[0] if rests else None

    def check(self) -> None:
        """Prove the bounds and the count; raises AssertionError."""
        assert self.size == sum(map(len, self._rests.values())) <= self._most
        assert all(0 < len(rests) <= self._each for rests in self._rests.values())
        assert all(0 < seen <= MOST_SEEN for rests in self._rests.values() for seen in rests.values())


@dataclass
class _Request:
    pool: NgramPool
    random: random.Random  # for guesses out of nothing
    reliability: Reliability = field(default_factory=Reliability)  # by how often an n-gram was seen
    done: int = 0  # tokens whose n-grams are in the pool
    length: int = 0  # tokens that were committed when the window was proposed
    columns: list[list[int]] = field(default_factory=list)  # [window] tokens of each, level 0 first
    outputs: list[int | None] | None = (
        None  # [window] what the target said after each column; None: nothing was observed
    )
    waits: bool = False  # for what the target says of the window
    guess: tuple[int, int, list[int]] | None = None  # tokens committed then, times seen, the likeliest guess


class LookaheadDrafter:
    """N-grams of the target's own parallel guesses, and of the text so far.

    The window needs all its nodes in one pass: a node without its ancestors can not be computed, and one without its
    descendants gives no n-gram. So its trees are verified as they are or not at all.
    """

    name = "lookahead"
    WHOLE = True  # the controller takes or leaves the tree, but does not prune it
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "window": Option(5, 0, 32, "columns of guessed tokens"),
        "ngram": Option(3, 2, 8, "tokens of an n-gram: the one it begins with, and drafts"),
        "guesses": Option(3, 0, 16, "most n-grams that are verified in a step"),
    }

    def __init__(self, window: int = 5, ngram: int = 3, guesses: int = 3) -> None:
        self._window, self._levels, self._guesses = window, ngram - 1, guesses
        self._requests: dict[int, _Request] = {}

    @classmethod
    def make(cls, host: Host | None, window: int, ngram: int, guesses: int) -> LookaheadDrafter:
        return cls(window, ngram, guesses)

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        """Guesses, and as much of the window as the budget and depth allow.

        Behind another drafter's drafts only guesses: a window there would be computed for a text that may not come.
        """
        return [self._propose(request) for request in requests]

    def observe(self, id: int, tree: DraftTree, choices: Ints) -> None:
        """Takes of the window what is found in the tree that was verified, by the tokens of the paths."""
        kept = self._requests.get(id)
        if kept is None or not kept.waits:
            return
        kept.waits = False
        said = choices.tolist()
        nodes = {
            place: node for node, place in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
        }
        outputs: list[int | None] = []
        above: int | None = -1
        for column in kept.columns:
            above = node = None if above is None else nodes.get((above, column[0]))
            for token in column[1:]:
                node = None if node is None else nodes.get((node, token))
            output = None if node is None or said[node + 1] < 0 else said[node + 1]  # -1: not finite
            outputs.append(output)
            if output is not None and len(column) == self._levels:
                kept.pool.add(column[0], (*column[1:], output))
        if any(output is not None for output in outputs):
            kept.outputs = outputs

    def end(self, id: int) -> None:
        self._requests.pop(id, None)

    def check(self) -> None:
        """Prove the pools' bounds and the windows' shapes; raises AssertionError."""
        for kept in self._requests.values():
            kept.pool.check()
            assert len(kept.columns) in (0, self._window)
            assert len({len(column) for column in kept.columns}) <= 1
            assert all(1 <= len(column) <= self._levels for column in kept.columns)

    def _propose(self, request: DraftRequest) -> DraftTree:
        kept = self._requests.get(request.id)
        if kept is None:
            kept = self._requests[request.id] = _Request(NgramPool(self._guesses), random.Random(request.id))
        self._take_in(kept, request.tokens)
        last = request.drafted[-1] if request.drafted else request.tokens[-1]
        guesses = kept.pool.guesses(last)
        tree = _Builder(request.budget, request.max_depth)
        # The more often and the later seen, the likelier; together no likelier than 1.
        chances = [kept.reliability.chances[seen] for _, seen in guesses]
        total = max(1.0, sum(chances))
        for (rest, seen), chance in zip(guesses, chances, strict=True):
            parent: int | None = -1
            for depth, token in enumerate(rest):
                confidence = kept.reliability.chances[seen + depth] if depth else chance / total
                parent = None if parent is None else tree.add(parent, token, confidence)
        if not request.drafted:
            if guesses:
                best = max(guesses, key=lambda guess: guess[1])
                kept.guess = len(request.tokens), best[1], list(best[0])
            self._move(kept, request.tokens)
            kept.length, kept.waits = len(request.tokens), True
            tree.add_window(kept.columns)
        return tree.tree(self.name)

    def _take_in(self, kept: _Request, tokens: Sequence[int]) -> None:
        """The n-grams of the text that are complete since the last time."""
        if kept.guess is not None and len(tokens) > kept.guess[0]:
            at, seen, guess = kept.guess
            kept.reliability.learn(seen, guess, list(tokens[at:]))
            kept.guess = None
        size = self._levels
        start = max(0, kept.done - size, len(tokens) - size - POOL)
        recent = tokens[start:]
        for first in range(len(recent) - size):
            kept.pool.add(recent[first], tuple(recent[first + 1 : first + 1 + size]))
        kept.done = max(kept.done, len(tokens))

    def _move(self, kept: _Request, tokens: Sequence[int]) -> None:
        """Bring the window behind the last token, with what the target said of it as its lowest level.

        Level i of column j guesses at the token j + i behind the last one. Where level 0 falls away, level 1 guesses
        at the next place, so one new token is made up for; for each token more a column leaves on the left.
        """
        gone = len(tokens) - kept.length
        if kept.outputs is not None:
            for column, output in zip(kept.columns, kept.outputs, strict=True):
                column.append(self._guess(kept, column[-1], tokens) if output is None else output)
            if kept.columns and len(kept.columns[0]) > self._levels:
                for column in kept.columns:
                    del column[0]
                gone -= 1
            kept.outputs = None
        del kept.columns[:gone]
        height = len(kept.columns[0]) if kept.columns else 1
        while len(kept.columns) < self._window:
            before = kept.columns[-1][0] if kept.columns else tokens[-1]
            column = [self._guess(kept, before, tokens)]
            while len(column) < height:
                column.append(self._guess(kept, column[-1], tokens))
            kept.columns.append(column)

    def _guess(self, kept: _Request, before: int, tokens: Sequence[int]) -> int:
        """A token to begin with: what followed before, or any of the text."""
        token = kept.pool.latest(before)
        return tokens[kept.random.randrange(len(tokens))] if token is None else token


class _Builder:
    """A tree whose nodes with the same parent and token are one, within bounds."""

    def __init__(self, budget: int, max_depth: int) -> None:
        self._budget, self._max_depth = budget, max_depth
        self._nodes: dict[tuple[int, int], int] = {}
        self._depths: list[int] = []
        self._confidences: list[float] = []

    def add(self, parent: int, token: int, confidence: float) -> int | None:
        """The node, None: it does not fit."""
        node = self._nodes.get((parent, token))
        if node is None:
            depth = self._depths[parent] + 1 if parent >= 0 else 1
            if len(self._nodes) == self._budget or depth > self._max_depth:
                return None
            node = self._nodes[parent, token] = len(self._nodes)
            self._depths.append(depth)
            self._confidences.append(confidence)
        return node

    def add_window(self, columns: Sequence[Sequence[int]]) -> None:
        """As many whole columns as fit, from the left."""
        above = -1
        for column in columns:
            if self._room(above) < len(column):
                break
            node = above
            for level, token in enumerate(column):
                added = self.add(node, token, WINDOW_CONFIDENCE)
                assert added is not None
                node = added
                if level == 0:
                    above = node

    def _room(self, parent: int) -> int:
        """How many new nodes may surely hang below one another there."""
        depth = self._depths[parent] if parent >= 0 else 0
        return min(self._budget - len(self._nodes), self._max_depth - depth)

    def tree(self, drafter: str) -> DraftTree:
        parents = np.array([parent for parent, _ in self._nodes], np.int32)
        tokens = np.array([token for _, token in self._nodes], np.int32)
        return DraftTree(tokens, parents, drafter, confidences=tuple(self._confidences))
