"""The cost model: what it learns from measured passes, what real passes change, and that it never falls."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.control.cost import FASTEST, RECENT, TABLE_ROWS, TOLD, CostModel, Load
from pilotfish.tree import DraftTree, Rows, TreeBatch

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def truth(load: Load) -> float:
    """A machine: rows are free up to 4, then cost 2 ms each."""
    outputs = load.rows if load.outputs is None else load.outputs
    return 20 + 2.0 * max(0, load.rows - 4) + 0.001 * load.context + 0.002 * load.work + 0.3 * outputs


def passes(machine: Callable[[Load], float] = truth, noise: float = 0.0) -> list[tuple[Load, float]]:
    rng = random.Random(3)
    loads = [Load(rows, context, rows * context) for rows in ROWS for context in (128, 2048)]
    loads += [Load(rows, rows * 128, rows * 128) for rows in (4, 8, 16)]
    loads += [Load(rows, 128, rows * 128, 1) for rows in (16, 128)]
    return [(load, machine(load) * math.exp(noise * rng.gauss(0, 1))) for load in loads for _ in range(5)]


def mixed(rng: random.Random) -> Load:
    rows = rng.choice((1, 1, 3, 5, 8, 20, 64, 300))
    context = rng.randint(1, 4000)
    return Load(rows, context, rows * rng.randint(1, context), rng.choice((None, rng.randint(0, rows))))


def slow_ms(model: CostModel, load: Load) -> float:
    """The same prediction from what `as_dict` says, plainly: isotonic regression by its max-min formula."""
    d = model.as_dict()
    heights = [ms * factor for ms, factor in zip(d["ms"], d["factors"], strict=True)]
    size = len(heights)
    level = [
        max(min(sum(heights[i : j + 1]) / (j + 1 - i) for j in range(at, size)) for i in range(at + 1))
        for at in range(size)
    ]
    knots = d["rows"]
    if load.rows == 0:
        base = 0.0
    elif load.rows <= knots[0]:
        base = level[0]
    else:
        at = next((at for at in range(1, size) if load.rows <= knots[at]), size - 1)
        slope = (level[at] - level[at - 1]) / (knots[at] - knots[at - 1]) if size > 1 else 0.0
        base = level[at] + slope * (load.rows - knots[at])
    outputs = load.rows if load.outputs is None else load.outputs
    sloped = d["sloped"] * (d["context_ms"] * load.context + d["work_ms"] * load.work)
    return float(d["speed"] * (base + sloped + d["output_ms"] * outputs))


def test_what_was_measured_is_predicted() -> None:
    model = CostModel.fit(passes())
    model.check()
    assert all(model.ms(load) == pytest.approx(ms) for load, ms in passes())
    assert model.ms(Load(6, 500, 3000)) == pytest.approx(truth(Load(6, 500, 3000))), "linear between"
    assert model.ms(Load(300, 500, 3000)) == pytest.approx(truth(Load(300, 500, 3000))), "linear beyond"
    assert model.ms(Load(700, 500, 3000)) == pytest.approx(truth(Load(700, 500, 3000))), "linear beyond the list"
    assert model.ms(Load(64, 500, 3000, 2)) == pytest.approx(truth(Load(64, 500, 3000, 2))), "few outputs"
    assert model.ms(Load(0)) == 0, "no rows, no pass"
    with pytest.raises(ValueError, match="-1 rows"):
        model.ms(Load(-1))


def test_noise_and_interrupted_passes_hardly_matter() -> None:
    samples = passes(noise=0.05)
    clean = [(load, truth(load)) for load, _ in samples]
    spoilt = [(load, ms * 5 if index % 7 == 0 else ms) for index, (load, ms) in enumerate(samples)]
    model = CostModel.fit(spoilt)
    model.check()
    assert all(abs(model.ms(load) / ms - 1) < 0.12 for load, ms in clean)
    # One load that took five times as long in every pass: the others of its row count outvote it.
    odd = Load(8, 128, 1024)
    model = CostModel.fit([(load, ms * 5 if load == odd else ms) for load, ms in samples])
    assert all(abs(model.ms(load) / ms - 1) < 0.2 for load, ms in clean)


def test_slopes_are_never_negative_and_the_table_never_falls() -> None:
    falling = CostModel.fit(passes(lambda load: 100 / load.rows + 10 / (1 + load.context)))
    falling.check()
    d = falling.as_dict()
    assert d["ms"] == sorted(d["ms"]) and d["context_ms"] == d["work_ms"] == 0


def test_little_is_enough_and_nothing_is_not() -> None:
    one = CostModel.fit([(Load(4), 10.0)])
    one.check()
    assert one.ms(Load(1)) == one.ms(Load(4)) == one.ms(Load(1000)) == 10.0
    one.observe(Load(700), 20.0)
    one.check()
    for none in ([], [(Load(1), math.nan), (Load(1), 0.0), (Load(0), 1.0)]):
        with pytest.raises(ValueError, match="at least one"):
            CostModel.fit(none)


def test_a_pass_of_many_requests_reads_more() -> None:
    model = CostModel.fit(passes())
    alone, spread = model.ms(Load(8, 2000, 16000)), model.ms(Load(8, 16000, 16000))
    assert spread - alone == pytest.approx(0.001 * 14000)


def test_it_follows_a_machine_that_becomes_slower_and_faster() -> None:
    rng = random.Random(4)
    model = CostModel.fit(passes())
    for speed in (2.0, 1.0, 0.4):
        for _ in range(150):
            load = mixed(rng)
            model.observe(load, speed * truth(load))
            model.check()
        for _ in range(100):
            load = mixed(rng)
            assert model.ms(load) == pytest.approx(speed * truth(load), rel=0.05)
    assert model.error() < 0.03


def test_one_slow_pass_changes_little_and_some_change_the_speed() -> None:
    model = CostModel.fit(passes())
    load = Load(8, 500, 3000)
    before = model.ms(load)
    model.observe(load, 50 * before)
    assert model.ms(load) < 1.1 * before
    for _ in range(RECENT):
        model.observe(load, 2 * before)
    assert model.ms(load) == pytest.approx(2 * before, rel=0.1)
    assert model.ms(Load(1)) > 1.7 * CostModel.fit(passes()).ms(Load(1)), "the machine is slower, not 8 rows"


def test_a_row_count_that_is_wrong_is_corrected_alone() -> None:
    def real(load: Load) -> float:
        return truth(load) * (1.3 if load.rows == 8 else 1.0)

    rng = random.Random(5)
    model = CostModel.fit(passes())
    for _ in range(400):
        load = mixed(rng)
        model.observe(load, real(load))
    for rows in (1, 2, 8, 64):
        load = Load(rows, 300, 300 * rows)
        assert model.ms(load) == pytest.approx(real(load), rel=0.06)


def test_context_that_was_measured_too_dear_is_corrected() -> None:
    def dear(load: Load) -> float:
        return truth(load) + 3 * (0.001 * load.context + 0.002 * load.work)

    rng = random.Random(7)
    model = CostModel.fit(passes(dear))
    for _ in range(500):
        load = mixed(rng)
        model.observe(load, truth(load))
    for context in (100, 2000, 4000):
        load = Load(4, context, 4 * context)
        assert model.ms(load) == pytest.approx(truth(load), rel=0.1)


def test_absurd_passes_are_ignored() -> None:
    model = CostModel.fit(passes())
    before = model.as_dict()
    for ms in (0, 0.0, -1.0, math.nan, math.inf, -math.inf):
        model.observe(Load(4, 10, 40), ms)
    model.observe(Load(0), 5.0)
    model.observe(Load(-3), 5.0)
    assert model.as_dict() == before and model.error() == 0


def test_extremes_stay_bounded() -> None:
    for ms in (1e-300, 1e300):
        model = CostModel.fit(passes())
        for _ in range(100):
            model.observe(Load(4, 10, 40), ms)
            model.check()
        assert abs(math.log(model.as_dict()["speed"])) == pytest.approx(FASTEST)


def test_errors_are_of_predictions_before_they_were_corrected() -> None:
    model = CostModel.fit(passes())
    assert model.error() == 0
    load = Load(4, 100, 400)
    model.observe(load, 2 * model.ms(load))
    assert model.error() == pytest.approx(0.5)


loads = st.builds(
    Load,
    st.integers(1, 2 * TABLE_ROWS),
    st.integers(0, 100_000),
    st.integers(0, 10_000_000),
    st.none() | st.integers(0, 100),
)
times = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0.01, 10_000)


@settings(max_examples=150, deadline=None)
@given(
    measured=st.lists(st.tuples(loads, st.floats(0.01, 10_000)), min_size=1, max_size=12),
    observed=st.lists(st.tuples(loads, times), max_size=25),
    load=loads,
    more=st.tuples(st.integers(0, 600), st.integers(0, 10_000), st.integers(0, 100_000)),
)
def test_predictions_never_fall_whatever_was_seen(
    measured: list[tuple[Load, float]],
    observed: list[tuple[Load, float]],
    load: Load,
    more: tuple[int, int, int],
) -> None:
    model = CostModel.fit(measured)
    for other, ms in observed:
        model.observe(other, ms)
    model.check()
    larger = Load(load.rows + more[0], load.context + more[1], load.work + more[2], load.outputs)
    small, large = model.ms(load), model.ms(larger)
    assert 0 < small <= large * (1 + 1e-6)
    before = [model.ms(one) for one in (load, larger)]
    model.as_dict()  # brings in what had moved too little to be told
    small, large = model.ms(load), model.ms(larger)
    for one, earlier in zip((load, larger), before, strict=True):
        assert model.ms(one) == pytest.approx(slow_ms(model, one), rel=1e-6)
        assert model.ms(one) == pytest.approx(earlier, rel=3 * TOLD)
    again = CostModel.from_dict(json.loads(json.dumps(model.as_dict())))
    again.check()
    assert again.ms(larger) == pytest.approx(large, rel=1e-9)
    assert again.as_dict()["factors"] == pytest.approx(model.as_dict()["factors"], rel=1e-9)


def _without(d: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in d.items() if key != name}


def test_what_is_no_cost_model_is_refused() -> None:
    good = CostModel.fit(passes()).as_dict()
    bad: list[Any] = [None, [], "x", 3, {}, *(_without(good, name) for name in good)]
    changes: list[dict[str, Any]] = [
        {"format": 0},
        {"rows": []},
        {"rows": None},
        {"rows": good["rows"][::-1]},
        {"rows": [0, *good["rows"][1:]]},
        {"rows": "12345678"},
        {"ms": good["ms"][:-1]},
        {"ms": good["ms"][::-1]},
        {"ms": ["a", *good["ms"][1:]]},
        {"ms": [math.nan, *good["ms"][1:]]},
        {"ms": [-1.0, *good["ms"][1:]]},
        {"work_ms": -1e-6},
        {"context_ms": None},
        {"output_ms": math.inf},
        {"speed": 0},
        {"speed": math.nan},
        {"speed": 100.0},
        {"speed": "fast"},
        {"sloped": 5.0},
        {"factors": []},
        {"factors": [9.0] * len(good["rows"])},
        {"factors": [10**400] * len(good["rows"])},
    ]
    bad += [good | change for change in changes]
    for d in bad:
        with pytest.raises(ValueError):
            CostModel.from_dict(d)


def test_a_calibration_keeps_its_corrections_in_a_round_trip() -> None:
    rng = random.Random(6)
    model = CostModel.fit(passes())
    for _ in range(60):
        load = mixed(rng)
        model.observe(load, 1.7 * truth(load))
    again = CostModel.from_dict(model.as_dict())
    assert again.as_dict()["speed"] == pytest.approx(1.7, rel=0.1)
    again.observe(Load(4), 1e6)  # one pass is not a trend, after a round trip either
    assert again.ms(Load(1)) == pytest.approx(model.ms(Load(1)), rel=0.05)


def test_the_load_of_a_batch() -> None:
    tree = DraftTree.chain([7, 8, 9])
    branches = DraftTree(tree.tokens, tree.parents * 0 - 1)  # three children of the root
    batch = TreeBatch.build(
        [
            Rows([1], 10, [0, 1], tree),
            Rows([1], 20, [2, 3], branches),
            Rows([1, 2, 3, 4], 0, [4], logits=False),
        ]
    )
    load = Load.of(batch)
    assert load.rows == 12
    assert load.context == 14 + 24 + 4, "every slot that holds KV of the request"
    assert load.work == (11 + 12 + 13 + 14) + (21 + 22 + 22 + 22) + (1 + 2 + 3 + 4)
    assert load.outputs == 8
    assert Load.of(TreeBatch.build([])) == Load(0, 0, 0, 0)
