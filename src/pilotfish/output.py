"""From token ids to the text a person reads: streaming, and stop strings that cut where they begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pilotfish.history import Grammar
from pilotfish.params import StructuredOutput


class Detokenizer(Protocol):
    """Turns ids into text without ever giving half a character."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Texts(Protocol):
    """What the engine needs of a tokenizer, for requests that speak of text."""

    def new_detokenizer(self, answers: bool | None) -> Detokenizer:
        """One for a request whose output is a text of its own, or goes on after the prompt; None: the usual here."""

    def spellings(self, word: str) -> Sequence[Sequence[int]]:
        """The token sequences that write a bad word, at the beginning of a text and within it."""

    def grammar(self, structured: StructuredOutput) -> Grammar:
        """Its state before the first token. Raises InputError when it makes no sense."""


class OutputText:
    """The visible text of one request. `push` and `finish` give what may be shown, `stopped` says a stop string came.

    Text that might be the beginning of a stop string is held back until it is decided. The text of the first
    `min_tokens` tokens is never searched, as in vLLM.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._exempt = min_tokens  # tokens to come whose text is not searched
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        if self._exempt:
            self._exempt -= 1
            return text
        return self._release(text)

    def finish(self) -> str:
        """What was held back, unless a stop string has ended the text."""
        if self.stopped:
            return ""
        text = self._release(self._detokenizer.finish())
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        starts = [start for start in (self._held.find(stop) for stop in self._stop) if start >= 0]
        if starts:
            self.stopped = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        end = len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
