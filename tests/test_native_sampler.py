"""The native sampler against the rule of sampling.py: the same token on every path, for any row and filters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish import _native
from pilotfish.backends.native import PATH_VARIABLE, choose, path_names
from pilotfish.errors import InputError, PilotfishError
from pilotfish.params import SamplingParams
from pilotfish.sampling import Logits, support
from pilotfish.sampling import choose as choose_by_rule

U64 = 2**64
GREATEST = float(np.finfo(np.float32).max)


def assert_same(logits: Logits, params: SamplingParams, seed: int, position: int) -> int:
    expected = choose_by_rule(logits, params, seed, position)
    found = {path: choose(logits, params, seed, position, path) for path in path_names()}
    assert found == dict.fromkeys(path_names(), expected)
    return expected


few_values = st.sampled_from([-math.inf, -GREATEST, -3.0, -0.0, 0.0, 0.5, 4.0])
# Neighbours in float32, some of which are one number once a larger one is subtracted in float64.
close_values = st.sampled_from([0.0, -0.0, 1e-45, 2e-45, -1e-45, 1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24])
small_rows = st.one_of(
    st.lists(few_values, min_size=1, max_size=150).filter(lambda row: max(row) > -math.inf),
    st.lists(close_values, min_size=1, max_size=150),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=150),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=150),
).map(lambda row: np.array(row, np.float32))
any_params = st.builds(
    SamplingParams,
    temperature=st.one_of(
        st.sampled_from([5e-324, 1e-300, 1e-40, 1e-6, 0.01, 0.7, 1.0, 5.0, 100.0]), st.floats(0.01, 5)
    ),
    top_k=st.one_of(st.just(0), st.integers(1, 200), st.just(10**30)),
    top_p=st.one_of(
        st.just(1.0),
        st.floats(0, 1, exclude_min=True),
        st.sampled_from([5e-324, 1e-300, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-9, 1 - 2.0**-53]),
    ),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1), st.sampled_from([5e-324, 1e-300, 1e-9, 0.05, 1 - 2.0**-53, 1.0])),
    typical_p=st.sampled_from([1.0] * 5 + [0.5]),
)
seeds = st.one_of(st.integers(0, U64 - 1), st.sampled_from([0, U64 - 1]))


@settings(deadline=None, max_examples=1000)
@given(small_rows, any_params, seeds, st.integers(0, 2**31 - 1))
def test_small_rows(logits: Logits, params: SamplingParams, seed: int, position: int) -> None:
    assert_same(logits, params, seed, position)


def random_row(rng: np.random.Generator, vocab: int) -> Logits:
    logits = rng.normal(0, rng.choice([0.0, 0.1, 1.0, 3.0, 30.0, 1e30]), vocab)
    match rng.integers(6):
        case 0:  # many equal
            logits = np.round(logits)
        case 1:  # a few stand out
            logits[rng.integers(0, vocab, 5)] += logits.max() + rng.exponential(10)
        case 2:  # masked
            logits[rng.random(vocab) < rng.random()] = -math.inf
            logits[rng.integers(vocab)] = 1.0
        case 3:  # every token is likelier than those before
            logits.sort()
    return logits.astype(np.float32)


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(np.exp(rng.uniform(np.log(0.01), np.log(5)))),
        top_k=int(rng.choice([0, 0, 1, 2, 40, rng.integers(1, vocab + 1), vocab, vocab + 1])),
        top_p=float(rng.choice([1.0, rng.random() + 1e-12, 0.95, 1e-9, 1 - 1e-9])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, rng.random(), 1.0])),
    )


def test_rows_of_any_length() -> None:
    rng = np.random.default_rng(5)
    for _ in range(1500):
        vocab = int(rng.integers(1, 5000))
        logits, params = random_row(rng, vocab), random_params(rng, vocab)
        assert_same(logits, params, int(rng.integers(U64, dtype=np.uint64)), int(rng.integers(2**20)))


def test_a_large_vocabulary() -> None:
    rng = np.random.default_rng(6)
    for trial in range(30):
        logits, params = random_row(rng, 151936), random_params(rng, 151936)
        assert_same(logits, params, trial, 100 + trial)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=2.0, top_p=0.2),
        SamplingParams(temperature=0.8, min_p=0.05),
        SamplingParams(temperature=1.5, top_k=40),
        SamplingParams(temperature=1.5, top_k=300, top_p=0.6, min_p=0.001),
        SamplingParams(temperature=1.5, typical_p=0.5),
    ],
    ids=["none", "top_p", "small top_p", "min_p", "top_k", "all", "typical_p"],
)
def test_many_draws_from_one_row(params: SamplingParams) -> None:
    logits = np.random.default_rng(7).normal(0, 3, 3001).astype(np.float32)
    drawn = {assert_same(logits, params, seed, 9) for seed in range(400)}
    assert drawn <= set(support(logits, params)[0].tolist()) and len(drawn) > 5


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_unlikely_tokens_win_when_they_should(spread: float) -> None:
    """A flat sea below one peak: few of its tokens get as far as a logarithm."""
    logits = np.random.default_rng(2).normal(0, spread, 20_000).astype(np.float32)
    logits[77] = logits.max() + 9.0
    drawn = [assert_same(logits, SamplingParams(temperature=1.0), seed, 3) for seed in range(150)]
    if spread == 0.5:
        assert 20 < sum(token != 77 for token in drawn) < 140


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.zeros(300, np.float32)
    logits[[70, 130, 299]] = 2.5
    assert assert_same(logits, SamplingParams(), 1, 1) == 70


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, -math.nan], [0.0, math.inf], [-math.inf] * 2])
def test_a_broken_row_is_an_error(row: list[float], temperature: float) -> None:
    logits = np.zeros(100, np.float32) if math.isfinite(row[0]) else np.full(100, -math.inf, np.float32)
    logits[50 : 50 + len(row)] = row
    for path in path_names():
        with pytest.raises(PilotfishError, match="highest logit is"):
            choose(logits, SamplingParams(temperature=temperature, top_p=0.9), 1, 1, path)


def test_the_path_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.zeros(3, np.float32)
    monkeypatch.setenv(PATH_VARIABLE, "portable")
    assert choose(logits, SamplingParams(), 1, 1) == 0
    monkeypatch.setenv(PATH_VARIABLE, "sse9")
    with pytest.raises(InputError, match="sse9"):
        choose(logits, SamplingParams(), 1, 1)


def test_the_binding_refuses_what_the_kernel_would_not_survive() -> None:
    logits = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="logits"):
        _native.sample("portable", logits[:0], 1.0, 0.0, 0, 1.0, 1, 1)
    for rule in [
        (-1.0, 0.0, 0, 1.0),
        (math.nan, 0.0, 0, 1.0),
        (1.0, 2.0, 0, 1.0),
        (1.0, 0.0, -1, 1.0),
        (1.0, 0.0, 0, 0.0),
    ]:
        with pytest.raises(ValueError, match="sampling parameter"):
            _native.sample("portable", logits, *rule, 1, 1)
