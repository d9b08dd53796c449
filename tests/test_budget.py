"""Draft budgets follow what was accepted."""

from __future__ import annotations

import random

from pilotfish.control.budget import FIRST, LONGEST_REST, BudgetController


def test_full_acceptance_doubles_up_to_the_most() -> None:
    controller = BudgetController(16)
    budgets = []
    for _ in range(5):
        budgets.append(controller.budget(1))
        controller.observe(1, budgets[-1], budgets[-1])
    assert budgets == [FIRST, 4, 8, 16, 16]


def test_a_rejection_falls_to_just_above_what_stood() -> None:
    controller = BudgetController(16)
    for _ in range(3):
        controller.observe(1, 1, 1)
    controller.observe(1, 16, 5)
    assert controller.budget(1) == 6


def test_useless_drafts_rest_for_longer_each_time_and_are_tried_again() -> None:
    controller = BudgetController(16)
    controller.observe(1, 2, 0)
    assert controller.budget(1) == 1
    rests = []
    for _ in range(8):
        controller.observe(1, 1, 0)
        rest = 0
        while controller.budget(1) == 0:
            controller.observe(1, 0, 0)
            rest += 1
        rests.append(rest)
        assert controller.budget(1) == 1
    assert rests == [1, 2, 4, 8, 16, LONGEST_REST, LONGEST_REST, LONGEST_REST]
    controller.observe(1, 1, 1)
    assert controller.budget(1) == 2


def test_steps_without_drafts_teach_nothing() -> None:
    controller = BudgetController(16)
    controller.observe(1, 0, 0)
    assert controller.budget(1) == FIRST


def test_fixed_budgets_stay() -> None:
    controller = BudgetController(16)
    controller.fix(1, 5)
    for _ in range(3):
        controller.observe(1, 5, 0)
    assert controller.budget(1) == controller.fixed(1) == 5
    assert controller.budget(2) == FIRST and controller.fixed(2) is None
    controller.end(1)
    assert controller.fixed(1) is None


def test_requests_are_apart_and_budgets_stay_in_range() -> None:
    rng = random.Random(0)
    controller = BudgetController(12)
    for _ in range(2000):
        id = rng.randrange(4)
        budget = controller.budget(id)
        assert 0 <= budget <= 12
        drafted = rng.randint(0, budget)
        controller.observe(id, drafted, rng.randint(0, drafted))
        if rng.random() < 0.01:
            controller.end(id)
            controller.end(id)
            assert controller.budget(id) == FIRST
