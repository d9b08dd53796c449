"""Drafts what followed the longest contexts seen before (SuffixDecoding, Oliaro et al. 2024).

A suffix automaton counts every substring of a set of texts: one for each request over its prompt and output, one over
the outputs of all requests. It is chosen over a trie of bounded depth as it has about 1.5 states per token whatever the
depth, and appending and removing a token are the same walk along suffix links, so eviction is exact.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np

from pilotfish.drafters.base import DraftRequest, Option
from pilotfish.tree import DraftTree

# A text is cut where so many of its suffixes have counts of their own: in a loop that number grows by one each round,
# and with it the time that a token takes. Contexts do not reach over a cut.
TEXT_SUFFIXES = 32
CONTEXTS = 4  # different contexts that are tried in each automaton, the longest first
SUCCESSORS = 64  # a context that so many different tokens followed is no ground for a guess, and slow to look through
TIE = 1e-9  # scores that are no further apart differ by rounding

_ROOT = 0  # the state of the empty string
_NONE = -1


@dataclass(eq=False)
class Text:
    """A run of tokens that an automaton counts, and may be made longer."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    states: array[int] = field(default_factory=lambda: array("i", [_ROOT]))  # of its prefixes, the empty one first
    full: bool = False  # cut, or being removed: nothing may be appended any more


