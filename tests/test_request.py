import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import InputError
from pilotfish.request import Request, SamplingParams, SpeculationCounts

NAN, INF = math.nan, math.inf
BAD = {
    "max_tokens": [0, -1, 1.0, True, "8", NAN],
    "temperature": [-0.1, 100.5, NAN, INF, -INF, True, None, "1", 10**400],
    "top_k": [-1, 2.0, False, None, INF],
    "top_p": [0, 0.0, -0.5, 1.5, NAN, INF, True, None, "0.9"],
    "min_p": [-0.1, 1.1, NAN, INF, False, None],
    "seed": [-1, 2**64, 1.0, True, "7", np.int64(3)],
    "stop": ["text", None, [""], ["a", 3], {"a"}, b"x", [["a"]]],
    "stop_token_ids": [3, None, [-1], [1.0], [True], ["a"], "12"],
    "ignore_eos": [0, 1, None, "yes"],
}
GOOD = {
    "max_tokens": [1, 10**9, None],
    "temperature": [0, 0.0, 1, 1e-320, 100],
    "top_k": [0, 1, 10**9],
    "top_p": [1, 1.0, 5e-324],
    "min_p": [0, 0.0, 1, 1.0],
    "seed": [None, 0, 2**64 - 1],
    "stop": [(), [], ["\n"], ("a", "bc")],
    "stop_token_ids": [(), [0], (1, 2)],
    "ignore_eos": [True, False],
}


def pairs(table):
    return [pytest.param(name, value, id=f"{name}={value!r:.20}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_bad_parameter_is_refused_in_one_line_that_names_it(name, value):
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})
    line = str(caught.value)
    assert line.startswith(f"{name} is ") and "must be" in line
    assert "\n" not in line and len(line) < 200


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_good_parameter_is_kept(name, value):
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == (tuple(value) if name in ("stop", "stop_token_ids") else value)


@given(st.sampled_from(sorted(BAD)), st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text("a1\n")))
def test_any_value_is_kept_or_refused(name, value):
    try:
        kept = getattr(SamplingParams(**{name: value}), name)
    except InputError as error:
        assert name in str(error)
    else:
        assert kept is value


def test_a_long_bad_value_is_shortened():
    with pytest.raises(InputError) as caught:
        SamplingParams(stop=["x\n" * 10_000, 3])
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_parameters_do_not_change_and_compare_by_value():
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params == SamplingParams(stop=("a",)) and hash(params) == hash(SamplingParams(stop=("a",)))
    with pytest.raises(AttributeError):
        params.top_k = 3


def test_request_output_follows_the_prompt():
    prompt = [5, 6, 7]
    request = Request(0, prompt, SamplingParams(), seed=1)
    assert request.tokens == prompt and request.output == [] and request.finish_reason is None
    request.tokens.extend([8, 9])
    assert request.output == [8, 9] and prompt == [5, 6, 7]


def test_requests_share_nothing():
    first, second = (Request(0, [1], SamplingParams(), seed=1) for _ in range(2))
    first.tokens.append(2)
    first.counts.add("ngram", 3, 1)
    assert second.tokens == [1] and second.counts.drafted == 0 and first != second


def test_an_empty_prompt_is_refused():
    with pytest.raises(InputError, match="prompt is empty"):
        Request(0, [], SamplingParams(), seed=1)


def test_speculation_counts():
    counts = SpeculationCounts()
    assert counts.acceptance_length == 0 and counts.acceptance_rate == 0
    counts.add("", 0, 0)
    assert counts.acceptance_length == 1 and counts.by_drafter == {}
    counts.add("ngram", 4, 4)
    counts.add("suffix", 2, 0)
    counts.add("ngram", 4, 1)
    assert (counts.target_steps, counts.drafted, counts.accepted) == (4, 10, 5)
    assert counts.acceptance_length == 9 / 4 and counts.acceptance_rate == 0.5
    assert (counts.by_drafter["ngram"].drafted, counts.by_drafter["ngram"].accepted) == (8, 5)
    assert (counts.by_drafter["suffix"].drafted, counts.by_drafter["suffix"].accepted) == (2, 0)
