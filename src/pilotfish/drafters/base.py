"""What a drafter is, and how the speculation argument of the command line names one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol, cast

from pilotfish.errors import InputError
from pilotfish.tree import DraftTree


@dataclass(frozen=True)
class DraftRequest:
    """A request that may be drafted for in this step."""

    id: int
    tokens: Sequence[int]  # committed: prompt and output so far
    budget: int  # most nodes of the tree, at least 1
    max_depth: int  # deeper drafts could not be emitted, at least 1
    forced: Sequence[int] = ()  # what the request's structured output leaves no choice about


class Drafter(Protocol):
    """Proposes draft trees. It may fail or talk nonsense: that costs speed only."""

    name: str

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """One tree for each request, empty where there is nothing to say."""

    def end(self, id: int) -> None:
        """The request is over; forget what was kept for it."""


# name -> where its class is. A class has OPTIONS, the integer options it takes with their legal ranges (min, max) and
# defaults, and is made from them by name.
DRAFTERS: Mapping[str, str] = {
    "ngram": "pilotfish.drafters.ngram:NgramDrafter",
    "suffix": "pilotfish.drafters.suffix:SuffixDrafter",
    "grammar": "pilotfish.drafters.grammar:GrammarDrafter",
}
# Named in the design, not built yet: an honest answer is better than "unknown".
PLANNED = ("lookahead", "draft", "layer-skip", "medusa", "eagle")
AUTO = "ngram"  # what `auto` stands for: all that needs no second model (what a grammar forces comes with any)

MAX_DRAFT_TOKENS = 64
ADAPTIVE_DRAFT_TOKENS = 16  # the most that is drafted where the user fixes no k


@dataclass(frozen=True)
class Option:
    default: int | None  # None: the drafter decides
    low: int
    high: int
    help: str


@dataclass(frozen=True)
class Speculation:
    """A parsed speculation argument: `method` is "off" or a key of DRAFTERS, `k` the fixed draft budget.

    Without a `k` the controller chooses, up to ADAPTIVE_DRAFT_TOKENS.
    """

    method: str = "off"
    k: int | None = None
    options: Mapping[str, int] = field(default_factory=dict)
    latency_target_ms: float | None = None  # for each of the request's tokens; prompts beside it wait for it

    def make(self) -> Drafter | None:
        """The drafter, or None for "off". Whatever it is, what a grammar forces is drafted without asking it."""
        if self.method == "off":
            return None
        grammar = drafter_class("grammar")
        made = grammar() if self.method == "grammar" else grammar(drafter_class(self.method)(**self.options))
        return cast(Drafter, made)


def drafter_class(name: str) -> Any:
    module, _, attribute = DRAFTERS[name].partition(":")
    return getattr(import_module(module), attribute)


def parse_speculation(text: str) -> Speculation:
    """Read `off` or `NAME[:key=value,...]`, as in `ngram:k=4,n=3`. Raises InputError."""
    name, colon, rest = text.strip().partition(":")
    given: dict[str, int] = {}
    if colon:
        for pair in rest.split(","):
            key, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or not key:
                raise InputError(f"speculation {text!r}: {pair!r} is not key=value, as in ngram:k=4,n=3")
            if key in given:
                raise InputError(f"speculation {text!r}: {key} is given twice")
            try:
                given[key] = int(value)
            except ValueError:
                raise InputError(f"speculation {text!r}: {key}={value} must be a whole number") from None
    return _speculation(name, given, f"speculation {text!r}")


def parse_speculative_config(text: str) -> Speculation:
    """Read the JSON object that vLLM users know, with the fields of the n-gram method. Raises InputError."""
    where = "--speculative-config"
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f'{where} must be an object with a method, as in {{"method": "ngram"}}')
    return _from_config(config, where)


def parse_request_speculation(value: str | Mapping[str, Any]) -> Speculation:
    """What a request may ask for: `off`, `auto`, a drafter, or an object of vLLM's fields and a latency target.

    With `latency_target_ms_per_token` the prompts of others are computed in pieces so small that the tokens of this
    request keep it. Raises InputError.
    """
    if isinstance(value, str):
        return parse_speculation(value)
    config = {"method": "auto", **value}
    target = config.pop("latency_target_ms_per_token", None)
    if target is not None and (
        isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target <= 1e6
    ):
        raise InputError(f"speculation: latency_target_ms_per_token is {target!r}; it must be a number in (0, 1e6]")
    return replace(_from_config(config, "speculation"), latency_target_ms=target)


def _from_config(config: Mapping[str, Any], where: str) -> Speculation:
    if not isinstance(config.get("method"), str):
        raise InputError(f'{where} must be an object with a method, as in {{"method": "ngram"}}')
    names = {"num_speculative_tokens": "k", "prompt_lookup_max": "n", "prompt_lookup_min": "min"}
    given: dict[str, int] = {}
    for key, value in config.items():
        if key == "method":
            continue
        if key not in names:
            raise InputError(f"{where}: field {key!r} is not supported; supported: method, {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{where}: {key} must be a whole number, not {value!r}")
        given[names[key]] = value
    return _speculation(config["method"], given, where)


def _speculation(name: str, given: Mapping[str, int], where: str) -> Speculation:
    if name == "off":
        if given:
            raise InputError(f"{where}: off takes no options")
        return Speculation()
    name = AUTO if name == "auto" else name
    if name in PLANNED or "+" in name:
        raise InputError(f"{where}: {name} is not available in this version; available: off, {', '.join(DRAFTERS)}")
    if name not in DRAFTERS:
        raise InputError(f"{where}: there is no drafter {name!r}; available: off, {', '.join(DRAFTERS)}")
    known: dict[str, Option] = {
        "k": Option(None, 1, MAX_DRAFT_TOKENS, "draft tokens per step"),
        **drafter_class(name).OPTIONS,
    }
    values = {key: option.default for key, option in known.items() if option.default is not None}
    for key, value in given.items():
        if key not in known:
            raise InputError(f"{where}: {name} has no option {key!r}; it has {', '.join(known)}")
        option = known[key]
        if not option.low <= value <= option.high:
            raise InputError(f"{where}: {key}={value} must lie in {option.low}..{option.high} ({option.help})")
        values[key] = value
    return Speculation(name, values.pop("k", None), values)
