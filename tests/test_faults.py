"""Drafters that fail in every way, at random steps: no request fails, and all text is that of plain decoding."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from doubles import VOCAB, Letters
from pilotfish.backends.native import NativeBackend
from pilotfish.drafters.base import DRAFTERS, DraftRequest, Host, Price
from pilotfish.drafters.draft import DraftModelDrafter
from pilotfish.drafters.draft_model import DraftModel
from pilotfish.drafters.speculation import Part, Speculation, drafter_class, parse_speculation
from pilotfish.engine import Engine, Target
from pilotfish.loaders.loaded import LoadedModel
from pilotfish.loaders.tokenizer import TokenizerSource
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams, StructuredOutput
from pilotfish.request import Request
from pilotfish.tree import DraftTree
from tiny import tiny_model

BLOCKS = 12  # so few that requests are preempted
KINDS = sorted(DRAFTERS)
OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": {"n": 2, "min": 1},
    "suffix": {"depth": 8, "shared": 1000, "min": 1},
    "lookahead": {"window": 3, "ngram": 3, "guesses": 2},
    "layer-skip": {"exit": 1},
}

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.9, seed=3),
]


@pytest.fixture(scope="module")
def host() -> Host:
    config, tensors = tiny_model("llama", 11, kinds="Q4_0+Q8_0")
    backend = NativeBackend(threads=1)
    program = decoder_program(config, 512)
    weights = backend.load(tensors)
    kv = backend.new_kv(program.kv, BLOCKS)
    return Host(config, program, backend.prepare(program, weights), weights, kv, BLOCKS, backend, None, 4)


def _make(host: Host, kind: str) -> Any:
    if kind != "draft":
        return drafter_class(kind).make(host, **OPTIONS.get(kind, {}))
    # The target itself with other activations' rounding: often right.
    config, tensors = tiny_model("llama", 11, kinds="Q4_0+Q8_0")
    loaded = LoadedModel(config, tensors, TokenizerSource(), "")
    model = DraftModel.load(loaded, None, host, None, "all", host.program.vocab_size)  # type: ignore[arg-type]
    return DraftModelDrafter(model, branches=2)


def _engine(host: Host, drafter: Any, fixed: int | None = None, blocks: int = BLOCKS, **options: int) -> Engine:
    kv = host.kv if blocks == BLOCKS else host.backend.new_kv(host.program.kv, blocks)
    target = Target(host.program, host.executable, kv, blocks)
    return Engine(target, drafter, fixed, texts=Letters(), token_budget=48, **options)


def _prompts() -> list[list[int]]:
    """Repetitive, two with a beginning in common, one repeated."""
    rng = np.random.default_rng(7)
    start = rng.integers(0, VOCAB, 24).tolist()
    prompts = [[1, 2, 3, 4] * 6, [*start, 9, 8], [*start, 5, 6, 7], rng.integers(0, VOCAB, 11).tolist()]
    return [*prompts, prompts[0]]


@pytest.fixture(scope="module")
def plain(host: Host) -> dict[SamplingParams, list[list[int]]]:
    found = {}
    for params in PARAMS:
        found[params] = []
        for prompt in _prompts():
            engine = _engine(host, None, blocks=32)
            (request,) = engine.add(prompt, params)
            list(engine.run())
            engine.close()
            found[params].append(request.tokens)
    return found


def _run(engine: Engine, params: SamplingParams) -> list[Request]:
    requests = [engine.add(prompt, params)[0] for prompt in _prompts()]
    while engine.busy:
        engine.step()
        engine.check()
        engine.controller.check()
    engine.close()
    pool, cache = engine.scheduler.pool, engine.scheduler.cache
    assert engine.stats().kv_usage == 0 and pool.num_free + len(cache) == pool.num_blocks
    return requests


def _check(requests: Sequence[Request], expected: Sequence[Sequence[int]]) -> None:
    for request, tokens in zip(requests, expected, strict=True):
        assert request.error is None and request.finish_reason == "length" and not request.fault
        assert request.tokens == tokens
        counts = request.counts
        assert 0 <= counts.accepted <= counts.drafted
        assert counts.target_steps + counts.accepted == len(request.output)


def _forever() -> None:
    while True:
        pass


def _swallows() -> None:
    """Handles exceptions, which must not save it."""
    while True:
        with suppress(Exception):
            int("x")


def _raise(what: Exception) -> None:
    raise what


def _changed(change: Callable[[DraftTree], Any]) -> Callable[[list[DraftTree]], list[Any]]:
    """A fault in each tree. Where there is none, it is in one of two drafts."""

    def damage(trees: list[DraftTree]) -> list[Any]:
        return [change(tree if len(tree) else DraftTree.chain([1, 2], "x", [0.5, 0.5])) for tree in trees]

    return damage


def _tokens(tree: DraftTree, dtype: type, value: float) -> DraftTree:
    tokens = tree.tokens.astype(dtype)
    tokens[-1] = value
    return replace(tree, tokens=tokens)


SUM_OF_2 = np.full(VOCAB, 2 / VOCAB)
DAMAGES: dict[str, Callable[[list[DraftTree]], Any]] = {
    "exception": lambda trees: _raise(RuntimeError("out of order")),
    "no memory": lambda trees: _raise(MemoryError()),
    "assertion": lambda trees: _raise(AssertionError()),
    "None": lambda trees: None,
    "one too few": lambda trees: trees[1:],
    "one too many": lambda trees: [*trees, DraftTree.empty()],
    "numbers": lambda trees: [0.5 for _ in trees],
    "a broken iterator": lambda trees: (trees[0] if not i else _raise(OSError("gone")) for i in range(len(trees) + 1)),
    "NaN confidences": _changed(lambda tree: replace(tree, confidences=(float("nan"),) * len(tree))),
    "confidence above 1": _changed(lambda tree: replace(tree, confidences=(1.5,) * len(tree))),
    "too few confidences": _changed(lambda tree: replace(tree, confidences=(0.5,) * (len(tree) + 1))),
    "confidences as an array": _changed(lambda tree: replace(tree, confidences=np.full(len(tree), 0.5))),
    "confidences as text": _changed(lambda tree: replace(tree, confidences=("high",) * len(tree))),
    "names as numbers": _changed(lambda tree: replace(tree, drafters=(1,) * len(tree))),
    "no name": _changed(lambda tree: replace(tree, drafter=None, drafters=())),
    "too few names": _changed(lambda tree: replace(tree, drafters=("x",) * (len(tree) + 1))),
    "NaN tokens": _changed(lambda tree: _tokens(tree, np.float64, np.nan)),
    "two-dimensional": _changed(lambda tree: replace(tree, tokens=tree.tokens[None], parents=tree.parents[None])),
    "tokens as a list": _changed(lambda tree: replace(tree, tokens=tree.tokens.tolist())),
    "shapes differ": _changed(lambda tree: replace(tree, parents=tree.parents[:-1])),
    "token behind the vocabulary": _changed(lambda tree: _tokens(tree, np.int32, VOCAB)),
    "negative token": _changed(lambda tree: _tokens(tree, np.int32, -1)),
    "huge token": _changed(lambda tree: _tokens(tree, np.int64, 2**40)),
    "its own parent": _changed(lambda tree: replace(tree, parents=np.arange(len(tree), dtype=np.int32))),
    "twins": _changed(lambda tree: DraftTree(np.full(2, 3, np.int32), np.full(2, -1, np.int32), "x")),
    "too many nodes": _changed(lambda tree: DraftTree.chain([1] * 100, "x")),
    "laws of another size": _changed(lambda tree: replace(tree, laws=(np.ones(3),) * len(tree))),
    "laws that sum to 2": _changed(lambda tree: replace(tree, laws=(SUM_OF_2,) * len(tree))),
}


def _inject(drafter: Any, damage: Callable[[list[DraftTree]], Any], rng: random.Random, chance: float) -> list[int]:
    """Its proposals are damaged with that chance; returns a list that grows with each time."""
    real, done = drafter.propose, []

    def propose(requests: Sequence[DraftRequest], price: Price | None = None) -> Any:
        trees = real(requests, price)
        if rng.random() >= chance:
            return trees
        done.append(1)
        return damage(trees)

    drafter.propose = propose
    return done


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed drafters come back soon, to fail again."""
    monkeypatch.setattr("pilotfish.team.FIRST_PARK", 1)
    monkeypatch.setattr("pilotfish.team.LONGEST_PARK", 2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("kind", "fixed"), [*((kind, None) for kind in KINDS if kind != "grammar"), ("ngram", 3), ("layer-skip", 3)]
)
def test_damaged_proposals_change_nothing(host: Host, plain: Any, kind: str, fixed: int | None) -> None:
    logging.getLogger("pilotfish").setLevel(logging.CRITICAL)
    rng = random.Random(f"{kind}{fixed}")
    turns = itertools.cycle(PARAMS)
    for name, damage in DAMAGES.items():
        params = next(turns)
        drafter = _make(host, kind)
        engine = _engine(host, drafter, fixed, max_num_seqs=rng.choice([2, 5]))
        done = _inject(drafter, damage, rng, 0.4)
        requests = _run(engine, params)
        _check(requests, plain[params])
        assert done and engine.drafting.failures == engine.stats().drafter_failures >= len(done), name
    logging.getLogger("pilotfish").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("kind", "method", "loop"),
    [
        *((kind, method, _forever) for kind in KINDS if kind != "grammar" for method in ("propose", "end")),
        ("lookahead", "observe", _forever),
        ("draft", "backlog", _forever),
        ("layer-skip", "backlog", _forever),
        ("ngram", "propose", _swallows),
        ("draft", "propose", _swallows),
    ],
)
def test_endless_loops_end(
    host: Host, plain: Any, kind: str, method: str, loop: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    drafter = _make(host, kind)
    engine = _engine(host, drafter, None, max_num_seqs=4)
    engine.drafting._limit_s = 0.4
    calls = 0
    real = getattr(drafter, method)

    def sometimes(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            loop()
        return real(*arguments)

    setattr(drafter, method, sometimes)
    with caplog.at_level(logging.WARNING, logger="pilotfish"):
        _check(_run(engine, PARAMS[1]), plain[PARAMS[1]])
    assert engine.drafting.failures == 1 and calls <= 3, "who did not come back is not asked again"
    assert "it took longer than 0.4 s and is not asked again" in caplog.text


GARBAGE = [-1, None, float("nan"), 0.5, "many", [1]]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["draft", "layer-skip"])
@pytest.mark.parametrize("backlog", GARBAGE, ids=repr)
def test_a_backlog_that_can_not_be(host: Host, plain: Any, kind: str, backlog: object) -> None:
    drafter = _make(host, kind)
    engine = _engine(host, drafter, None, max_num_seqs=4)
    drafter.backlog = lambda request: backlog
    _check(_run(engine, PARAMS[0]), plain[PARAMS[0]])
    assert engine.drafting.failures > 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["draft", "layer-skip"])
