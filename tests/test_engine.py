"""The step loop: the same tokens whatever is drafted, however requests are batched, chunked or preempted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from doubles import Letters, Oracle
from pilotfish.backends.native import NativeBackend
from pilotfish.drafters.base import Drafter, DraftRequest, Price
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.engine import Engine, Target, Update
from pilotfish.errors import InputError
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.quant import Tensor
from pilotfish.request import Request
from pilotfish.tree import DraftTree
from tiny import tiny_model

VOCAB = 128


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest) -> Target:
    return _target(request.param)


def _target(architecture: str = "llama", num_blocks: int = 64) -> Target:
    config, tensors = tiny_model(architecture, 11, kinds="Q4_0+Q8_0")  # type: ignore[arg-type]
    backend = NativeBackend(threads=2)
    program = decoder_program(config, 512)
    weights = backend.load(tensors)
    return Target(program, backend.prepare(program, weights), backend.new_kv(program.kv, num_blocks), num_blocks)


def _run(
    target: Target,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    drafter: Drafter | None = None,
    **options: int,
) -> tuple[list[Request], list[Update]]:
    engine = Engine(target, drafter, 12, texts=Letters(), **options)
    requests = [engine.add(prompt, params)[0] for prompt in prompts]
    updates = []
    while engine.busy:
        updates += engine.step()
        engine.check()
    _assert_free(engine)
    return requests, updates


def _assert_free(engine: Engine) -> None:
    """Nobody holds a block; what is cached could be given up."""
    pool = engine.scheduler.pool
    assert engine.stats().kv_usage == 0 and pool.num_free + len(engine.scheduler.cache) == pool.num_blocks


def _prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, int(rng.integers(1, longest))).tolist() for _ in range(count)]


def _plain(target: Target, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    """One request at a time, no drafts, whole prompts: what everything else must equal."""
    return [_run(target, [prompt], params)[0][0] for prompt in prompts]


PARAMS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=1.0, seed=5),
    SamplingParams(max_tokens=40, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=6),
]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_batches_and_chunks_change_nothing(target: Target, params: SamplingParams, seed: int) -> None:
    prompts = _prompts(seed, 6)
    plain = _plain(target, prompts, params)
    oracle = Oracle({id: request.tokens for id, request in enumerate(plain)}, np.random.default_rng(seed))
    requests, updates = _run(target, prompts, params, oracle, max_num_seqs=4, token_budget=37)
    for request, expected in zip(requests, plain, strict=True):
        assert request.tokens == expected.tokens
        assert request.finish_reason == expected.finish_reason == "length"
        emitted = [token for update in updates if update.request is request for token in update.tokens]
        assert emitted == request.output
        assert 0 <= request.counts.accepted <= request.counts.drafted
        assert request.counts.target_steps + request.counts.accepted == len(request.output)
    assert sum(request.counts.accepted for request in requests) > 10, "the oracle's branches were never accepted"
    assert sorted(oracle.ended) == list(range(6))


@pytest.mark.parametrize("params", PARAMS[:2], ids=["greedy", "sampled"])
def test_preemption_changes_nothing(params: SamplingParams) -> None:
    target = _target(num_blocks=9)
    prompts = _prompts(3, 5, longest=60)
    plain = _plain(_target(), prompts, params)
    oracle = Oracle({id: request.tokens for id, request in enumerate(plain)}, np.random.default_rng(1))
    engine = Engine(target, oracle, 6, max_num_seqs=5, token_budget=64)
    requests = [engine.add(prompt, params)[0] for prompt in prompts]
    preempted = 0
    schedule = engine.scheduler.schedule

    def counting(*arguments):  # type: ignore[no-untyped-def]
        nonlocal preempted
        plan = schedule(*arguments)
        preempted += len(plan.preempted)
        return plan

    engine.scheduler.schedule = counting  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
        engine.check()
    assert preempted > 0
    assert [request.tokens for request in requests] == [request.tokens for request in plain]


def test_ngram_repeats_are_accepted(target: Target) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8] * 6]
    params = SamplingParams(max_tokens=60)
    plain = _plain(target, prompts, params)
    requests, _ = _run(target, prompts, params, NgramDrafter())
    assert requests[0].tokens == plain[0].tokens
    assert requests[0].counts.by_drafter["ngram"].drafted > 0


@pytest.mark.parametrize("seed", range(4))
def test_stops_cut_inside_accepted_drafts(target: Target, seed: int) -> None:
    """Whatever ends a request, it ends at the token and letter where plain decoding ends it."""
    prompts = _prompts(seed + 50, 4)
    free = _plain(target, prompts, SamplingParams(max_tokens=40, temperature=1.0, seed=seed))
    letters = "".join(Letters().push(token) for token in free[0].output)
    for params in (
        SamplingParams(max_tokens=40, temperature=1.0, seed=seed, stop=(letters[7:9], letters[20:23])),
        SamplingParams(max_tokens=40, temperature=1.0, seed=seed, stop_token_ids=(free[0].output[9],)),
        SamplingParams(max_tokens=13, temperature=1.0, seed=seed),
    ):
        plain = [_run(target, [prompt], params) for prompt in prompts]
        oracle = Oracle({id: request.tokens for id, request in enumerate(free)}, np.random.default_rng(seed))
        requests, updates = _run(target, prompts, params, oracle)
        for request, (expected, expected_updates) in zip(requests, plain, strict=True):
            assert request.tokens == expected[0].tokens
            assert request.finish_reason == expected[0].finish_reason
            text = "".join(update.text for update in updates if update.request is request)
            assert text == "".join(update.text for update in expected_updates)
            assert not any(stop in text for stop in params.stop)


def test_eos_ends_unless_ignored(target: Target) -> None:
    prompt = _prompts(9, 1)[0]
    params = SamplingParams(max_tokens=20)
    free = _plain(target, [prompt], params)[0]
    eos = free.output[5]
    ending = Target(target.program, target.executable, target.kv, target.num_blocks, frozenset({eos}))
    stopped = _plain(ending, [prompt], params)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.output == free.output[: free.output.index(eos) + 1]
    ignored = _plain(ending, [prompt], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert ignored.tokens == free.tokens


def test_the_context_is_the_limit(target: Target) -> None:
    context = target.program.context_length
    prompt = [1] * (context - 5)
    params = SamplingParams(max_tokens=None)
    plain = _plain(target, [prompt], params)[0]
    assert len(plain.tokens) == context and plain.finish_reason == "length"
    requests, _ = _run(target, [prompt], params, NgramDrafter())
    assert requests[0].tokens == plain.tokens


class _Bad:
    """A drafter that does one thing wrong."""

    name = "bad"

    def __init__(self, propose: Callable[[Sequence[DraftRequest]], object]) -> None:
        self._propose = propose

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        return self._propose(requests)  # type: ignore[return-value]

    def end(self, id: int) -> None:
        raise RuntimeError("and it can not even end")


def _fail(requests: Sequence[DraftRequest]) -> object:
    raise RuntimeError("out of order")


@pytest.mark.parametrize(
    "propose",
    [
        _fail,
        lambda requests: None,
        lambda requests: [],
        lambda requests: [DraftTree.chain([VOCAB]) for _ in requests],
        lambda requests: [DraftTree.chain([-1]) for _ in requests],
        lambda requests: [DraftTree.chain([1] * 13) for _ in requests],
        lambda requests: [DraftTree(np.array([1, 2]), np.array([1, 0])) for _ in requests],
        lambda requests: [DraftTree(np.array([1, 1]), np.array([-1, -1])) for _ in requests],
        lambda requests: [DraftTree(np.array([np.nan]), np.array([-1])) for _ in requests],
        lambda requests: [float("nan") for _ in requests],
    ],
)
def test_a_drafter_can_fail_a_request_can_not(
    target: Target, propose: Callable[[Sequence[DraftRequest]], object], caplog: pytest.LogCaptureFixture
) -> None:
    prompts = _prompts(4, 2)
    params = SamplingParams(max_tokens=10)
    engine = Engine(target, _Bad(propose), 12, texts=Letters())
    requests = [engine.add(prompt, params)[0] for prompt in prompts]
    with caplog.at_level(logging.WARNING, logger="pilotfish"):
        for _ in engine.run():
            engine.check()
    assert engine.drafting.failures >= 1  # this one can not even end a request
    assert "drafter bad failed: it is parked for 64 steps" in caplog.text
    assert [request.tokens for request in requests] == [request.tokens for request in _plain(target, prompts, params)]
    assert all(request.counts.drafted == 0 for request in requests)


def test_cancel_frees_everything(target: Target) -> None:
    engine = Engine(target)
    first, second = (engine.add(prompt, SamplingParams(max_tokens=30))[0] for prompt in _prompts(5, 2))
    engine.step()
    engine.cancel(first)
    engine.cancel(first)
    engine.check()
    for _ in engine.run():
        engine.check()
    assert second.finish_reason == "length" and first.finish_reason is None
    _assert_free(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_damaged_target_is_reported(temperature: float) -> None:
    config, tensors = tiny_model("llama", 3)
    data = tensors["norm"].data.copy()
    data.view(np.float32)[:] = np.nan
    tensors["norm"] = Tensor("F32", tensors["norm"].shape, data)
    backend = NativeBackend(threads=1)
    program = decoder_program(config, 64)
    target = Target(program, backend.prepare(program, backend.load(tensors)), backend.new_kv(program.kv, 8), 8)
    engine = Engine(target)
    request = engine.add([1, 2], SamplingParams(temperature=temperature))[0]
    (update,) = engine.step()
    assert update.finished and request.finish_reason == "error" and request.fault
    assert "finite" in str(request.error)
    _assert_free(engine)


def test_seeds(target: Target) -> None:
    prompt = _prompts(6, 1)[0]
    sample = SamplingParams(max_tokens=20, temperature=1.0)
    first, second = _plain(target, [prompt], sample)[0], _plain(target, [prompt], sample)[0]
    assert first.seed != second.seed and first.tokens != second.tokens
    again = SamplingParams(max_tokens=20, temperature=1.0, seed=first.seed)
    assert _plain(target, [prompt], again)[0].tokens == first.tokens


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "the prompt is empty"),
        ([1] * 512, SamplingParams(), "the prompt has 512 tokens; the context of 512 must leave room"),
        ([1, VOCAB], SamplingParams(), "token id 128; the vocabulary has ids 0..127"),
        ([-1], SamplingParams(), "token id -1"),
        ([1], SamplingParams(stop=("x",)), "stop strings, bad words and structured output need a tokenizer"),
    ],
)
def test_bad_requests(target: Target, prompt: list[int], params: SamplingParams, message: str) -> None:
    engine = Engine(target)
    with pytest.raises(InputError, match=message):
        engine.add(prompt, params)
    assert not engine.busy
