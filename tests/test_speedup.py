"""The formulas of speculation against enumeration, limits, published figures and slow twins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.control.speedup import (
    Load,
    Roofline,
    best_drafts,
    break_even,
    expected_tokens,
    flat_cost,
    largest_paying_batch,
    least_break_even,
    rule_of_thumb,
    speed_up,
)

RATES = st.floats(0.0, 1.0)
LENGTHS = st.integers(0, 40)


def _flat(draft_cost: float) -> Callable[[int], float]:
    return lambda drafts: flat_cost(drafts, draft_cost)


@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.5, 0.7, 0.97, 1.0])
@pytest.mark.parametrize("drafts", range(8))
def test_tokens_are_those_of_all_outcomes(acceptance: float, drafts: int) -> None:
    """Every pattern of drafts that stand or do not, with its probability: those before the first refusal count."""
    mean = 0.0
    for pattern in itertools.product((True, False), repeat=drafts):
        chance = math.prod(acceptance if stands else 1 - acceptance for stands in pattern)
        mean += chance * (1 + len(list(itertools.takewhile(bool, pattern))))
    assert expected_tokens(acceptance, drafts) == pytest.approx(mean, rel=1e-13)


@given(RATES, LENGTHS)
def test_tokens_are_the_sum_of_powers(acceptance: float, drafts: int) -> None:
    assert expected_tokens(acceptance, drafts) == pytest.approx(
        math.fsum(acceptance**j for j in range(drafts + 1)), rel=1e-13
    )


@given(RATES, RATES, LENGTHS)
def test_tokens_rise_with_acceptance_and_length(first: float, second: float, drafts: int) -> None:
    low, high = sorted((first, second))
    assert expected_tokens(low, drafts) <= expected_tokens(high, drafts) * (1 + 1e-14)
    assert expected_tokens(low, drafts) <= expected_tokens(low, drafts + 1) * (1 + 1e-14)
    assert 1 <= expected_tokens(low, drafts) <= (drafts + 1) * (1 + 1e-14)


def test_limits() -> None:
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(1 - 1e-15, 5) == pytest.approx(6, rel=1e-13)
    assert expected_tokens(0.7, 10_000) == pytest.approx(1 / 0.3)
    assert speed_up(0.7, 5, flat_cost(5, 0.0)) == expected_tokens(0.7, 5)  # drafts for nothing
    assert speed_up(0.0, 5, flat_cost(5, 0.1)) == pytest.approx(1 / 1.5)  # nothing stands: only the cost is left
    assert speed_up(1.0, 4, flat_cost(4, 1.0)) == 1.0  # a drafter as dear as the target
    assert rule_of_thumb(0.7, 0) == 1.0 and rule_of_thumb(1.0, 4) == pytest.approx(5)


@pytest.mark.parametrize(("acceptance", "drafts"), [(-0.1, 1), (1.1, 1), (math.nan, 1), (0.5, -1)])
def test_what_is_no_rate_or_length_is_refused(acceptance: float, drafts: int) -> None:
    for formula in (expected_tokens, rule_of_thumb):
        with pytest.raises(ValueError, match="must lie in 0 to 1"):
            formula(acceptance, drafts)


def test_rule_of_thumb_beside_the_formula() -> None:
    """At a = 0.7 and k = 5 the rule says 2.40; the formula 2.94 for free drafts and less as they cost more."""
    assert rule_of_thumb(0.7, 5) == pytest.approx(2.40, abs=0.005)
    costs = {0: 2.94, 0.01: 2.80, 0.02: 2.67, 0.05: 2.35, 0.1: 1.96, 0.2: 1.47}
    for cost, expected in costs.items():
        assert speed_up(0.7, 5, flat_cost(5, cost)) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        (0.6, {0.02: (6, 2.17), 0.05: (4, 1.92), 0.1: (3, 1.67), 0.2: (2, 1.40)}),
        (0.7, {0.02: (8, 2.76), 0.05: (6, 2.35), 0.1: (4, 1.98), 0.2: (3, 1.58)}),
        (0.8, {0.02: (11, 3.82), 0.05: (8, 3.09), 0.1: (6, 2.47), 0.2: (4, 1.87)}),
        (0.9, {0.02: (19, 6.37), 0.05: (13, 4.67), 0.1: (10, 3.43), 0.2: (7, 2.37)}),
    ],
)
def test_best_lengths_where_a_pass_of_many_rows_is_as_long(
    acceptance: float, expected: dict[float, tuple[int, float]]
) -> None:
    for cost, (drafts, gain) in expected.items():
        found = best_drafts(acceptance, _flat(cost), 64)
        assert found[0] == drafts and found[1] == pytest.approx(gain, abs=0.006)


@given(RATES, st.floats(0.0, 2.0), st.integers(1, 24))
def test_the_best_length_is_the_best(acceptance: float, draft_cost: float, most: int) -> None:
    drafts, gain = best_drafts(acceptance, _flat(draft_cost), most)
    gains = [speed_up(acceptance, k, flat_cost(k, draft_cost)) for k in range(1, most + 1)]
    assert gain >= max([1.0, *gains]) - 1e-11
    assert gain == (1.0 if drafts == 0 else gains[drafts - 1])
    # Corollary 3.9: it pays exactly where more than c stands.
    if abs(acceptance - draft_cost) > 1e-6:
        assert (drafts > 0) == (acceptance > draft_cost)


@given(st.integers(1, 24), st.floats(0.5, 30.0))
def test_break_even_breaks_even(drafts: int, cost: float) -> None:
    rate = break_even(drafts, cost)
    if cost <= 1:
        assert rate == 0.0
    elif cost > drafts + 1:
        assert rate is None and speed_up(1.0, drafts, cost) < 1
    else:
        assert rate is not None and speed_up(rate, drafts, cost) == pytest.approx(1.0, rel=1e-12)
        assert speed_up(min(1.0, rate + 1e-6), drafts, cost) >= 1 - 1e-12
        assert speed_up(max(0.0, rate - 1e-6), drafts, cost) < 1


@given(st.floats(0.001, 1.0), st.integers(1, 16))
def test_a_flat_pass_breaks_even_at_c(draft_cost: float, most: int) -> None:
    assert least_break_even(_flat(draft_cost), most) == pytest.approx(draft_cost, abs=1e-9)


def test_no_rate_pays_for_a_drafter_dearer_than_the_target() -> None:
    assert least_break_even(_flat(1.01), 16) is None
    assert least_break_even(_flat(0.0), 16) == 0.0


LOADS = st.builds(
    Load,
    weight_bytes=st.floats(1e6, 1e12),
    operations_per_row=st.floats(1e6, 1e12),
    kv_bytes_per_token=st.floats(0, 1e7),
    attention_operations_per_token=st.floats(0, 1e7),
)
ROOFLINES = st.builds(Roofline, st.floats(1, 1e4), st.floats(0.01, 1e4))


def test_roofline_of_a_known_device() -> None:
    """7 B halves on 3,350 GB/s: 4.18 ms a token; the ridge of 989 TFLOP/s is at 295 rows."""
    device, load = Roofline(3350, 989), Load(14e9, 14e9, 524288, 524288)
    assert device.pass_ms(load, 1, 1, 0) == device.pass_ms(load, 1, 295, 0) == pytest.approx(4.179, abs=1e-3)
    assert device.ridge_rows(load) == pytest.approx(295.2, abs=0.1)
    assert device.pass_ms(load, 10, 59, 0) == pytest.approx(1e3 * 590 * 14e9 / 989e12)
    keys = device.pass_ms(load, 8, 1, 1000) - device.pass_ms(load, 8, 1, 0)
    assert keys == pytest.approx(1e3 * 8 * 1000 * 524288 / 3350e9)
    assert device.pass_ms(load, 8, 5, 1000) == device.pass_ms(load, 8, 1, 1000)  # its rows read a request's KV together


@given(ROOFLINES, LOADS, st.integers(1, 300), st.integers(1, 20), st.integers(0, 100_000))
def test_a_pass_never_gets_shorter(device: Roofline, load: Load, batch: int, rows: int, context: int) -> None:
    base = device.pass_ms(load, batch, rows, context)
    assert base > 0
    assert base <= device.pass_ms(load, batch + 1, rows, context)
    assert base <= device.pass_ms(load, batch, rows + 1, context)
    assert base <= device.pass_ms(load, batch, rows, context + 1)
    # Nor does it cost more to have rows in one pass than in two.
    assert device.pass_ms(load, batch, 2 * rows, context) <= 2 * base * (1 + 1e-12)


@given(ROOFLINES, LOADS, st.integers(1, 100), st.integers(0, 10_000), st.integers(1, 16))
def test_cost_is_drafts_and_one_pass(device: Roofline, load: Load, batch: int, context: int, drafts: int) -> None:
    plain = device.pass_ms(load, batch, 1, context)
    verified = device.pass_ms(load, batch, drafts + 1, context)
    assert device.cost(load, None, batch, context)(drafts) == pytest.approx(verified / plain)
    assert device.cost(load, load, batch, context)(drafts) == pytest.approx(drafts + verified / plain)
    tenth = device.cost(load, load.share(0.1), batch, context)(drafts)
    assert tenth == pytest.approx(0.1 * drafts + verified / plain)


@given(
    st.floats(1.0, 100.0),  # rows to the ridge
    st.floats(0.0, 1.0),
    st.floats(0.0, 1e-3),
    st.floats(0.01, 1.2),
    st.floats(0.01, 3.0),
    st.integers(0, 4000),
)
def test_the_last_batch_that_pays_is_that_of_trying_all(
    ridge: float, acceptance: float, kv: float, share: float, kv_share: float, context: int
) -> None:
    device = Roofline(1.0, 1e-3)
    target = Load(1e9, 1e9 / ridge, kv * 1e9, 0.0)
    drafter = Load(share * 1e9, share * 1e9 / ridge, kv_share * share * kv * 1e9, 0.0)
    limit = math.ceil(max(device.ridge_rows(target), device.ridge_rows(drafter))) + 2

    def pays(batch: int) -> bool:
        return best_drafts(acceptance, device.cost(target, drafter, batch, context), 8)[0] > 0

    every = [batch for batch in range(1, limit + 1) if pays(batch)]
    found = largest_paying_batch(pays, limit)
    assert found == (None if limit in every else max(every, default=0))
    if found is None:  # and then for ever
        assert pays(10 * limit) and pays(1000 * limit)


def test_where_batches_stop_paying() -> None:
    assert largest_paying_batch(lambda batch: batch <= 777, 10_000) == 777
    assert largest_paying_batch(lambda batch: 5 <= batch <= 9, 1000) == 9
    assert largest_paying_batch(lambda batch: False, 1000) == 0
    assert largest_paying_batch(lambda batch: True, 1) is None