@pytest.mark.parametrize("passes", [None, [None], [(None, 1.0)], 7], ids=repr)
def test_passes_that_can_not_be(host: Host, plain: Any, kind: str, passes: object) -> None:
    drafter = _make(host, kind)
    engine = _engine(host, drafter, None, max_num_seqs=4)
    real = drafter.propose

    def propose(requests: Sequence[DraftRequest], price: Price | None = None) -> Any:
        drafter.passes = []
        trees = real(requests, price)
        drafter.passes = passes
        return trees

    drafter.propose = propose
    _check(_run(engine, PARAMS[0]), plain[PARAMS[0]])
    assert engine.drafting.failures > 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grammar"])
def test_observe_backlog_and_end_may_fail(host: Host, plain: Any, kind: str) -> None:
    rng = random.Random(kind)
    failed = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def sometimes(*arguments: Any) -> Any:
            nonlocal failed
            if rng.random() < 0.3:
                failed += 1
                raise ZeroDivisionError
            return real(*arguments)

        return sometimes

    for params in PARAMS * 2:
        drafter, before = _make(host, kind), failed
        for method in ("observe", "backlog", "end"):
            if hasattr(drafter, method):
                setattr(drafter, method, failing(getattr(drafter, method)))
        engine = _engine(host, drafter, None, max_num_seqs=4)
        _check(_run(engine, params), plain[params])
        assert engine.drafting.failures == failed - before
    assert failed


