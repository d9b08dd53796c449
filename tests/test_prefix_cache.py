"""Prefixes that are cached, samples that share, requests with their own speculation, and faults: the bits stay."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from doubles import VOCAB, EvenSum, Letters, Oracle
from pilotfish.backends.native import NativeBackend
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.drafters.speculation import Part, Speculation, parse_request_speculation, parse_speculation
from pilotfish.engine import Engine, Target
from pilotfish.errors import InputError, RequestError
from pilotfish.history import Grammar
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams, StructuredOutput
from pilotfish.request import Request
from tiny import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    config, tensors = tiny_model("qwen2", 12, kinds="Q4_0+Q8_0")
    backend = NativeBackend(threads=2)
    program = decoder_program(config, 512)
    return Target(program, backend.prepare(program, backend.load(tensors)), backend.new_kv(program.kv, 64), 64)


class Rows:
    """Every row of logits behind a token, by request."""

    def __init__(self) -> None:
        self.of: dict[int, list[bytes]] = {}

    def __call__(self, request: Request, rows: Sequence[np.ndarray]) -> None:
        self.of.setdefault(request.id, []).extend(row.tobytes() for row in rows)


def _alone(target: Target, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[bytes]]:
    rows = Rows()
    engine = Engine(target, watch=rows)
    (request,) = engine.add(prompt, params)
    for _ in engine.run():
        pass
    return request.output, rows.of[request.id]


@pytest.mark.parametrize("seed", range(6))
def test_a_hit_changes_no_bit(target: Target, seed: int) -> None:
    """Later turns and prefixes that part inside blocks, in any order, with drafts, chunks and little KV."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for _ in range(24):
        base = prompts[int(rng.integers(len(prompts)))] if prompts and rng.random() < 0.8 else []
        kept = base[: int(rng.integers(0, len(base) + 1))]
        prompts.append([*kept, *rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()][:150])
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=seed, frequency_penalty=0.2)
    plain = [_alone(target, prompt, params) for prompt in prompts]
    truth = {id: [*prompt, *output] for id, (prompt, (output, _)) in enumerate(zip(prompts, plain, strict=True))}
    rows = Rows()
    small = Target(target.program, target.executable, target.kv, 30, target.eos_ids)
    engine = Engine(small, Oracle(truth, rng), 6, max_num_seqs=4, token_budget=48, watch=rows)
    requests: list[Request] = []
    for prompt in prompts:
        requests += engine.add(prompt, params)
        for _ in range(int(rng.integers(0, 4))):
            if engine.busy:
                engine.step()
                engine.check()
    for _ in engine.run():
        engine.check()
    assert engine.scheduler.cache.hit_tokens > 100 and sum(request.cached_tokens for request in requests) > 100
    for request, (output, expected) in zip(requests, plain, strict=True):
        assert request.output == output
        assert rows.of[request.id] == expected


def test_the_next_turn_computes_only_what_is_new(target: Target) -> None:
    engine = Engine(target)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 100).tolist()
    (first,) = engine.add(prompt, SamplingParams(max_tokens=20))
    for _ in engine.run():
        pass
    (second,) = engine.add([*first.tokens, 1, 2, 3], SamplingParams(max_tokens=4))
    engine.step()
    # All but the last output token have KV; what lies beyond whole blocks is copied.
    assert second.cached_tokens >= 112 and engine.last_step is not None
    assert engine.last_step.rows == len(second.prompt) - second.cached_tokens
    stats = engine.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (223, second.cached_tokens)


def test_log_probabilities_of_a_cached_prompt_are_computed(target: Target) -> None:
    engine = Engine(target)
    prompt = list(range(60))
    for _ in range(2):
        (request,) = engine.add(prompt, SamplingParams(max_tokens=2, prompt_logprobs=1))
        for _ in engine.run():
            pass
        assert len(request.prompt_logprobs) == 59 and request.cached_tokens == 0


