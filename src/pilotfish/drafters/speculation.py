"""How the speculation argument names drafters: `NAME[:ARGUMENT][,key=value...]`, several joined by `+`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, cast

from pilotfish.drafters.base import DRAFTERS, MAX_DRAFT_TOKENS, Drafter, Host
from pilotfish.errors import InputError

Value = int | str

# Named in the design, not built yet: an honest answer is better than "unknown".
PLANNED = ("medusa", "eagle")
AUTO = ("suffix", "ngram")  # what `auto` stands for: all that needs no second model


@dataclass(frozen=True)
class Option:
    """A whole number in low..high; on the command line 16k is 16,000."""

    default: int | None  # None: the drafter decides
    low: int
    high: int
    help: str

    def read(self, value: Value) -> int:
        """The value, if it is one. Raises InputError with what is wrong, to follow `key=value`."""
        if isinstance(value, str):
            number, thousand = (value[:-1], 1000) if value.endswith("k") else (value, 1)
            try:
                value = int(number) * thousand
            except ValueError:
                raise InputError(f"must be a whole number ({self.help})") from None
        if not self.low <= value <= self.high:
            raise InputError(f"must lie in {self.low}..{self.high} ({self.help})")
        return value


@dataclass(frozen=True)
class TextOption:
    """A text that `check` has nothing against: it raises InputError with what is wrong, to follow `key=value`."""

    default: str | None  # None: the drafter decides, or, where it is `needed`, the user
    help: str
    check: Callable[[str], object] = len
    needed: bool = False

    def read(self, value: Value) -> str:
        if not isinstance(value, str) or not value:
            raise InputError(f"must be a text ({self.help})")
        self.check(value)
        return value


AnyOption = Option | TextOption


@dataclass(frozen=True)
class Part:
    """One drafter of a speculation: a key of DRAFTERS, its most draft tokens, and its options."""

    method: str
    k: int | None = None
    options: Mapping[str, Value] = field(default_factory=dict)

    def key(self) -> tuple[str, tuple[tuple[str, Value], ...]]:
        """Equal for parts whose drafters are the same."""
        return self.method, tuple(sorted(self.options.items()))

    def make(self, host: Host | None) -> Drafter:
        """The drafter. Raises InputError when it can not be had, as without a host where it needs one."""
        return cast(Drafter, drafter_class(self.method).make(host, **self.options))


@dataclass(frozen=True)
class Speculation:
    """A parsed speculation argument. No parts: off.

    A single part with a `k` has a fixed draft budget. Else the controller chooses, up to ADAPTIVE_DRAFT_TOKENS and
    the `k` of a part for that part's drafts. What a grammar forces is drafted with any, unless it is off.
    """

    parts: tuple[Part, ...] = ()
    latency_target_ms: float | None = None  # for each of the request's tokens

    @property
    def k(self) -> int | None:
        """The fixed draft budget, None: the controller chooses."""
        return self.parts[0].k if len(self.parts) == 1 else None


def drafter_class(name: str) -> Any:
    module, _, attribute = DRAFTERS[name].partition(":")
    return getattr(import_module(module), attribute)


def check_loaded(wanted: Speculation, started: Speculation) -> None:
    """Raise InputError when `wanted` needs what only a start brings (models, searches) and `started` did not bring.

    A client must not make a server read files, nor keep others waiting.
    """
    there = {part.key() for part in started.parts}
    for part in wanted.parts:
        if getattr(drafter_class(part.method), "ONLY_AT_START", False) and part.key() not in there:
            raise InputError(f"speculation: the server was not started with this {part.method}; it can not be added")


def options_of(name: str) -> dict[str, AnyOption]:
    """All options of a drafter, `k` first."""
    return {"k": Option(None, 1, MAX_DRAFT_TOKENS, "draft tokens per step"), **drafter_class(name).OPTIONS}


def parse_speculation(text: str) -> Speculation:
    """Read `off`, `auto` or drafters, as in `ngram:k=4,n=3` or `suffix+draft:small.gguf`. Raises InputError."""
    names = "|".join(re.escape(name) for name in ("off", "auto", *DRAFTERS, *PLANNED))
    # A path may hold a plus: only one before a drafter's name joins.
    texts = re.split(rf"\+(?=(?:{names})(?:[:+]|$))", text.strip())
    where = f"speculation {text!r}"
    found: list[tuple[str, dict[str, Value]]] = []
    for part in texts:
        name, colon, rest = part.partition(":")
        found.append((name, _pairs(name, rest, where) if colon else {}))
    return _speculation(found, where)


def _pairs(name: str, text: str, where: str) -> dict[str, Value]:
    """`ARGUMENT,key=value,...`; the argument stands first and without a key."""
    argument = getattr(drafter_class(name), "ARGUMENT", None) if name in DRAFTERS else None
    given: dict[str, Value] = {}
    for index, pair in enumerate(text.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals and key and index == 0 and argument:
            key, equals, value = argument, "=", key
        if not equals or not key:
            example = f"{name}:{argument.upper()},k=4" if argument else "ngram:k=4,n=3"
            raise InputError(f"{where}: {pair!r} is not key=value, as in {example}")
        if key in given:
            raise InputError(f"{where}: {key} is given twice")
        given[key] = value
    return given


def parse_speculative_config(text: str) -> Speculation:
    """Read the JSON object that vLLM users know, with the fields of the n-gram and draft methods. Raises InputError."""
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

    With `latency_target_ms_per_token` the controller, and the prompts of others, leave the tokens of this request so
    much time. Raises InputError.
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


# vLLM's fields, and the options of ours that they are
_CONFIG_FIELDS = {
    "num_speculative_tokens": "k",
    "prompt_lookup_max": "n",
    "prompt_lookup_min": "min",
    "model": "model",
    "suffix_decoding_max_tree_depth": "depth",
}
_CONFIG_METHODS = {"draft_model": "draft"}


def _from_config(config: Mapping[str, Any], where: str) -> Speculation:
    method = config.get("method", "draft_model" if "model" in config else None)
    if not isinstance(method, str):
        raise InputError(f'{where} must be an object with a method, as in {{"method": "ngram"}}')
    given: dict[str, Value] = {}
    for key, value in config.items():
        if key == "method":
            continue
        if key not in _CONFIG_FIELDS:
            supported = ", ".join(("method", *_CONFIG_FIELDS))
            raise InputError(f"{where}: field {key!r} is not supported; supported: {supported}")
        wanted = str if key == "model" else int
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise InputError(f"{where}: {key} must be a {'text' if wanted is str else 'whole number'}, not {value!r}")
        given[_CONFIG_FIELDS[key]] = value
    return _speculation([(_CONFIG_METHODS.get(method, method), given)], where)


def _speculation(named: list[tuple[str, dict[str, Value]]], where: str) -> Speculation:
    if named[0][0] == "off" and len(named) == 1:
        if named[0][1]:
            raise InputError(f"{where}: off takes no options")
        return Speculation()
    parts: list[Part] = []
    for name, given in named:
        if name == "off":
            raise InputError(f"{where}: off stands alone")
        if name == "auto":
            k = {"k": given["k"]} if "k" in given else {}
            if given.keys() - {"k"}:
                raise InputError(f"{where}: auto takes no options but k")
            parts += [_part(method, k, where) for method in AUTO]
        else:
            parts.append(_part(name, given, where))
    methods = [part.method for part in parts]
    for index, method in enumerate(methods):
        if method in methods[:index]:
            raise InputError(f"{where}: {method} is named twice")
    return Speculation(tuple(parts))


def _part(name: str, given: Mapping[str, Value], where: str) -> Part:
    if name in PLANNED:
        raise InputError(f"{where}: {name} is not available in this version; available: {_available()}")
    if name not in DRAFTERS:
        raise InputError(f"{where}: there is no drafter {name!r}; available: {_available()}")
    known = options_of(name)
    values = {key: option.default for key, option in known.items() if option.default is not None}
    for key, value in given.items():
        if key not in known:
            raise InputError(f"{where}: {name} has no option {key!r}; it has {', '.join(known)}")
        try:
            values[key] = known[key].read(value)
        except InputError as error:
            raise InputError(f"{where}: {key}={value} {error}") from None
    for key, option in known.items():
        if isinstance(option, TextOption) and option.needed and key not in values:
            raise InputError(f"{where}: {name} needs its {key}, as in {name}:{key.upper()} ({option.help})")
    k = cast(int | None, values.pop("k", None))
    return Part(name, k, values)


def _available() -> str:
    return f"off, auto, {', '.join(DRAFTERS)}"