@pytest.mark.usefixtures("impatient")
def test_the_grammar_may_fail_too(host: Host) -> None:
    """What a grammar forces is drafted by a drafter as well."""
    params = SamplingParams(max_tokens=24, structured=StructuredOutput(json_object=True))
    rng = random.Random(1)

    def run(damage: Callable[[list[DraftTree]], Any] | None, drafter: Any) -> list[list[int]]:
        engine = _engine(host, drafter, None, max_num_seqs=4)
        if damage is not None:
            _inject(engine.drafting._grammar.drafter, damage, rng, 0.5)
        requests = _run(engine, params)
        assert all(request.error is None for request in requests)
        return [request.tokens for request in requests]

    expected = run(None, None)
    for damage in (DAMAGES["exception"], DAMAGES["NaN confidences"], DAMAGES["one too few"]):
        assert run(damage, _make(host, "ngram")) == expected


def test_every_drafter_at_once(host: Host, plain: Any) -> None:
    """All kinds in one portfolio, sound and damaged in turn."""
    names = [kind for kind in KINDS if kind != "grammar"]
    damages = [None, *DAMAGES.values()]
    rng = random.Random(9)
    logging.getLogger("pilotfish").setLevel(logging.CRITICAL)
    for turn in range(12):
        order = rng.sample(names, len(names))
        parts = tuple(Part(name, rng.choice([None, 2]), OPTIONS.get(name, {})) for name in order)
        made: dict[str, Any] = {}

        def make(part: Part, made: dict[str, Any] = made) -> Any:
            made[part.method] = _make(host, part.method)
            return made[part.method]

        target = Target(host.program, host.executable, host.kv, BLOCKS)
        engine = Engine(target, speculation=Speculation(parts), make=make, texts=Letters(), token_budget=48)
        for drafter in made.values():
            damage = rng.choice(damages)
            if damage is not None:
                _inject(drafter, damage, rng, 0.2)
        params = PARAMS[turn % 2]
        _check(_run(engine, params), plain[params])
    logging.getLogger("pilotfish").setLevel(logging.NOTSET)


