"""How often what followed a context before has followed it again, by the length of the context."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 192  # the longest that is asked about: context and drafts

# The shortest context of each class, and what is thought of it before anything was seen.
_CLASSES = (
    (1, 0.2),
    (2, 0.5),
    (3, 0.65),
    (4, 0.75),
    (5, 0.8),
    (6, 0.85),
    (8, 0.93),
    (12, 0.95),
    (16, 0.97),
    (24, 0.98),
)
_CLASS = [max((index for index, (start, _) in enumerate(_CLASSES) if start <= m), default=0) for m in range(_MOST)]
_PRIOR = 10  # cases that the first opinion is worth
_LOOK = 8  # tokens of a guess that are looked at: what follows tells little more
_MEMORY = 400  # cases of a class that are remembered, about


class Reliability:
    """The chance that a context's continuation goes on, learned from what came; at first an opinion."""

    def __init__(self) -> None:
        self.chances = [_CLASSES[index][1] for index in _CLASS]  # by the length of the context, 0.._MOST - 1
        self._stood = [_PRIOR * chance for _, chance in _CLASSES]
        self._cases = [float(_PRIOR)] * len(_CLASSES)

    def learn(self, length: int, guess: Sequence[int], truth: Sequence[int]) -> None:
        """After a context of this length `guess` was expected; `truth` came."""
        stood, cases = self._stood, self._cases
        touched = set()
        for expected, token in zip(guess[:_LOOK], truth, strict=False):
            index = _CLASS[length]
            touched.add(index)
            cases[index] += 1
            if expected != token:
                break
            stood[index] += 1
            length += 1
        for index in touched:
            if cases[index] > _MEMORY:
                stood[index] /= 2
                cases[index] /= 2
            chance = stood[index] / cases[index]
            stop = _CLASSES[index + 1][0] if index + 1 < len(_CLASSES) else _MOST
            for m in range(_CLASSES[index][0], stop):
                self.chances[m] = chance
