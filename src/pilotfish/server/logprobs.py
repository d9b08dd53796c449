"""Log-probabilities in the three forms that clients know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pilotfish.loaders.tokenizer import Detokenizer, Tokenizer
from pilotfish.request import TokenLogprob
from pilotfish.server.answers import Json

_LEAST = -9999.0  # JSON has no infinity; vLLM's number


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> list[Json]:
    """OpenAI's form for chat, an object for each token."""

    def named(token: int, logprob: float) -> Json:
        spelled = tokenizer.token_bytes(token)
        return {"token": spelled.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(spelled)}

    return [
        {**named(entry.token, entry.logprob), "top_logprobs": [named(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], top: int) -> list[Json | None]:
    """vLLM's form: for each token of the prompt the `top` likeliest by id, and the token itself; null for the first."""
    shown: list[Json | None] = [None]
    for entry in entries:
        ranked = {token: (logprob, rank + 1) for rank, (token, logprob) in enumerate(entry.top[:top])}
        shown.append(
            {
                str(token): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(token).decode(errors="replace"),
                }
                for token, (logprob, rank) in {entry.token: (entry.logprob, None), **ranked}.items()
            }
        )
    return shown


class CompletionLogprobs:
    """OpenAI's form for completions: four lists that grow with the tokens.

    Bytes that are not UTF-8 by themselves are spelled `bytes:\\xe2\\x82`. Offsets count the characters of the text
    before a token; a token within a character has the offset of that character.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._output = tokenizer.stream(continuing=True)
        self._offset = 0

    def echo(self, prompt: Sequence[int], entries: Sequence[TokenLogprob], text: str) -> Json:
        """The prompt's part. `text` is the prompt as shown; tokens that the model wants before it take no room."""
        first = TokenLogprob(prompt[0], 0.0)
        stream = self._tokenizer.stream(skip_special=False)
        self._offset = len(text) - len(self._tokenizer.decode(prompt, skip_special=False))
        lists = self._lists([first, *entries], stream)
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        self._offset = len(text)
        return lists

    def output(self, entries: Sequence[TokenLogprob]) -> Json:
        """The part of new tokens of the answer."""
        return self._lists(entries, self._output)

    def _lists(self, entries: Sequence[TokenLogprob], stream: Detokenizer) -> Json:
        offsets = []
        for entry in entries:
            offsets.append(max(0, self._offset))
            self._offset += len(stream.push(entry.token))
        return {
            "tokens": [self._spell(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {
                    self._spell(token): _finite(logprob)
                    for token, logprob in (*entry.top[: self._top], (entry.token, entry.logprob))
                }
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _spell(self, token: int) -> str:
        spelled = self._tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
