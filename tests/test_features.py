"""Speculation changes nothing: every parameter with every kind of tree, batch, chunk and preemption, pair by pair."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from allpairspy import AllPairs

from doubles import VOCAB, Letters, Oracle
from pilotfish.backends.native import NativeBackend
from pilotfish.drafters.base import Drafter
from pilotfish.drafters.grammar import GrammarDrafter
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.engine import Engine, Target
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams, StructuredOutput
from pilotfish.request import Request
from tiny import tiny_model

EOS = 77
# Each parameter with values that leave it out and that use it; pairs of all of these are tried together.
PARAMETERS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.5],
    "top_k": [0, 20],
    "top_p": [1.0, 0.9],
    "min_p": [0.0, 0.02],
    "typical_p": [1.0, 0.7],
    "repetition_penalty": [1.0, 1.3],
    "presence_penalty": [0.0, 0.8, -0.8],
    "frequency_penalty": [0.0, 0.5, -0.5],
    "logit_bias": [{}, {3: 2.5, 40: -100.0, 41: 1.0}],
    "allowed_token_ids": [None, [*range(0, VOCAB, 2), EOS]],
    "banned_token_ids": [(), [1, 2, 60]],
    "bad_words": [(), ["a", "bc", "xyz"]],
    "min_tokens": [0, 9],
    "max_tokens": [30, 17],
    "stop": [(), ("ab", "xy", "q")],
    "stop_token_ids": [(), (5, 100)],
    "ignore_eos": [False, True],
    "n": [1, 3],
    "logprobs": [None, 0, 4],
    "prompt_logprobs": [None, 3],
    "structured": [None, StructuredOutput(regex="stands for any")],
}
SURROUNDINGS: dict[str, list[Any]] = {
    "drafter": ["none", "ngram", "oracle", "grammar"],
    "draft_budget": [None, 1, 5, 12],
    "max_num_seqs": [1, 4],
    "token_budget": [512, 23],
    "num_blocks": [64, 11],
}
PLAIN = {"drafter": "none", "draft_budget": None, "max_num_seqs": 1, "token_budget": 512, "num_blocks": 64}


def _cases() -> list[dict[str, Any]]:
    factors = PARAMETERS | SURROUNDINGS
    random.seed(4)
    return [dict(zip(factors, case, strict=True)) for case in AllPairs(list(factors.values()))]


CASES = _cases()


def test_the_cases_hold_every_pair() -> None:
    factors = PARAMETERS | SURROUNDINGS
    names = list(factors)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            found = {(repr(case[first]), repr(case[second])) for case in CASES}
            assert len(found) == len(factors[first]) * len(factors[second])


@pytest.fixture(scope="module")
def target() -> Target:
    config, tensors = tiny_model("llama", 11, kinds="Q4_0+Q8_0")
    backend = NativeBackend(threads=2)
    program = decoder_program(config, 512)
    executable = backend.prepare(program, backend.load(tensors))
    return Target(program, executable, backend.new_kv(program.kv, 64), 64, frozenset({EOS}))


@dataclass
class Answer:
    """Everything that may not depend on speculation."""

    request: Request
    text: str = ""
    rows: list[bytes] = field(default_factory=list)  # the logits behind each token

    def key(self) -> tuple[Any, ...]:
        request = self.request
        return request.output, request.finish_reason, request.error, self.text, self.rows, request.logprobs


def _run(
    target: Target,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    case: dict[str, Any],
    truth: dict[int, list[int]],
) -> list[Answer]:
    drafter: Drafter | None = {
        "none": None,
        "ngram": NgramDrafter(2),
        "oracle": Oracle(truth, np.random.default_rng(7)),
        "grammar": GrammarDrafter(),
    }[case["drafter"]]
    answers: dict[int, Answer] = {}

    def watch(request: Request, rows: Sequence[np.ndarray]) -> None:
        answers[request.id].rows += [row.tobytes() for row in rows]

    pool = Target(target.program, target.executable, target.kv, case["num_blocks"], target.eos_ids)
    engine = Engine(
        pool,
        drafter,
        case["draft_budget"],
        max_num_seqs=case["max_num_seqs"],
        token_budget=case["token_budget"],
        texts=Letters(),
        watch=watch,
    )
    for prompt in prompts:
        answers |= {request.id: Answer(request) for request in engine.add(prompt, params)}
    while engine.busy:
        for update in engine.step():
            answers[update.request.id].text += update.text
        engine.check()
    assert engine.drafting.failures == 0
    assert engine.stats().kv_usage == 0
    return list(answers.values())


@pytest.mark.parametrize("index", range(len(CASES)))
def test_nothing_changes(target: Target, index: int) -> None:
    case = CASES[index]
    params = SamplingParams(seed=100 + index, **{name: case[name] for name in PARAMETERS})
    rng = np.random.default_rng(index)
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist() for _ in range(3)]
    plain = [answer for prompt in prompts for answer in _run(target, [prompt], params, PLAIN, {})]
    truth = {id: answer.request.tokens for id, answer in enumerate(plain)}
    found = _run(target, prompts, params, case, truth)
    assert len(found) == len(plain) == 3 * params.n
    for answer, expected in zip(found, plain, strict=True):
        assert answer.key() == expected.key()
        # The sample that computed the prompt has its log-probabilities.
        assert answer.request.prompt_logprobs == expected.request.prompt_logprobs
        _check_parameters(answer, params)


def test_branches_are_accepted_under_all_these_parameters(target: Target) -> None:
    accepted = 0
    for index, case in enumerate(CASES):
        if case["drafter"] == "oracle" and case["draft_budget"] != 1:
            params = SamplingParams(seed=100 + index, **{name: case[name] for name in PARAMETERS})
            prompt = np.random.default_rng(index).integers(0, VOCAB, 30).tolist()
            plain = _run(target, [prompt], params, PLAIN, {})
            truth = {id: answer.request.tokens for id, answer in enumerate(plain)}
            accepted += sum(answer.request.counts.accepted for answer in _run(target, [prompt], params, case, truth))
    assert accepted > 50


def _check_parameters(answer: Answer, params: SamplingParams) -> None:
    """What can be said of an answer without the model."""
    output, request = answer.request.output, answer.request
    assert len(answer.rows) == len(output) <= 30
    if request.finish_reason == "error":
        assert "no token is left" in str(request.error)
    if params.allowed_token_ids is not None:
        assert set(output) <= set(params.allowed_token_ids)
    assert not set(output) & {*params.banned_token_ids}
    for word in params.bad_words:
        for start in range(len(output)):
            assert [*output[start : start + len(word)]] != Letters().spellings(word)[0]
    if request.finish_reason != "error" and params.structured is None:
        assert len(output) >= min(params.min_tokens, params.max_tokens or 0)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else {EOS})}
        assert not set(output[: params.min_tokens]) & ends
    if params.structured is not None:
        assert all((a + b) % 2 == 0 for a, b in zip([0, *output], output, strict=False))
    assert len(request.logprobs) == (0 if params.logprobs is None else len(output))
    for row, entry, token in zip(answer.rows, request.logprobs, output, strict=False):
        logits = np.frombuffer(row, np.float32).astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert entry.token == token and abs(entry.logprob - expected[token]) < 1e-6
        assert [id for id, _ in entry.top] == np.argsort(-logits, kind="stable")[: params.logprobs].tolist()
        assert all(abs(value - expected[id]) < 1e-6 for id, value in entry.top)
