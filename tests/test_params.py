"""The ranges of what a caller may ask, and one clear line for what lies outside."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import InputError
from pilotfish.params import SamplingParams, StructuredOutput

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
    "echo": [0, None, "yes"],
    "min_tokens": [-1, 129, 1.0, True, None],
    "typical_p": [0, -0.5, 1.5, NAN, True, None],
    "repetition_penalty": [0, 0.001, -1, 101, NAN, INF, True, None],
    "presence_penalty": [-2.1, 2.1, NAN, True, None, "1"],
    "frequency_penalty": [-2.1, 2.1, NAN, True, None, "1"],
    "logit_bias": [None, [1], {"1": 1.0}, {-1: 1.0}, {1: 101}, {1: NAN}, {1: True}, {True: 1.0}],
    "allowed_token_ids": [(), [], [-1], [1.0], 3, "12"],
    "banned_token_ids": [None, [-1], [True], 3],
    "bad_words": [None, "text", [""], [3]],
    "n": [0, -1, 129, 1.0, True, None],
    "logprobs": [-1, 21, 1.0, True, "3"],
    "prompt_logprobs": [-1, 21, 1.0, True, "3"],
    "structured": [{"regex": "a"}, "a", True],
    "acceptance": [None, "", "typical", "Match", 3],
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
    "echo": [True, False],
    "min_tokens": [0, 1, 128],
    "typical_p": [1, 0.2, 5e-324],
    "repetition_penalty": [1, 0.01, 1.3, 100],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "logit_bias": [{}, {0: 1}, {7: -100.0, 9: 100}],
    "allowed_token_ids": [None, [0], (1, 2)],
    "banned_token_ids": [(), [0], (1, 2)],
    "bad_words": [(), ["a b"], ("c",)],
    "n": [1, 128],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "structured": [None, StructuredOutput(regex="a")],
    "acceptance": ["match", "ratio", "block", "multi", "typical-lossy"],
}
TUPLES = ("stop", "stop_token_ids", "bad_words", "banned_token_ids", "allowed_token_ids")


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
    assert kept == (tuple(value) if name in TUPLES and value is not None else value)


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


def test_min_tokens_fit_an_endless_answer():
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {1: 2.0}},
        {"banned_token_ids": [1]},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"structured": StructuredOutput(json_object=True)},
    ],
)
def test_what_changes_logits_says_so(changes):
    assert SamplingParams(**changes).adjusts


def test_what_does_not_change_logits_says_so():
    assert not SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.5, logprobs=3, n=4).adjusts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"json_object": True, "regex": "a"}, "exactly one"),
        ({"choice": ()}, "exactly one"),
        ({"json_object": 1}, "json_object is 1"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[1]"}, "json_schema is"),
        ({"json_schema": "[" * 100_000}, "json_schema is not JSON"),
        ({"json_schema": 3}, "json_schema is 3"),
        ({"regex": ""}, "regex is ''"),
        ({"grammar": 3}, "grammar is 3"),
        ({"choice": "abc"}, "choice is 'abc'"),
        ({"choice": ["a", ""]}, "choice is"),
    ],
)
def test_a_form_is_one_and_makes_sense(fields, message):
    with pytest.raises(InputError, match=message):
        StructuredOutput(**fields)


def test_a_schema_may_be_an_object_or_its_text():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    as_object, as_text = StructuredOutput(json_schema=schema), StructuredOutput(json_schema=json.dumps(schema))
    assert as_object == as_text and hash(as_object) == hash(as_text)


def test_parameters_do_not_change_and_compare_by_value():
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params == SamplingParams(stop=("a",)) and hash(params) == hash(SamplingParams(stop=("a",)))
    with pytest.raises(AttributeError):
        params.top_k = 3


def test_a_bias_does_not_change_under_a_request():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 3.0
    assert params.logit_bias == {1: 2.0} and hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))
