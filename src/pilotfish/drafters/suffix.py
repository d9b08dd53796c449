"""Drafts what followed the longest contexts seen before (after SuffixDecoding, Oliaro et al. 2024).

Two stores of places: one for each request over its prompt and output, one over the outputs of all requests. The
continuations of the latest places that the context leads to form a tree, whose branches weigh the more the more places
they come from and the longer the context that these share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np

from pilotfish.drafters.base import DraftRequest, Host, Price
from pilotfish.drafters.places import WINDOWS, Places, Text, hashes_of
from pilotfish.drafters.reliability import Reliability
from pilotfish.drafters.speculation import Option
from pilotfish.tree import DraftTree

# A place counts twice as much for each token of context more, up to so many.
DOUBLINGS = 12
_WEIGHTS = [2.0 ** min(length, DOUBLINGS) for length in range(65)]
OWN = 16.0  # what a place in the request counts, where one in the pool counts 1
SURE = 16  # so long a context in the request leaves no weight to the pool
FLOOR = 0.003  # nodes less likely than that pay nowhere
TEXT = 4096  # longer outputs are cut: a text is forgotten as a whole, when its last place is

Continuation = tuple[float, int, list[int]]  # weight, length of the context, tokens


@dataclass
class _Request:
    """A request's own tokens, and how far they have been taken in."""

    text: Text
    places: Places
    shared: int  # tokens of the prompt, and of the output that are in the pool
    reliability: Reliability
    written: list[int]  # the text in the pool that it goes on with
    output: Text
    # What came after the best place, the length of its context, and how many tokens there were then.
    guess: tuple[int, int, list[int]] | None = None