def test_each_request_has_its_own_speculation(target: Target) -> None:
    engine = Engine(target, NgramDrafter(2), 4, texts=Letters())
    prompt = [1, 2, 3, 4, 5, 6] * 6
    params = SamplingParams(max_tokens=24)
    wishes = [None, "off", "auto", "ngram:k=1", {"method": "ngram", "num_speculative_tokens": 7}]
    requests = [
        engine.add(prompt, params, speculation=None if wish is None else parse_request_speculation(wish))[0]
        for wish in wishes
    ]
    most = [0] * len(requests)
    drafted = [0] * len(requests)
    while engine.busy:
        engine.step()
        engine.check()
        for index, request in enumerate(requests):
            most[index] = max(most[index], request.counts.drafted - drafted[index])
            drafted[index] = request.counts.drafted
    assert len({tuple(request.tokens) for request in requests}) == 1
    assert most[0] == 4 and most[1] == 0 and most[2] > 0 and most[3] == 1 and most[4] == 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fast", "no drafter 'fast'"),
        ({"method": 3}, "with a method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must lie in 1..64"),
        ({"method": "ngram", "foo": 1}, "field 'foo' is not supported"),
        ({"latency_target_ms_per_token": 0}, "latency_target_ms_per_token is 0"),
        ({"latency_target_ms_per_token": True}, "latency_target_ms_per_token is True"),
    ],
)
def test_bad_speculation_of_a_request(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_request_speculation(value)


def test_speculation_of_a_request() -> None:
    asked = parse_request_speculation({"method": "ngram", "latency_target_ms_per_token": 40})
    assert asked == Speculation((Part("ngram", None, {"n": 4}),), latency_target_ms=40)
    assert parse_request_speculation({"latency_target_ms_per_token": 40}).parts == parse_speculation("auto").parts
    assert parse_request_speculation({"method": "off"}) == Speculation()


def test_a_latency_target_bounds_the_prompts_beside_it(target: Target) -> None:
    def rows(wish: dict[str, Any]) -> list[int]:
        engine = Engine(target, token_budget=256)
        engine.add([1, 2], SamplingParams(max_tokens=30), speculation=parse_request_speculation(wish))
        for _ in range(3):
            engine.step()
        engine.add(list(range(VOCAB)) * 3, SamplingParams(max_tokens=2))
        found = []
        while engine.busy:
            engine.step()
            assert engine.last_step is not None
            found.append(engine.last_step.rows)
        return found

    assert max(rows({"method": "off"})) == 256
    assert max(rows({"method": "off", "latency_target_ms_per_token": 1e-3})[:5]) <= 17


def test_a_fault_ends_the_requests_it_hit_and_no_others(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    class Stumbles:
        def __init__(self, executable: Any) -> None:
            self.executable, self.passes = executable, 0

        def forward(self, *arguments: Any) -> Any:
            self.passes += 1
            if self.passes == 3:
                raise RuntimeError("out of order")
            return self.executable.forward(*arguments)

    broken = Target(target.program, Stumbles(target.executable), target.kv, target.num_blocks)
    engine = Engine(broken, max_num_seqs=2)
    params = SamplingParams(max_tokens=6)
    requests = [engine.add([5, 6, at], params)[0] for at in range(4)]
    with caplog.at_level(logging.ERROR, logger="pilotfish"):
        while engine.busy:
            engine.step()
            engine.check()
    assert [request.finish_reason for request in requests] == ["error", "error", "length", "length"]
    assert requests[0].fault and requests[0].error == "RuntimeError: out of order" and "2 requests end" in caplog.text
    for request in requests[2:]:
        assert request.output == _alone(target, list(request.prompt), params)[0]
    assert engine.stats().running == engine.stats().waiting == 0


class Exhausted(EvenSum):
    """A grammar that reaches a limit of its parser after some tokens: nothing but its length works then."""

    def _check(self) -> None:
        if len(self.tokens) > 4:
            raise RequestError("the parser is exhausted")

    def mask(self) -> np.ndarray:
        self._check()
        return super().mask()

    def legal(self, tokens: Sequence[int]) -> int:
        self._check()
        return super().legal(tokens)

    def forced(self) -> list[int]:
        self._check()
        return super().forced()

    def copy(self) -> Exhausted:
        return Exhausted(self.vocab, self.tokens)


def test_a_grammar_at_its_limit_ends_its_request_and_no_other(target: Target) -> None:
    class Texts(Letters):
        def grammar(self, structured: StructuredOutput) -> Grammar:
            return Exhausted(VOCAB)

    prompt = [1, 2, 3, 4, 5, 6] * 6
    engine = Engine(target, NgramDrafter(2), 4, texts=Texts())
    params = SamplingParams(max_tokens=12, structured=StructuredOutput(regex="any"), banned_token_ids=[5])
    (limited,) = engine.add(prompt, params)
    (other,) = engine.add(prompt, SamplingParams(max_tokens=12))
    for _ in engine.run():
        engine.check()
    assert limited.finish_reason == "error" and not limited.fault and limited.error == "the parser is exhausted"
    assert other.finish_reason == "length" and other.output == _alone(target, prompt, SamplingParams(max_tokens=12))[0]


def test_a_request_that_is_refused_leaves_nothing(target: Target) -> None:
    small = Target(target.program, target.executable, target.kv, 2, target.eos_ids)
    engine = Engine(small)
    for speculation in (None, parse_request_speculation("ngram")):
        with pytest.raises(InputError, match="tokens of KV cache"):
            engine.add([1] * 20, SamplingParams(max_tokens=100), speculation=speculation)
    assert not engine.busy and not engine.drafting._teams
    engine.check()
