"""From a row of a draft model to the tokens that are drafted after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pilotfish.backends.native import choose, log_probabilities
from pilotfish.drafters.base import DraftRequest
from pilotfish.program import Floats
from pilotfish.sampling import Chance, broken_row, gumbel, probabilities
from pilotfish.tree import Ints, Probs

_DRAWS = 0xD1B54A32D192ED03  # apart from the seeds that verification draws with
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Choice:
    """A token, what the drafter thinks of its chance, and the law it was drawn from, None: it was not drawn."""

    token: int
    confidence: float
    law: Probs | None = None


class RowReader:
    """Reads rows of logits. `ids` are the tokens of the first of them, all that count; None: all in order.

    `vocab_size` is the target's; a logit of a token beyond it is left out.
    """

    def __init__(self, ids: Ints | None, vocab_size: int) -> None:
        self._ids = ids
        self._vocab_size = vocab_size
        self._dense: Floats | None = None if ids is None else np.full(vocab_size, -np.inf, np.float32)

    def choices(self, request: DraftRequest, logits: Floats, position: int, most: int) -> list[Choice]:
        """The tokens to draft for a position, up to `most`, the likeliest to stand first.

        At temperature 0 they are the likeliest; else those that the target's own rule chooses with its noise for that
        position, where the two models' laws are near. A request whose rule keeps the law has one, drawn; behind
        another drafter's draft, to which no law can be added, the likeliest. Raises PilotfishError when the highest
        logit is not finite.
        """
        logits = logits[: self._vocab_size if self._ids is None else len(self._ids)]
        drawn = request.draws
        if drawn and not request.drafted:
            return [self._drawn(request, logits, position)]
        if drawn or request.params.temperature == 0:
            normaliser, best = log_probabilities(logits, most)
            confidences = np.exp(logits[best].astype(np.float64) - normaliser)
            return [
                Choice(self._token(index), min(1.0, confidence))
                for index, confidence in zip(best.tolist(), confidences.tolist(), strict=True)
            ]
        return self._noised(request, logits, position, most)

    def _token(self, index: int) -> int:
        return index if self._ids is None else int(self._ids[index])

    def _drawn(self, request: DraftRequest, logits: Floats, position: int) -> Choice:
        """Only what was known before the draw is told as confidence (verify.py)."""
        law = probabilities(logits, request.params)
        if len(law) < self._vocab_size or self._ids is not None:
            dense = np.zeros(self._vocab_size)
            dense[slice(len(law)) if self._ids is None else self._ids] = law
            law = dense
        # Each step begins behind the tokens of the last, so no position is drawn for twice with the same tokens before.
        step = len(request.tokens) * _SPREAD & (1 << 64) - 1  # seeds next to each other must not share draws
        chance = Chance(request.seed ^ _DRAWS ^ step, position)
        return Choice(chance(law), min(1.0, float(law.max())), law)

    def _noised(self, request: DraftRequest, logits: Floats, position: int, most: int) -> list[Choice]:
        """The best by log-probability and noise, then the next best by leaving out those before.

        Confidences: the model's own probability for the first; it tells better what stands than the first's lead does,
        or the probability at the request's temperature. For a later one the chance that the first does not stand, times
        the logistic of what it lacks to the first: better than its probability, which noise has already spoken on.
        """
        normaliser, _ = log_probabilities(logits, 1)
        row = logits
        if self._dense is not None:
            row = self._dense
            row[self._ids] = logits  # noise belongs to token ids
        elif most > 1:
            row = logits.copy()
        tokens: list[int] = []
        values: list[float] = []
        while len(tokens) < most and np.isfinite(row.max()):
            token = choose(row, request.params, request.seed, position)
            tokens.append(token)
            values.append(float(row[token]))
            if most > 1:
                row[token] = -np.inf
        if not tokens:
            raise broken_row(logits)
        confidences = [min(1.0, math.exp(values[0] - normaliser))]
        if most > 1:
            noise = gumbel(request.seed, position, np.array(tokens, np.int32))
            scores = np.array(values) / request.params.temperature + noise
            for lack in (scores[0] - scores[1:]).tolist():
                chance = (1 - confidences[0]) / (1 + math.exp(min(lack, 700.0)))
                confidences.append(min(confidences[-1], chance))
        return [Choice(token, confidence) for token, confidence in zip(tokens, confidences, strict=True)]