class SuffixDrafter:
    """Trees of what followed the end of the tokens before, in the request and in the outputs of all requests."""

    name = "suffix"
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "depth": Option(32, 4, 64, "longest context that is matched"),
        "shared": Option(200_000, 0, 10_000_000, "tokens kept of what requests have written; 0: none"),
        "min": Option(10, 1, 99, "least share of a branch in what followed, in percent"),
    }

    def __init__(self, depth: int = 32, shared: int = 200_000, min: int = 10) -> None:
        self.pool = Places(shared) if shared else None
        self._depth = depth
        self._least = min / 100
        self._requests: dict[int, _Request] = {}

    @classmethod
    def make(cls, host: Host | None, depth: int, shared: int, min: int) -> SuffixDrafter:
        return cls(depth, shared, min)

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        """The likeliest nodes of each request's continuations, empty where nothing was found."""
        for request in requests:
            kept = self._requests.get(request.id)
            if kept is None:
                text = Text(request.tokens)
                written: list[int] = []
                places = Places(expected=2 * len(request.tokens))
                kept = _Request(text, places, request.prompt, Reliability(), written, Text(written))
                self._requests[request.id] = kept
            kept.text.tokens = request.tokens
            if kept.guess is not None and len(request.tokens) > kept.guess[0]:
                at, length, guess = kept.guess
                kept.reliability.learn(length, guess, request.tokens[at:])
                kept.guess = None
            kept.places.take_in(kept.text)
            self._share(kept)
        return [self._propose(request) for request in requests]

    def end(self, id: int) -> None:
        kept = self._requests.pop(id, None)
        if kept is not None:
            self._share(kept)  # the tokens are the request's own list: the last step's are there by now

    def check(self) -> None:
        """Prove the stores; raises AssertionError. Slow."""
        for places in (self.pool, *(kept.places for kept in self._requests.values())):
            if places is not None:
                places.check()

    def _share(self, kept: _Request) -> None:
        """Take what the request has written since the last time into the pool."""
        tokens = kept.text.tokens
        if self.pool is None:
            return
        while kept.shared < len(tokens):
            if len(kept.written) == TEXT:
                kept.written = []
                kept.output = Text(kept.written)
            new = tokens[kept.shared : kept.shared + TEXT - len(kept.written)]
            kept.written += new
            kept.shared += len(new)
            self.pool.take_in(kept.output)

    def _propose(self, request: DraftRequest) -> DraftTree:
        kept = self._requests[request.id]
        depth = min(request.max_depth, request.budget)
        found = self._continuations(request, kept.places, depth)
        if not found:
            return DraftTree.empty()
        if not request.drafted:
            _, length, guess = max(found, key=lambda item: item[1])
            kept.guess = len(request.tokens), length, guess
        tokens, parents, confidences = _grow(found, request.budget, depth, kept.reliability.chances, self._least)
        return DraftTree(
            np.array(tokens, np.int32), np.array(parents, np.int32), self.name, confidences=tuple(confidences)
        )

    def _continuations(self, request: DraftRequest, own: Places, depth: int) -> list[Continuation]:
        """What came after the places that the context leads to; those of the request first."""
        tokens, drafted = request.tokens, list(request.drafted)
        context = list(tokens[-self._depth :])
        if drafted:
            context = [*context, *drafted][-self._depth :]
        hashes = hashes_of(context)
        found: dict[tuple[int, ...], Continuation] = {}
        places = own.find(context, hashes, len(drafted))
        longest = 0
        for length, _, at in places:
            rest = list(tokens[at : at + depth])
            if len(rest) < depth:
                # It runs into the end and goes on with itself: a loop is drafted beyond it.
                rest += drafted[max(0, at - len(tokens)) :]
                rest = (rest * -(-depth // len(rest)))[:depth]
            _add(found, OWN * _WEIGHTS[length], length, rest)
            longest = max(longest, length)
        if self.pool is not None and longest < SURE:
            # A window much shorter than what was found already would have no weight.
            least = next((window for window in WINDOWS if window <= longest), 1)
            for length, text, at in self.pool.find(context, hashes, 0, least):
                _add(found, _WEIGHTS[length], length, list(text[at : at + depth]))
        return list(found.values())


def _add(found: dict[tuple[int, ...], Continuation], weight: float, length: int, rest: list[int]) -> None:
    """Places with the same continuation count together, and for the longest context of theirs."""
    key = tuple(rest)
    same = found.get(key)
    found[key] = (weight, length, rest) if same is None else (same[0] + weight, max(length, same[1]), rest)


def _grow(
    group: list[Continuation], budget: int, max_depth: int, chances: Sequence[float], least: float
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and confidences of the likeliest nodes.

    A child's confidence is the weight of the continuations through it, among those through its parent that go on,
    times the chance that a context so long leads to what came after it before. A child is no likelier than its
    parent, so taking the likeliest node next gives the tree with the most expected acceptances.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    # What may come next: (-probability, order, parent, token, confidence, share of the path, depth, continuations).
    heap: list[tuple[float, int, int, int, float, float, int, list[Continuation]]] = []
    order = 0
    node, probability, share, depth = -1, 1.0, 1.0, 0
    while True:
        if len(group) == 1:
            # There is no branch: it goes on while no other node is likelier.
            _, length, rest = group[0]
            rival = max(-heap[0][0], FLOOR) if heap else FLOOR
            stop = min(len(rest), depth + budget - len(tokens))
            while depth < stop and (after := probability * chances[length + depth]) >= rival:
                probability = after
                parents.append(node)
                node = len(tokens)
                tokens.append(rest[depth])
                confidences.append(chances[length + depth])
                depth += 1
        if depth < max_depth:
            branches: dict[int, list[Continuation]] = {}
            total = 0.0
            for item in group:
                if depth < len(item[2]):
                    total += item[0]
                    branches.setdefault(item[2][depth], []).append(item)
            for token, items in branches.items():
                part = sum([item[0] for item in items]) / total
                confidence = part * chances[max([item[1] for item in items]) + depth]
                if share * part >= least and probability * confidence >= FLOOR:
                    order += 1
                    entry = -probability * confidence, order, node, token, confidence, share * part, depth + 1, items
                    heappush(heap, entry)
        if not heap or len(tokens) >= budget:
            break
        negative, _, parent, token, confidence, share, depth, group = heappop(heap)
        probability, node = -negative, len(tokens)
        tokens.append(token)
        parents.append(parent)
        confidences.append(confidence)
    return tokens, parents, confidences
