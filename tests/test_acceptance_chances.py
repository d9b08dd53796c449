"""What is learnt about drafts: it converges to what is true, stays in range, is shared, and is forgotten in time."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.control.acceptance import DEPTHS, EDGES, PRIOR_OF_DEPTH, Acceptance, Experience
from pilotfish.tree import DraftTree


def _feed(acceptance: Acceptance, rng: random.Random, rate: float, count: int, id: int = 0, confidence: float = 0.55):
    for _ in range(count):
        stood = rng.random() < rate
        acceptance.observe(id, "a", 1, confidence, stood)
        acceptance.observe_depth("a", 1, stood)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9])
def test_chances_converge(rate: float) -> None:
    rng = random.Random(int(rate * 100))
    acceptance = Acceptance()
    _feed(acceptance, rng, rate, 2000)
    # A cell's memory is 200 drafts: three standard errors. Another request has no shift of its own.
    assert abs(acceptance.chance(1, "a", 1, 0.55) - rate) < 0.12
    assert abs(acceptance.chance_at(1, "a", 1) - rate) < 0.12
    # The request's own shift moves with each draft, so its chances are right in the mean.
    seen = []
    for _ in range(2000):
        seen.append(acceptance.chance(0, "a", 1, 0.55))
        _feed(acceptance, rng, rate, 1)
    assert abs(sum(seen) / len(seen) - rate) < 0.06
    acceptance.check()


def test_what_is_known_goes_over_when_drafts_change() -> None:
    acceptance, rng = Acceptance(), random.Random(1)
    _feed(acceptance, rng, 0.95, 1000)
    _feed(acceptance, rng, 0.05, 1000)
    assert acceptance.chance(1, "a", 1, 0.55) < 0.15


def test_nothing_known_is_what_the_drafter_says() -> None:
    acceptance = Acceptance()
    for confidence in (0.02, 0.3, 0.77, 0.97):
        assert acceptance.chance(0, "a", 3, confidence) == confidence
    assert acceptance.chance_at(0, "a", 3) == PRIOR_OF_DEPTH


def test_drafters_depths_and_confidences_are_apart() -> None:
    acceptance, rng = Acceptance(), random.Random(2)
    _feed(acceptance, rng, 0.0, 200)
    assert acceptance.chance(1, "b", 1, 0.55) == 0.55
    assert acceptance.chance(1, "a", 2, 0.55) == 0.55
    assert acceptance.chance(1, "a", 1, 0.9) == 0.9
    assert acceptance.chance(1, "a", 1, 0.55) < 0.05
    assert acceptance.chance_at(1, "a", 2) == acceptance.chance_at(1, "b", 1) == PRIOR_OF_DEPTH
    assert acceptance.chance_at(1, "a", 1) < 0.05


def test_deep_drafts_share_a_cell() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(0, "a", DEPTHS + 5, 0.5, False)
        acceptance.observe_depth("a", DEPTHS + 5, False)
    assert acceptance.chance(1, "a", DEPTHS, 0.5) == acceptance.chance(1, "a", 99, 0.5) < 0.1
    assert acceptance.chance_at(1, "a", DEPTHS) == acceptance.chance_at(1, "a", 99) < 0.1


def test_two_requests_are_told_apart() -> None:
    acceptance, rng = Acceptance(), random.Random(3)
    for _ in range(150):
        _feed(acceptance, rng, 0.95, 1, id=1)
        _feed(acceptance, rng, 0.1, 1, id=2)
    easy, hard, new = (acceptance.chance(id, "a", 1, 0.55) for id in (1, 2, 3))
    assert easy > 0.8 and hard < 0.25 and hard < new < easy
    # What a request has shown at one depth says something of all of them.
    assert acceptance.chance(1, "a", 4, 0.55) > 0.55 > acceptance.chance(2, "a", 4, 0.55)
    assert acceptance.chance_at(1, "a", 1) > acceptance.chance_at(3, "a", 1) > acceptance.chance_at(2, "a", 1)


def test_the_end_forgets_the_request_and_nothing_else() -> None:
    acceptance, rng = Acceptance(), random.Random(4)
    _feed(acceptance, rng, 1.0, 50, id=1)
    _feed(acceptance, rng, 0.0, 50, id=2)
    acceptance.observe(1, "b", 1, 0.5, True)
    other, new = acceptance.chance(2, "a", 1, 0.55), acceptance.chance(3, "a", 1, 0.55)
    acceptance.end(1)
    assert acceptance.chance(1, "a", 1, 0.55) == new
    assert acceptance.chance(2, "a", 1, 0.55) == other
    acceptance.end(2)
    acceptance.end(2)  # nothing is left to be forgotten
    assert not acceptance._shifts


def test_experience_is_shared_and_shifts_are_not() -> None:
    experience = Experience()
    one, two = Acceptance(experience), Acceptance(experience)
    _feed(one, random.Random(5), 1.0, 200)
    assert two.chance(0, "a", 1, 0.55) > 0.9
    assert one.chance(7, "a", 1, 0.55) == two.chance(0, "a", 1, 0.55) < one.chance(0, "a", 1, 0.55)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from("ab"),
            st.integers(1, 2 * DEPTHS),
            st.one_of(st.floats(0, 1), st.sampled_from(EDGES)),
            st.booleans(),
        ),
        max_size=200,
    )
)
def test_chances_stay_in_range(drafts: list[tuple[int, str, int, float, bool]]) -> None:
    acceptance = Acceptance()
    for id, drafter, depth, confidence, stood in drafts:
        acceptance.observe(id, drafter, depth, confidence, stood)
        acceptance.observe_depth(drafter, depth, stood)
        assert 0 < acceptance.chance(id, drafter, depth, confidence) < 1
        assert 0 < acceptance.chance_at(id, drafter, depth) < 1
        acceptance.check()


@pytest.mark.parametrize("stood", [False, True])
def test_endless_luck_is_bounded(stood: bool) -> None:
    acceptance = Acceptance()
    for _ in range(5000):
        acceptance.observe(0, "a", 1, 1.0 * stood, stood)
    assert (acceptance.chance(0, "a", 1, 1.0 * stood) > 0.98) is stood
    acceptance.check()


def test_what_is_not_tried_fades() -> None:
    """Chances go back to what is thought of a drafter that nothing is known of; shifts do so sooner."""
    acceptance, rng = Acceptance(), random.Random(6)
    _feed(acceptance, rng, 0.0, 100)
    found = []
    for _ in range(4):
        found.append((acceptance.chance(1, "a", 1, 0.55), acceptance.chance_at(1, "a", 1), acceptance._shift(0, "a")))
        acceptance.experience.step += 2000
        acceptance.check()
    for index, rest in enumerate((0.55, PRIOR_OF_DEPTH, 0.0)):
        values = [values[index] for values in found]
        assert values == sorted(values) and values[0] < values[1] <= rest
    assert found[1][2] > -0.01 and found[1][0] < 0.5


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=60))
def test_fading_is_in_range_whenever_it_is_looked_at(turns: list[tuple[int, bool]]) -> None:
    acceptance = Acceptance()
    for steps, stood in turns:
        acceptance.experience.step += steps
        acceptance.observe(0, "a", 1, 0.5, stood)
        acceptance.observe_depth("a", 1, stood)
        acceptance.check()
        assert 0 < acceptance.chance(0, "a", 1, 0.5) < 1


def test_a_tree_is_learnt_from_along_its_path() -> None:
    """Nodes whose parent was refused say nothing; of siblings any may stand for the depth."""
    acceptance = Acceptance()
    tree = DraftTree(
        np.array([4, 5, 6, 7], np.int32), np.array([-1, -1, 0, 1], np.int32), "a", (), (0.5, 0.4, 0.3, 0.9)
    )
    survivals = acceptance.survivals(0, tree)
    assert survivals == pytest.approx([0.5, 0.4, 0.15, 0.36])
    acceptance.learn(0, tree, [1], 2)
    tried = {key: cell.stood for key, cell in acceptance.experience.cells.items()}
    assert len(tried) == 3 and sorted(tried.values()) == [0.0, 0.0, 1.0]
    assert {key: cell.stood for key, cell in acceptance.experience.depths.items()} == {("a", 1): 1.0, ("a", 2): 0.0}