class SuffixAutomaton:
    """Counts the occurrences of all substrings of a set of texts (Blumer et al. 1985, for several texts).

    A state stands for strings that end at the same places, each a suffix of the longest of them; its link is the
    state of the longest suffix that also occurs elsewhere. Removing tokens may leave states apart that could be one,
    never the reverse, so counts stay exact. Appending or removing a token takes a walk along the links from its text's
    state, some TEXT_SUFFIXES of them at most.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # integers only, so the garbage collector has nothing to look at
        self._link = [_NONE]
        self._length = [0]  # of the longest string
        self._count = [0]  # occurrences of each of its strings; 0: the state is free
        self._free: list[int] = []

    @property
    def num_states(self) -> int:
        return len(self._next) - len(self._free)

    def append(self, text: Text, token: int) -> None:
        """Count the suffixes of the text with one more token."""
        nexts, link, length, count = self._next, self._link, self._length, self._count
        last = text.states[-1]
        target = nexts[last].get(token)
        if target is not None:
            state = target if length[target] == length[last] + 1 else self._split(last, token, target)
        else:
            state = self._new(length[last] + 1)
            while last != _NONE and (target := nexts[last].get(token)) is None:
                nexts[last][token] = state
                last = link[last]
            if target is None:
                link[state] = _ROOT
            else:
                link[state] = target if length[target] == length[last] + 1 else self._split(last, token, target)
        text.tokens.append(token)
        text.states.append(state)
        suffixes = 0
        while state != _ROOT:
            count[state] += 1
            suffixes += 1
            state = link[state]
        text.full = suffixes >= TEXT_SUFFIXES

    def remove(self, text: Text) -> None:
        """Undo the append of the text's last token. Nothing may be appended to it any more."""
        nexts, link, count = self._next, self._link, self._count
        text.full = True
        token = text.tokens.pop()
        state = text.states.pop()
        dead = []
        while state != _ROOT:
            count[state] -= 1
            if count[state] == 0:
                dead.append(state)
            state = link[state]
        if dead:
            # What leads to dead states are suffixes of what is left of the text, the long ones to the first to die.
            before = text.states[-1]
            while before != _NONE and count[nexts[before][token]] == 0:
                del nexts[before][token]
                before = link[before]
            self._free.extend(dead)

    def match(self, tokens: Sequence[int]) -> int:
        """The state of the longest suffix of the tokens that occurs."""
        nexts, link = self._next, self._link
        state = _ROOT
        for token in tokens:
            while (target := nexts[state].get(token)) is None:
                state = link[state]
                if state == _NONE:
                    target = _ROOT
                    break
            state = target
        return state

    def contexts(self, tokens: Sequence[int]) -> Iterator[int]:
        """States of suffixes of the tokens that something followed, the longest first, no two with the same places."""
        seen = 0
        state = self.match(tokens)
        while state != _ROOT:
            if self._next[state] and self._count[state] > seen:
                seen = self._count[state]
                yield state
            state = self._link[state]

    def successors(self, state: int) -> dict[int, int]:
        """token -> state after it, of what followed; where nothing did, of the longest suffix that something followed.

        So what runs into the end of a text goes on with the suffix that occurred before: a loop is drafted
        beyond its end. Empty where SUCCESSORS or more are known.
        """
        successors = self._next[state]
        while not successors and state != _ROOT:
            state = self._link[state]
            successors = self._next[state]
        return {} if state == _ROOT or len(successors) >= SUCCESSORS else successors

    def counts(self, states: Iterable[int]) -> list[int]:
        """Occurrences of the strings of each state."""
        return [self._count[state] for state in states]

    def count(self, tokens: Sequence[int]) -> int:
        """How often the tokens occur in a row; at least one token."""
        state = _ROOT
        for token in tokens:
            target = self._next[state].get(token)
            if target is None:
                return 0
            state = target
        return self._count[state]

    def check(self, texts: Iterable[Text]) -> None:
        """Prove by recounting that exactly the substrings of the texts are counted; raises AssertionError."""
        recount: Counter[tuple[int, ...]] = Counter()
        for text in texts:
            tokens = tuple(text.tokens)
            recount.update(tokens[i:j] for i in range(len(tokens)) for j in range(i + 1, len(tokens) + 1))
        for string, occurrences in recount.items():
            assert self.count(string) == occurrences, (string, occurrences)
        free = set(self._free)
        used = set(range(len(self._next))) - free
        assert len(free) == len(self._free) and _ROOT in used
        for state in used - {_ROOT}:
            assert self._count[state] > 0 and self._link[state] in used
            assert self._length[state] > self._length[self._link[state]]
        assert all(not self._next[state] for state in free)
        assert used.issuperset(target for targets in self._next for target in targets.values())
        strings = sum(self._length[state] - self._length[self._link[state]] for state in used - {_ROOT})
        assert strings == len(recount), f"{strings} strings have a state, {len(recount)} occur"

    def _new(self, length: int) -> int:
        if self._free:
            state = self._free.pop()
            self._length[state] = length
            return state
        self._next.append({})
        self._link.append(_ROOT)
        self._length.append(length)
        self._count.append(0)
        return len(self._next) - 1

    def _split(self, before: int, token: int, state: int) -> int:
        """Give the strings of `state` that end where the longest of `before` and the token do a state of their own."""
        nexts, link = self._next, self._link
        short = self._new(self._length[before] + 1)
        nexts[short] = dict(nexts[state])
        self._count[short] = self._count[state]
        link[short] = link[state]
        link[state] = short
        while before != _NONE and nexts[before].get(token) == state:
            nexts[before][token] = short
            before = link[before]
        return short


class Pool:
    """What requests have written, up to `capacity` tokens; the text that was begun first goes first, from its end."""

    def __init__(self, capacity: int) -> None:
        self.automaton = SuffixAutomaton()
        self.size = 0  # tokens
        self._capacity = capacity
        self.texts: deque[Text] = deque()

    def append(self, text: Text | None, token: int) -> Text | None:
        """Add a token to a request's text, None: it has none yet. Gives the text to go on with."""
        if self._capacity == 0:
            return None
        # Removals can leave states apart that could be one; the second bound is for texts that make many of them.
        while self.size >= self._capacity or self.automaton.num_states > 2 * self._capacity:
            self.automaton.remove(self.texts[0])
            self.size -= 1
            if not self.texts[0].tokens:
                self.texts.popleft()
        if text is None or text.full:
            text = Text()
            self.texts.append(text)
        self.automaton.append(text, token)
        self.size += 1
        return text

    def check(self) -> None:
        """Prove size, bounds and counts; raises AssertionError."""
        assert self.automaton.num_states <= 2 * self._capacity + 2
        assert self.size == sum(len(text.tokens) for text in self.texts) <= self._capacity
        self.automaton.check(self.texts)


