"""Where the last tokens occurred before: hash chains over windows of tokens, as LZ77 compressors keep them (RFC 1951).

They are chosen over a suffix automaton with counts: a token costs a few array writes instead of a walk over links and
copies of transitions, memory is a few arrays, and nothing has to be done to forget. In return they look at the
latest occurrences only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

WINDOWS = (8, 3, 1)  # tokens; what counts are the occurrences of the longest window that has any
PLACES = 6  # latest occurrences that are looked at
TRIES = 64  # most links that are followed for them: windows of one hash share a chain

_BITS = 24  # of a hash
_MASK = (1 << _BITS) - 1
_MIX = 0x9E3779B1
_SHIFTS = 3, 8  # a token's bits are shifted out of a hash when its window, of 8 or 3, has gone by
_FORGETS_NOTHING = 1 << 62
_START_BITS, _GROWTH_BITS = 10, 2  # of a table's index


# (length, tokens, at): `length` tokens before tokens[at] are also the last of the context that was looked up.
Place = tuple[int, Sequence[int], int]


@dataclass(eq=False)
class Text:
    """A run of tokens that may get longer, and the hashes of its last 8 and 3 that were taken in."""

    tokens: Sequence[int]
    done: int = 0  # tokens taken in
    hash8: int = 0
    hash3: int = 0


def hashes_of(tokens: Sequence[int]) -> tuple[int, int, int]:
    """Of the last 8, 3 and 1 of the tokens."""
    hash8 = hash3 = mixed = 0
    for token in tokens[-WINDOWS[0] :]:
        mixed = token * _MIX & _MASK
        hash8 = (hash8 << _SHIFTS[0] ^ mixed) & _MASK
        hash3 = (hash3 << _SHIFTS[1] ^ mixed) & _MASK
    return hash8, hash3, mixed


class Places:
    """Places in texts, found by the tokens before them; with a `capacity` only the latest so many.

    Places are numbered from 1 as they come. For each window there is a table, hash -> number of its latest place, and
    for each place the number of the one before it with the same entry. Numbers fall along a chain, so it ends at the
    first that is too old.
    """

    def __init__(self, capacity: int | None = None, expected: int = 0) -> None:
        """`expected` places come at once: the tables begin with room for them."""
        self.count = 0  # places that ever came
        self._slots = _FORGETS_NOTHING if capacity is None else capacity
        self._bits = _START_BITS
        while self._bits < _BITS and 1 << self._bits < expected:
            self._bits += _GROWTH_BITS
        # By number modulo slots. No place has the number 0.
        self._texts = [Text([])]
        self._ats = array("i", [0])
        self._earlier = tuple(array("q", [0]) for _ in WINDOWS)
        self._latest = self._empty_tables()

    def take_in(self, text: Text) -> None:
        """The places after the tokens that the text has and had not when it was last taken in."""
        texts, ats, slots = self._texts, self._ats, self._slots
        (earlier8, earlier3, earlier1), (latest8, latest3, latest1) = self._earlier, self._latest
        hash8, hash3, number = text.hash8, text.hash3, self.count
        shift = _BITS - self._bits
        (shift8, shift3), mix, mask = _SHIFTS, _MIX, _MASK  # locals are faster
        for at, token in enumerate(text.tokens[text.done :], text.done + 1):
            number += 1
            mixed = token * mix & mask
            hash8 = (hash8 << shift8 ^ mixed) & mask
            hash3 = (hash3 << shift3 ^ mixed) & mask
            entry8, entry3, entry1 = hash8 >> shift, hash3 >> shift, mixed >> shift
            if number < slots:
                texts.append(text)
                ats.append(at)
                earlier8.append(latest8[entry8])
                earlier3.append(latest3[entry3])
                earlier1.append(latest1[entry1])
            else:
                slot = number % slots
                texts[slot] = text
                ats[slot] = at
                earlier8[slot] = latest8[entry8]
                earlier3[slot] = latest3[entry3]
                earlier1[slot] = latest1[entry1]
            latest8[entry8] = latest3[entry3] = latest1[entry1] = number
        text.done, text.hash8, text.hash3, self.count = len(text.tokens), hash8, hash3, number
        while self.size > 1 << self._bits and self._bits < _BITS:
            self._grow()

    @property
    def size(self) -> int:
        """Places that are known."""
        return min(self.count, self._slots)

    @property
    def _oldest(self) -> int:
        return self.count - self.size + 1

    def find(self, context: list[int], hashes: tuple[int, int, int], ahead: int = 0, least: int = 1) -> list[Place]:
        """The latest places after the longest window of the context that occurs, the latest first.

        `hashes` are those of the context. A place counts when its text goes on behind it, or would with `ahead` tokens
        more. Windows shorter than `least` are not looked up. Lengths are up to the context's.
        """
        texts, ats, slots, oldest = self._texts, self._ats, self._slots, self._oldest
        limit, shift = len(context), _BITS - self._bits
        backwards = context[::-1]
        found: list[Place] = []
        for window, hash, latest, earlier in zip(WINDOWS, hashes, self._latest, self._earlier, strict=True):
            if window > limit or window < least:
                continue
            number = latest[hash >> shift]
            for _ in range(TRIES):
                if number < oldest:
                    break
                slot = number % slots
                number = earlier[slot]
                tokens, at = texts[slot].tokens, ats[slot]
                if at >= len(tokens) + ahead:
                    continue
                # Windows this long are mostly part of much longer matches, which slices compare faster.
                if window == WINDOWS[0] and at >= limit and tokens[at - limit : at] == context:
                    length = limit
                else:
                    length, most = 0, min(at, limit)
                    while length < most and tokens[at - 1 - length] == backwards[length]:
                        length += 1
                    if length < window:
                        continue
                found.append((length, tokens, at))
                if len(found) == PLACES:
                    break
            if found:
                break
        return found

    def check(self) -> None:
        """Prove that each chain has exactly the known places of its entry; raises AssertionError. Slow."""
        oldest, shift = self._oldest, _BITS - self._bits
        assert len(self._texts) == len(self._ats) == min(self.count + 1, self._slots)
        expected: list[dict[int, list[int]]] = [{} for _ in WINDOWS]
        for number in range(self.count, oldest - 1, -1):
            for chains, hash in zip(expected, self._hashes_of(number), strict=True):
                chains.setdefault(hash >> shift, []).append(number)
        for chains, latest, earlier in zip(expected, self._latest, self._earlier, strict=True):
            assert len(latest) == 1 << self._bits and len(earlier) == len(self._ats)
            for entry, first in enumerate(latest):
                chain, number = [], first
                while number >= oldest:
                    chain.append(number)
                    number = earlier[number % self._slots]
                assert chain == chains.get(entry, []), (entry, chain)

    def _hashes_of(self, number: int) -> tuple[int, int, int]:
        slot = number % self._slots
        text, at = self._texts[slot], self._ats[slot]
        return hashes_of(text.tokens[max(0, at - WINDOWS[0]) : at])

    def _empty_tables(self) -> tuple[array[int], ...]:
        return tuple(array("q", [0]) * (1 << self._bits) for _ in WINDOWS)

    def _grow(self) -> None:
        """Larger tables, so that chains stay short."""
        self._bits += _GROWTH_BITS
        self._latest = self._empty_tables()
        shift = _BITS - self._bits
        for number in range(self._oldest, self.count + 1):
            slot = number % self._slots
            for hash, latest, earlier in zip(self._hashes_of(number), self._latest, self._earlier, strict=True):
                earlier[slot] = latest[hash >> shift]
                latest[hash >> shift] = number
