"""What a caller may ask of the tokens of one request, with the ranges that are checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short_repr
from typing import Any

from pilotfish.errors import InputError

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
ACCEPTANCE_RULES = ("match", "ratio", "block", "multi", "typical-lossy")


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _require(ok: bool, name: str, value: object, legal: str) -> None:
    if not ok:
        raise InputError(f"{name} is {short_repr(value)}; it must be {legal}")


@dataclass(frozen=True)
class StructuredOutput:
    """A form that the whole answer must have; exactly one of the fields is given. Raises InputError otherwise.

    JSON is written on one line, with `, ` and `: ` between, unless a schema's own `x-guidance` says otherwise.
    Whether a schema, expression or grammar makes sense is found when the request is added.
    """

    json_object: bool = False
    json_schema: str | Mapping[str, Any] | bool | None = None  # kept as JSON text
    regex: str | None = None  # what the Rust crate `regex` takes, without look-around and back references
    choice: Sequence[str] = ()  # one of these texts; kept as a tuple
    grammar: str | None = None  # Lark as llguidance takes it, or llama.cpp's GBNF

    def __post_init__(self) -> None:
        _require(isinstance(self.json_object, bool), "json_object", self.json_object, "True or False")
        schema, choice = self.json_schema, self.choice
        if isinstance(schema, Mapping | bool):
            schema = json.dumps(schema)
        _require(schema is None or isinstance(schema, str), "json_schema", schema, "a JSON object or its text")
        if schema is not None:
            try:
                parsed = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InputError(f"json_schema is not JSON: {error}") from None
            _require(isinstance(parsed, dict | bool), "json_schema", schema, "a JSON object")
        for name, text in (("regex", self.regex), ("grammar", self.grammar)):
            _require(text is None or (isinstance(text, str) and text != ""), name, text, "a text that is not empty")
        texts = _is_list(choice) and all(isinstance(text, str) and text for text in choice)
        _require(texts, "choice", choice, "a list of non-empty texts")
        given = [self.json_object, schema is not None, self.regex is not None, bool(choice), self.grammar is not None]
        if sum(given) != 1:
            raise InputError("give exactly one of json_object, json_schema, regex, choice and grammar")
        object.__setattr__(self, "json_schema", schema)
        object.__setattr__(self, "choice", tuple(choice))


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end. Raises InputError on a value out of range.

    A row's logits go through these in order (vLLM's): logit_bias; repetition, frequency and presence penalty; the
    masks (allowed and banned tokens, bad words, min_tokens, structured output); temperature; min_p; top_k; top_p;
    typical_p. Log-probabilities are those of the model itself, before all of these.
    """

    max_tokens: int | None = 128  # None: until the context is full
    min_tokens: int = 0  # no end token and no stop string counts before so many tokens
    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # keep this many tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that hold this much probability together
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest
    typical_p: float = 1.0  # keep the tokens nearest to the mean surprise that hold this much (Meister et al. 2023)
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or output
    presence_penalty: float = 0.0  # taken from the logit of each token in the output
    frequency_penalty: float = 0.0  # the same, for each time that it is there
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, hash=False
    )  # token id -> what is added, from -100 to 100
    allowed_token_ids: Sequence[int] | None = None  # only these; kept as a tuple
    banned_token_ids: Sequence[int] = ()  # never these; kept as a tuple
    bad_words: Sequence[str] = ()  # never the tokens of these texts in a row; kept as a tuple
    seed: int | None = None  # None: the engine draws one and reports it
    n: int = 1  # samples of one prompt; sample i has the seed + i
    stop: Sequence[str] = ()  # kept as a tuple
    stop_token_ids: Sequence[int] = ()  # kept as a tuple
    ignore_eos: bool = False
    logprobs: int | None = None  # with each token its log-probability and those of this many likeliest tokens
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    echo: bool = False  # the text begins with the prompt
    structured: StructuredOutput | None = None
    acceptance: str = "match"  # the rule that drafts stand by (verify.py); all others change the text for a seed

    def __post_init__(self) -> None:
        count = self.max_tokens
        _require(count is None or _is_int(count, 1), "max_tokens", count, "a whole number from 1, or None for no limit")
        most = math.inf if count is None else count
        _require(_is_int(self.min_tokens, 0, most), "min_tokens", self.min_tokens, "a whole number up to max_tokens")
        for name, low, high in (("temperature", 0, 100), ("min_p", 0, 1)):
            value = getattr(self, name)
            _require(_is_number(value, low, high), name, value, f"a number in [{low}, {high}]")
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            _require(_is_number(value, 0, 1) and value > 0, name, value, "a number in (0, 1]")
        _require(_is_int(self.top_k, 0), "top_k", self.top_k, "a whole number from 1, or 0 to keep all tokens")
        penalty = self.repetition_penalty
        _require(
            _is_number(penalty, 0, 100) and penalty >= 0.01, "repetition_penalty", penalty, "a number in [0.01, 100]"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(_is_number(getattr(self, name), -2, 2), name, getattr(self, name), "a number in [-2, 2]")
        bias, seed = self.logit_bias, self.seed
        fits = isinstance(bias, Mapping) and all(_is_int(i, 0) and _is_number(b, -100, 100) for i, b in bias.items())
        _require(fits, "logit_bias", bias, "a mapping of token ids to numbers in [-100, 100]")
        allowed = self.allowed_token_ids
        _require(allowed is None or (_are_ids(allowed) and len(allowed) > 0), "allowed_token_ids", allowed, "token ids")
        for name in ("banned_token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            _require(_are_ids(ids), name, ids, "a list of token ids, whole numbers from 0")
        for name in ("bad_words", "stop"):
            texts = getattr(self, name)
            fits = _is_list(texts) and all(isinstance(text, str) and text for text in texts)
            _require(fits, name, texts, "a list of non-empty strings")
        _require(seed is None or _is_int(seed, 0, 2**64 - 1), "seed", seed, "a whole number in [0, 2**64), or None")
        _require(_is_int(self.n, 1, MAX_SAMPLES), "n", self.n, f"a whole number from 1 to {MAX_SAMPLES}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            fits = value is None or _is_int(value, 0, MAX_LOGPROBS)
            _require(fits, name, value, f"a whole number from 0 to {MAX_LOGPROBS}, or None")
        for name in ("ignore_eos", "echo"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        structured, rule = self.structured, self.acceptance
        _require(structured is None or isinstance(structured, StructuredOutput), "structured", structured, "its class")
        _require(rule in ACCEPTANCE_RULES, "acceptance", rule, f"one of {', '.join(ACCEPTANCE_RULES)}")
        # Copies and tuples can not change under a request.
        object.__setattr__(self, "logit_bias", dict(bias))
        object.__setattr__(self, "allowed_token_ids", None if allowed is None else tuple(allowed))
        for name in ("banned_token_ids", "bad_words", "stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed or masked before a token is chosen from them."""
        return bool(
            self.logit_bias
            or self.banned_token_ids
            or self.bad_words
            or self.min_tokens
            or self.allowed_token_ids is not None
            or self.structured is not None
            or (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        )


def _are_ids(value: object) -> bool:
    return _is_list(value) and all(_is_int(token, 0) for token in value)  # type: ignore[attr-defined]