@dataclass
class _Request:
    """A request's own tokens, and how far they have been taken in."""

    tokens: Sequence[int]
    done: int = 0
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    text: Text = field(default_factory=Text)
    output: Text | None = None  # in the pool


class SuffixDrafter:
    """Trees of what followed the end of the tokens before, in the request and in the outputs of all requests."""

    name = "suffix"
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "depth": Option(32, 4, 64, "longest context that is matched"),
        "shared": Option(200_000, 0, 10_000_000, "tokens kept of what requests have written; 0: none"),
        "min": Option(10, 1, 99, "least estimated probability of a draft token, in percent"),
    }

    def __init__(self, depth: int = 32, shared: int = 200_000, min: int = 10) -> None:
        self.pool = Pool(shared)
        self._depth = depth
        self._least = min / 100
        self._requests: dict[int, _Request] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """The tree with the most expected acceptances of each request, empty where nothing is likely enough.

        What a request has when it is first seen counts as its prompt, what comes later as its output.
        """
        for request in requests:
            kept = self._requests.get(request.id)
            if kept is None:
                kept = self._requests[request.id] = _Request(request.tokens)
                self._take_in(kept, to_pool=False)
            else:
                kept.tokens = request.tokens
                self._take_in(kept)
        return [self._propose(request) for request in requests]

    def end(self, id: int) -> None:
        kept = self._requests.pop(id, None)
        if kept is not None:
            # The tokens are the request's own list: the last step's are there by now.
            self._take_in(kept, own=False)

    def check(self) -> None:
        """Prove the counts of the pool, and its bounds; raises AssertionError. Slow."""
        self.pool.check()

    def _take_in(self, kept: _Request, *, own: bool = True, to_pool: bool = True) -> None:
        for index in range(kept.done, len(kept.tokens)):
            token = kept.tokens[index]
            if own:
                if kept.text.full:
                    kept.text = Text()
                kept.automaton.append(kept.text, token)
            if to_pool:
                kept.output = self.pool.append(kept.output, token)
        kept.done = len(kept.tokens)

    def _propose(self, request: DraftRequest) -> DraftTree:
        context = request.tokens[-self._depth :]
        best: tuple[list[int], list[int]] = [], []
        most = 0.0
        for automaton in (self._requests[request.id].automaton, self.pool.automaton):
            for _, state in zip(range(CONTEXTS), automaton.contexts(context), strict=False):
                # Equal scores are for the request's own tokens, then for the longer context.
                if most + TIE >= min(request.budget, request.max_depth):
                    break  # no tree can expect more
                tokens, parents, score = self._grow(automaton, state, request.budget, request.max_depth)
                if score > most + TIE:
                    best, most = (tokens, parents), score
        tokens, parents = best
        return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), self.name)

    def _grow(
        self, automaton: SuffixAutomaton, state: int, budget: int, max_depth: int
    ) -> tuple[list[int], list[int], float]:
        """Tokens and parents of the likeliest nodes after a context, and the sum of their probabilities.

        A node's probability is the product of count ratios along its path. A child is no likelier than its parent,
        so taking the likeliest node next gives the best tree.
        """
        tokens: list[int] = []
        parents: list[int] = []
        score = 0.0
        heap: list[tuple[float, int, int, int, int]] = []  # (-probability, token, parent, state, depth)
        node, probability, depth = -1, 1.0, 0
        while True:
            successors = automaton.successors(state) if depth < max_depth else {}
            if len(successors) == 1 and (not heap or probability > -heap[0][0]):  # as likely as its parent: it is next
                parent = node
                ((token, state),) = successors.items()
                depth += 1
            else:
                counts = automaton.counts(successors.values())
                total = sum(counts)
                for (token, after), count in zip(successors.items(), counts, strict=True):
                    if (chance := probability * (count / total)) >= self._least:
                        heappush(heap, (-chance, token, node, after, depth + 1))
                if not heap:
                    break
                negative, token, parent, state, depth = heappop(heap)
                probability = -negative
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            score += probability
            if len(tokens) == budget:
                break
        return tokens, parents, score
