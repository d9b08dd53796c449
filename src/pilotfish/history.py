"""What a request's tokens so far do to its next row of logits: bias, penalties, masks; exact along every draft branch.

Each row of a tree is processed with its own history, the request's tokens and the drafts on the way to it, so a
verified row is changed exactly as plain decoding would change it. Order and meaning are vLLM's: logit_bias; then
repetition penalty (tokens of prompt and output), frequency and presence penalty (of the output alone, as OpenAI
documents them too); masked tokens become -inf, whatever was added to them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import RequestError
from pilotfish.params import SamplingParams
from pilotfish.sampling import Logits

# [256, 8] for each byte of a mask what its eight logits may be at most. Masks are applied as minima: choosing element
# by element takes ten times as long where the mask is irregular (docs/log.md).
_BOUNDS_OF_BITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0, np.inf, -np.inf
).astype(np.float32)


class Grammar(Protocol):
    """The state of a structured output; loaders/grammar.py makes it."""

    def mask(self) -> NDArray[np.uint8]:
        """[ceil(vocab / 8)] which tokens may come next, a bit each, the lowest bit of a byte first."""

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first, may follow; changes nothing."""

    def push(self, token: int) -> None:
        """Go on by a token. Raises RequestError when it may not follow."""

    def rewind(self, count: int) -> None:
        """Undo the last `count` pushes."""

    def forced(self) -> list[int]:
        """Tokens that must come next, spelled as the tokenizer would; empty where there is a choice."""

    def copy(self) -> Grammar:
        """Another one in the same state."""

    @property
    def ended(self) -> bool:
        """Whether nothing may follow any more."""


class History:
    """The tokens of one request, which may stand at any draft of the step's tree: `walk` goes there and back."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        end_ids: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """`end_ids` may not come before min_tokens; `bad_words` are token sequences that may not be completed."""
        self._params = params
        self._grammar = grammar
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._bad_words = [tuple(word) for word in bad_words]
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._bounds = _bounds(params, vocab_size)
        self._output: list[int] = []  # committed tokens and those of the path
        self._committed = 0
        # Every token that counts has a slot; slots are never given back, a token that is taken back counts 0.
        repetition = params.repetition_penalty != 1
        seen = sorted(set(prompt)) if repetition else []
        self._slots = {token: slot for slot, token in enumerate(seen)}
        self._prompt_slots = len(seen)
        self._counts = repetition or bool(params.presence_penalty or params.frequency_penalty)
        self._ids = np.array([*seen, *[0] * 64], np.int64)
        self._times = np.zeros(len(self._ids), np.int32)

    def copy(self) -> History:
        """Another one of the same tokens, for a second sample of the prompt."""
        twin = copy(self)
        twin._output, twin._slots = list(self._output), dict(self._slots)
        twin._ids, twin._times = self._ids.copy(), self._times.copy()
        twin._grammar = None if self._grammar is None else self._grammar.copy()
        return twin

    @property
    def ended(self) -> bool:
        """Whether the structured output is complete."""
        return self._grammar is not None and self._grammar.ended

    def walk(self, path: Sequence[int]) -> None:
        """Stand after `path`, tokens that follow the committed ones. Raises RequestError where the grammar fails."""
        standing = self._output[self._committed :]
        shared = 0
        while shared < min(len(path), len(standing)) and path[shared] == standing[shared]:
            shared += 1
        for token in standing[shared:]:
            self._count(token, -1)
        del self._output[self._committed + shared :]
        if self._grammar is not None and len(standing) > shared:
            self._grammar.rewind(len(standing) - shared)
        for token in path[shared:]:
            if self._grammar is not None:
                self._grammar.push(token)
            self._count(token, 1)
            self._output.append(token)

    def commit(self) -> None:
        """What was walked to is the request's."""
        self._committed = len(self._output)

    def legal(self, path: Sequence[int]) -> int:
        """How many tokens of `path`, from the first, could be chosen after the committed ones as far as masks go."""
        self.walk(())
        count = len(path)
        if self._bounds is not None:
            count = next((index for index, token in enumerate(path) if self._bounds[token] < 0), count)
        return count if self._grammar is None else self._grammar.legal(path[:count])

    def forced(self) -> list[int]:
        """Tokens that the structured output leaves no choice about, after the committed ones."""
        self.walk(())
        return [] if self._grammar is None else self._grammar.forced()

    def process(self, logits: Logits) -> Logits:
        """[vocab] a copy of the row as this history has it. Raises RequestError when it leaves no token."""
        row = self._masked(logits)
        if len(self._bias):
            row[self._bias_ids] += self._bias
        if self._counts:
            self._penalise(row)
        if len(self._output) < self._params.min_tokens:
            row[self._end_ids] = -np.inf
        for word in self._bad_words:
            before = len(word) - 1
            if len(self._output) >= before and tuple(self._output[len(self._output) - before :]) == word[:-1]:
                row[word[-1]] = -np.inf
        if row.max() == -np.inf < logits.max():
            raise RequestError(
                f"no token is left after {len(self._output)} tokens: what the request allows, bans and prescribes "
                "excludes all of them"
            )
        return row

    def _masked(self, logits: Logits) -> Logits:
        """A copy; what is -inf stays so whatever is added to it later."""
        if self._grammar is None:
            row: Logits = logits.copy() if self._bounds is None else np.minimum(logits, self._bounds)
            return row
        row = _BOUNDS_OF_BITS.take(self._grammar.mask(), axis=0).reshape(-1)[: len(logits)]
        np.minimum(row, logits, out=row)
        if self._bounds is not None:
            np.minimum(row, self._bounds, out=row)
        return row

    def _count(self, token: int, by: int) -> None:
        if not self._counts:
            return
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
        self._ids[slot] = token
        self._times[slot] += by

    def _penalise(self, row: Logits) -> None:
        ids, times = self._ids[: len(self._slots)], self._times[: len(self._slots)]
        x = row[ids]
        written = times > 0  # not those that were taken back: they are left alone, down to the sign of a zero
        repetition = np.float32(self._params.repetition_penalty)
        if repetition != 1:
            seen = written.copy()
            seen[: self._prompt_slots] = True
            lower = np.minimum if repetition > 1 else np.maximum  # x / r for x > 0, else x * r, without a choice
            x = np.where(seen, lower(x / repetition, x * repetition), x)
        frequency, presence = np.float32(self._params.frequency_penalty), np.float32(self._params.presence_penalty)
        row[ids] = np.where(written, (x - frequency * times.astype(np.float32)) - presence, x)


def _bounds(params: SamplingParams, vocab_size: int) -> Logits | None:
    """[vocab] what the logits may be at most, +inf or -inf for tokens that may never come; None where all may."""
    if params.allowed_token_ids is None and not params.banned_token_ids:
        return None
    bounds = np.full(vocab_size, np.inf if params.allowed_token_ids is None else -np.inf, np.float32)
    bounds[list(params.allowed_token_ids or ())] = np.inf
    bounds[list(params.banned_token_ids)] = -np.inf
    return bounds
