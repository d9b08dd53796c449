"""The n-gram drafter, and the words that name a drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pilotfish.drafters.base import DRAFTERS, DraftRequest
from pilotfish.drafters.grammar import GrammarDrafter
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.drafters.speculation import (
    AUTO,
    Part,
    Speculation,
    options_of,
    parse_request_speculation,
    parse_speculation,
    parse_speculative_config,
)
from pilotfish.errors import InputError


def _draft(
    drafter: NgramDrafter,
    tokens: list[int],
    budget: int = 4,
    depth: int = 99,
    id: int = 0,
    drafted: Sequence[int] = (),
) -> list[int]:
    return drafter.propose([DraftRequest(id, tokens, budget, depth, drafted=drafted)])[0].tokens.tolist()


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


def test_what_follows_drafts() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 5, 6, 9, 1]
    assert _draft(drafter, text, 3, drafted=[2, 3]) == [4, 5, 6]
    assert _draft(drafter, text, 5, drafted=[2, 3]) == [4, 5, 6, 9, 1]
    assert _draft(drafter, text, 9, drafted=[2, 3]) == [4, 5, 6, 9, 1, 2, 3, 4, 5]  # on through the drafts, in a loop
    assert _draft(drafter, [*text, 7, 2, 3]) == [4, 5, 6, 9]
    assert _draft(drafter, [*text, 7, 2, 3, 9, 1]) == [7, 2, 3, 9]  # no draft was taken in


def test_confidence_is_of_the_match_and_of_what_stood() -> None:
    drafter = NgramDrafter()

    def confidence(id: int, tokens: list[int]) -> float:
        return drafter.propose([DraftRequest(id, tokens, 1, 9)])[0].confidences[0]

    text = [1, 2, 3, 4, 9, 2, 3]
    short, long = confidence(0, text), confidence(1, [1, 2, 3, 4, 9, 1, 2, 3])
    assert 0 < short < long < 1
    stood, fell = list(text), list(text)
    assert confidence(2, stood) == confidence(3, fell) == short
    for step in range(8):
        stood += [4, 9, 2, 3] if step % 2 else [4, 8, 2, 3]
        fell += [50 + step, 60 + step, 2, 3]
        right, wrong = confidence(2, stood), confidence(3, fell)
    assert wrong < short < right
    (tree,) = drafter.propose([DraftRequest(1, [1, 2, 3, 4, 9, 1, 2, 3], 6, 9)])
    assert len(tree.confidences) == 6 and list(tree.confidences) == sorted(tree.confidences)
    tree.check(100)


def test_parse() -> None:
    assert parse_speculation("off") == Speculation()
    ngram = Part("ngram", None, {"n": 4})
    assert parse_speculation("ngram") == Speculation((ngram,))
    chosen = parse_speculation(" ngram:k=4, n=3,min=1 ")
    assert chosen == Speculation((Part("ngram", 4, {"n": 3, "min": 1}),)) and chosen.k == 4
    assert isinstance(parse_speculation("grammar").parts[0].make(None), GrammarDrafter)
    assert isinstance(parse_speculation("ngram:n=1").parts[0].make(None), NgramDrafter)
    both = parse_speculation("suffix:shared=10k+ngram:k=3")
    assert [part.method for part in both.parts] == ["suffix", "ngram"] and both.k is None
    assert both.parts[0].options["shared"] == 10_000 and both.parts[1].k == 3
    assert tuple(part.method for part in parse_speculation("auto").parts) == AUTO
    config = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    assert parse_speculative_config(config) == Speculation((Part("ngram", 5, {"n": 4, "min": 2}),))
    asked = parse_request_speculation({"method": "suffix", "latency_target_ms_per_token": 30})
    assert asked.parts[0].method == "suffix" and asked.latency_target_ms == 30


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_has_options_that_are_said(name: str) -> None:
    for key, option in options_of(name).items():
        assert key and option.help
        if option.default is not None:
            assert option.read(option.default) == option.default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no drafter ''"),
        ("ngrams", "no drafter 'ngrams'; available: off, auto, ngram"),
        ("medusa:heads", "medusa"),
        ("medusa", "medusa is not available in this version"),
        ("lookahead:window=33", "window=33 must lie in 0..32"),
        ("ngram+ngram:n=2", "ngram is named twice"),
        ("ngram+off", "off stands alone"),
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
        parse_speculation("ngram:n=2,min=3").parts[0].make(None)


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
