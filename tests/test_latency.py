"""The latency guard learns what a row costs and bounds prompts by it."""

from __future__ import annotations

import random

import pytest

from pilotfish.control.latency import LEAST_PREFILL, LatencyGuard


def _taught(a: float, b: float, noise: float = 0.0) -> LatencyGuard:
    rng = random.Random(1)
    guard = LatencyGuard()
    for _ in range(300):
        rows = rng.choice([1, 2, 4, 64, 512])
        guard.observe(rows, (a + b * rows) * (1 + noise * rng.uniform(-1, 1)))
    return guard


def test_the_cost_of_a_row_is_learnt() -> None:
    assert _taught(20, 0.5).cost() == pytest.approx((20, 0.5))
    a, b = _taught(20, 0.5, noise=0.2).cost() or (0, 0)
    assert abs(a - 20) < 10 and abs(b - 0.5) < 0.1


def test_prompts_are_bounded_by_the_tightest_target() -> None:
    guard = _taught(20, 0.5)
    assert guard.most_prefill(2, [120.0, 70.0]) in (97, 98)  # (70 - 20) / 0.5 - 2
    assert guard.most_prefill(0, []) is None, "nobody waits for the step"
    assert guard.most_prefill(2, []) in (957, 958), "half a second without a target"
    assert LatencyGuard().most_prefill(2, []) is None
    assert guard.most_prefill(2, [5.0]) == LEAST_PREFILL, "prompts go on even where the target can not be kept"


def test_it_is_careful_while_it_knows_nothing() -> None:
    guard = LatencyGuard()
    assert guard.most_prefill(1, [100.0]) == LEAST_PREFILL
    for _ in range(5):
        guard.observe(1, 20.0)
    assert guard.cost() is None and guard.most_prefill(1, [100.0]) == LEAST_PREFILL


def test_recent_steps_count_more() -> None:
    guard = _taught(20, 0.5)
    for _ in range(200):
        for rows in (1, 8, 256):
            guard.observe(rows, 40 + rows)
    assert guard.cost() == pytest.approx((40, 1), rel=1e-3)
