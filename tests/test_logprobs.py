"""Log-probabilities: the pure rule against log-sum-exp and a sort, and every native path against the rule."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish import _native
from pilotfish.backends.native import PATH_VARIABLE, log_probabilities, path_names
from pilotfish.errors import InputError, PilotfishError
from pilotfish.params import MAX_LOGPROBS
from pilotfish.sampling import Logits
from pilotfish.sampling import log_probabilities as log_probabilities_by_rule

GREATEST = float(np.finfo(np.float32).max)
LARGE = 151936
tops = st.integers(0, MAX_LOGPROBS)


def bits(normaliser: float) -> str:
    return normaliser.hex()  # tells -0 from 0


def assert_same(logits: Logits, top: int) -> tuple[float, list[int]]:
    normaliser, ids = log_probabilities_by_rule(logits, top)
    for path in path_names():
        found, found_ids = log_probabilities(logits, top, path)
        assert (bits(found), found_ids.tolist()) == (bits(normaliser), ids.tolist()), path
        assert found_ids.dtype == ids.dtype == np.int32
    return normaliser, ids.tolist()


def assert_right(logits: Logits, top: int) -> None:
    """Against what does not share a line with the rule: log-sum-exp of exact sums, and a sort of pairs."""
    normaliser, ids = assert_same(logits, top)
    wide = [float(logit) for logit in logits]
    highest = max(wide)
    exact = highest + math.log(math.fsum(math.exp(logit - highest) for logit in wide))
    assert abs(normaliser - exact) <= len(wide) * 2.0**-41 + 3e-9 + 2.0**-52 * abs(exact)
    assert ids == sorted(range(len(wide)), key=lambda token: (-wide[token], token))[:top]


any_value = st.floats(width=32, allow_nan=False, allow_infinity=False)
few_values = st.sampled_from([-math.inf, -GREATEST, -40.0, -3.0, -0.0, 0.0, 0.5, 4.0])
denormals = st.sampled_from([0.0, -0.0, 1e-45, 2e-45, -1e-45, 1e-38, -1e-38])
# Where a weight rounds to 0 or to 1, and where scores are cut.
far_values = st.one_of(st.just(0.0), st.floats(-30, -27, width=32), st.floats(-66, -61, width=32))
huge_values = st.floats(float(np.float32(1e9)), float(np.float32(2e9)), width=32)
small_rows = st.one_of(
    *(
        st.lists(values, min_size=1, max_size=200)
        for values in (any_value, few_values, denormals, far_values, huge_values, st.floats(-30, 30, width=32))
    )
).map(lambda row: np.array(row, np.float32))
finite_rows = small_rows.filter(lambda row: bool(row.max() > -math.inf))


@settings(deadline=None, max_examples=1000)
@given(finite_rows, tops)
def test_small_rows(logits: Logits, top: int) -> None:
    assert_right(logits, top)


@pytest.mark.parametrize("top", [0, 1, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("kind", ["normal", "flat", "steep", "rounded", "masked", "ascending", "descending", "far"])
def test_a_large_vocabulary(kind: str, top: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, LARGE)
    match kind:
        case "flat":
            logits[:] = 7.25
        case "steep":
            logits *= 40
        case "rounded":
            logits = np.round(logits)
        case "masked":
            logits[rng.random(LARGE) < 0.999] = -math.inf
        case "ascending":
            logits.sort()
        case "descending":
            logits = -np.sort(-logits)
        case "far":  # every weight but one is lost, which is as far off as the sum can be
            logits = np.full(LARGE, -28.5)
            logits[777] = 0.0
    assert_right(logits.astype(np.float32), top)


def test_the_normaliser_turns_logits_into_probabilities() -> None:
    logits = np.random.default_rng(4).normal(0, 3, 1000).astype(np.float32)
    normaliser, ids = log_probabilities(logits, 3)
    probabilities = np.exp(logits.astype(np.float64) - normaliser)
    assert probabilities.sum() == pytest.approx(1, abs=1000 * 2.0**-40)
    assert probabilities[ids].tolist() == sorted(probabilities, reverse=True)[:3]


def test_rows_of_known_bits() -> None:
    assert assert_same(np.zeros(1, np.float32), 20) == (0.0, [0])
    assert assert_same(np.full(4, -0.0, np.float32), 2) == (2 * math.log(2), [0, 1])
    normaliser, ids = assert_same(np.array([-math.inf, 3.0, -math.inf], np.float32), 3)
    assert (normaliser, ids) == (3.0, [1, 0, 2])


def test_the_lowest_ids_of_equal_logits_win_across_blocks() -> None:
    logits = np.zeros(500, np.float32)
    logits[[499, 130, 65, 64, 3]] = 2.5
    logits[200] = 3.0
    assert assert_same(logits, 5)[1] == [200, 3, 64, 65, 130]
    assert assert_same(logits, 9)[1] == [200, 3, 64, 65, 130, 499, 0, 1, 2]


@pytest.mark.parametrize("length", [1, 100, 1000])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, None])
def test_a_broken_row_is_an_error(value: float | None, place: int, length: int) -> None:
    logits = np.full(length, -math.inf, np.float32) if value is None else np.zeros(length, np.float32)
    if value is not None:
        logits[place] = value
    for top in (0, 5):
        with pytest.raises(PilotfishError, match="highest logit is"):
            log_probabilities_by_rule(logits, top)
        for path in path_names():
            with pytest.raises(PilotfishError, match="highest logit is"):
                log_probabilities(logits, top, path)


def test_the_path_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.zeros(3, np.float32)
    monkeypatch.setenv(PATH_VARIABLE, "portable")
    assert log_probabilities(logits, 0)[0] == pytest.approx(math.log(3))
    monkeypatch.setenv(PATH_VARIABLE, "sse9")
    with pytest.raises(InputError, match="sse9"):
        log_probabilities(logits, 0)


def test_threads_share_a_row() -> None:
    logits = np.random.default_rng(5).normal(0, 3, LARGE).astype(np.float32)
    expected = bits(log_probabilities(logits, 20)[0])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: bits(log_probabilities(logits, 20)[0]), range(40)))
    assert found == [expected] * 40


def test_the_binding_refuses_what_the_kernel_would_not_survive() -> None:
    logits = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="logits"):
        _native.log_probabilities("portable", logits[:0], 0)
    for top in (-1, MAX_LOGPROBS + 1):
        with pytest.raises(ValueError, match="top"):
            log_probabilities(logits, top)
    with pytest.raises(ValueError, match="path"):
        _native.log_probabilities("sse9", logits, 0)
