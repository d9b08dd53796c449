"""The n-gram drafter, and the words that name a drafter."""

from __future__ import annotations

import random

import pytest

from pilotfish.drafters.base import (
    DraftRequest,
    Speculation,
    parse_speculation,
    parse_speculative_config,
)
from pilotfish.drafters.grammar import GrammarDrafter
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.errors import InputError


def _draft(drafter: NgramDrafter, tokens: list[int], budget: int = 4, depth: int = 99, id: int = 0) -> list[int]:
    return drafter.propose([DraftRequest(id, tokens, budget, depth)])[0].tokens.tolist()


def _slow(tokens: list[int], n: int, shortest: int, count: int) -> list[int]:
    """The rule, said plainly: the longest n-gram at the end, its latest earlier occurrence, what followed it."""
    for length in range(min(n, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                drafted: list[int] = []
                while len(drafted) < count:
                    drafted.append((tokens + drafted)[start + length + len(drafted)])
                return drafted
    return []


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_plain_rule_while_tokens_grow(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 5)
    shortest = rng.randint(1, n)
    drafter = NgramDrafter(n, shortest)
    tokens = [rng.randrange(4)]
    for _ in range(60):
        tokens += [rng.randrange(4) for _ in range(rng.randint(0, 3))]
        assert _draft(drafter, tokens, 6) == _slow(tokens, n, shortest, 6)


def test_budget_depth_and_requests_are_apart() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 5, 1, 2]
    assert _draft(drafter, text, 3) == [3, 4, 5]
    assert _draft(drafter, text, 3, depth=1) == [3]
    assert _draft(drafter, [1, 2], id=1) == []
    assert _draft(drafter, [9, 8, 1, 2], id=1) == []
    drafter.end(0)
    drafter.end(0)
    assert _draft(drafter, text, 2) == [3, 4]


def test_parse() -> None:
    assert parse_speculation("off") == Speculation()
    assert parse_speculation("off").make() is None
    assert parse_speculation("ngram") == Speculation("ngram", None, {"n": 4})
    assert parse_speculation(" ngram:k=4, n=3,min=1 ") == Speculation("ngram", 4, {"n": 3, "min": 1})
    assert isinstance(parse_speculation("grammar").make(), GrammarDrafter)
    drafter = parse_speculation("ngram:n=1").make()
    assert isinstance(drafter, GrammarDrafter)
    trees = drafter.propose([DraftRequest(0, [1, 2, 1], 2, 9), DraftRequest(1, [1, 2, 1], 2, 9, forced=[5])])
    assert [(tree.drafter, tree.tokens.tolist()) for tree in trees] == [("ngram", [2, 1]), ("grammar", [5])]
    config = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    assert parse_speculative_config(config) == Speculation("ngram", 5, {"n": 4, "min": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no drafter ''"),
        ("ngrams", "no drafter 'ngrams'; available: off, ngram"),
        ("lookahead", "lookahead is not available in this version"),
        ("draft:model.gguf", "draft:model.gguf"),
        ("ngram+suffix", "not available"),
        ("off:k=1", "off takes no options"),
        ("ngram:", "'' is not key=value"),
        ("ngram:k", "'k' is not key=value"),
        ("ngram:k=x", "must be a whole number"),
        ("ngram:k=0", "must lie in 1..64"),
        ("ngram:k=65", "must lie in 1..64"),
        ("ngram:k=2,k=3", "twice"),
        ("ngram:m=2", "no option 'm'; it has k, n, min"),
    ],
)
def test_bad_speculation(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("+", r"\+")):
        parse_speculation(text)


def test_bad_ngram_lengths() -> None:
    with pytest.raises(InputError, match="min=3 must not be greater than n=2"):
        parse_speculation("ngram:n=2,min=3").make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"num_speculative_tokens": 2}', "with a method"),
        ('{"method": "ngram", "tree": 1}', "field 'tree' is not supported"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "whole number"),
        ('{"method": "eagle3"}', "no drafter"),
    ],
)
def test_bad_speculative_config(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_speculative_config(text)