PORTFOLIOS = ["auto", "auto:k=2", "suffix+lookahead", "ngram:k=3+suffix", "lookahead", "layer-skip:exit=1+suffix"]


@pytest.mark.parametrize("text", PORTFOLIOS)
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("seqs", "budget"), [(1, 512), (3, 21), (5, 64)])
def test_portfolios_change_nothing(
    host: Host, plain: Any, text: str, params: SamplingParams, seqs: int, budget: int
) -> None:
    """Chunked prefill, preemption, batches, the prefix cache: the same text, and counts that add up."""
    target = Target(host.program, host.executable, host.kv, BLOCKS)
    engine = Engine(
        target,
        speculation=parse_speculation(text),
        make=lambda part: part.make(host),
        max_num_seqs=seqs,
        token_budget=budget,
        texts=Letters(),
    )
    requests = _run(engine, params)
    _check(requests, plain[params])
    assert engine.drafting.failures == 0
    assert sum(request.counts.drafted for request in requests) > 0
    for request in requests:
        assert request.report is not None
        assert sum(request.report.steps.values()) == request.counts.target_steps
        assert request.report.step_ms > 0 and request.report.plain_ms > 0
        named = {name for key in request.report.steps if key != "plain" for name in key.split("+")}
        assert named == {name for name, counts in request.counts.by_drafter.items() if counts.drafted}
