"""What a finished request gives its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Completion:
    """A finished request. `finish_reason` is stop, length or error, and then `error` says what went wrong.

    `logprobs` has an entry for each token, `prompt_logprobs` one for each token of the prompt but the first; they are
    None where they were not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    seed: int
    timings: Mapping[str, float]
    speculation: Mapping[str, Any]
    error: str | None = None
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of `pilotfish generate --json`."""
        optional = {
            "error": self.error,
            "logprobs": None if self.logprobs is None else [entry.as_dict() for entry in self.logprobs],
            "prompt_logprobs": None
            if self.prompt_logprobs is None
            else [entry.as_dict() for entry in self.prompt_logprobs],
        }
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.tokens)},
            "timings": dict(self.timings),
            "speculation": dict(self.speculation),
            **{key: value for key, value in optional.items() if value is not None},
        }


@dataclass(frozen=True)
class Logprob:
    """A token, its text, its natural log-probability under the model itself, and the likeliest tokens in its place."""

    token: int
    text: str
    logprob: float
    top: tuple[Logprob, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"token": self.token, "text": self.text, "logprob": round(self.logprob, 6)}
        return {**entry, "top": [other.as_dict() for other in self.top]} if self.top else entry


@dataclass(frozen=True)
class Chunk:
    """New text and tokens of a streamed request; the last one carries the completion."""

    text: str
    tokens: tuple[int, ...]
    completion: Completion | None = None
