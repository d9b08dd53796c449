"""Self-speculation: views of the target in its own KV, the split target, and the search for layers to leave out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from layer_loop import BLOCKS, Loop, Running, committed_kv, tiny_host
from pilotfish.backends.native import NativeBackend, choose
from pilotfish.backends.reference import ReferenceBackend
from pilotfish.drafters import layer_skip
from pilotfish.drafters.base import DraftRequest, Host, ModelDrafter, Price
from pilotfish.drafters.layer_match import CHAIN, NEW_TOKENS, TargetText
from pilotfish.drafters.layer_search import EXCHANGES, PATIENCE, ROUNDS, TRIED, Found, expected, kept, search
from pilotfish.drafters.layer_skip import LayerSkipDrafter, parse_layers, searched
from pilotfish.drafters.speculation import parse_speculation
from pilotfish.errors import InputError
from pilotfish.models.split import SplitExecutable, States, fed, headless, rows_of, view
from pilotfish.params import SamplingParams
from pilotfish.program import BLOCK_SIZE
from pilotfish.sampling import probabilities
from pilotfish.tree import DraftTree, Rows, TreeBatch
from tiny import random_tree, tiny_model

if TYPE_CHECKING:
    from pilotfish import LLM

VOCAB = 128
LAYERS = 4
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95)


def small(**more: Any) -> Host:
    return tiny_host(NativeBackend(2), *tiny_model("qwen3", 5, "Q4_K+Q6_K", num_layers=LAYERS, **more))


@pytest.fixture(scope="module")
def host() -> Host:
    return small()


def clear(host: Host) -> None:
    """NaN into every slot: whatever reads one that was never written shows it."""
    kv: Any = host.kv
    for layer in range(host.program.kv.layers):
        kv.keys(layer)[:] = 0x7E00
        kv.values(layer)[:] = 0x7E00


def three(params: SamplingParams = GREEDY) -> list[Running]:
    """Prompts that end before, at and behind the end of a block; their blocks lie anywhere."""
    rng = np.random.default_rng(3)
    tables = rng.permutation(BLOCKS)[:30].reshape(3, 10).tolist()
    lengths = (15, 17, 40)
    return [
        Running(id, rng.integers(0, VOCAB, count).tolist(), table, params, seed=id + 7)
        for id, (count, table) in enumerate(zip(lengths, tables, strict=True))
    ]


def run(host: Host, drafter: Any, steps: int, params: SamplingParams = GREEDY, **options: Any) -> list[Running]:
    clear(host)
    loop = Loop(host, drafter, **options)
    running = three(params)
    loop.prefill(running)
    for _ in range(steps):
        loop.step(running)
    running[0].loop = loop  # type: ignore[attr-defined]
    return running


def plain(host: Host, like: list[Running], params: SamplingParams) -> list[Running]:
    """Plain decoding until every request has as many tokens."""
    clear(host)
    loop = Loop(host, None)
    running = three(params)
    loop.prefill(running)
    for one, other in zip(running, like, strict=True):
        while len(one.tokens) < len(other.tokens):
            loop.step([one])
    return running


# ---- options


@pytest.mark.parametrize(
    ("text", "layers"), [("3", (3,)), ("8-10", (8, 9, 10)), ("20/8-10/0", (0, 8, 9, 10, 20)), ("5-5", (5,))]
)
def test_lists_of_layers(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1,2", "1/", "-1", "1-", "2-1", "1/1", "1-3/2", "1--2", "99999", "１"])
def test_bad_lists_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_layers(text)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("layer-skip", {}),
        ("layer-skip:auto", {"search": "auto"}),
        ("layer-skip:auto,k=3", {"search": "auto"}),
        ("layer-skip:exit=3", {"exit": 3}),
        ("layer-skip:skip=1/2-3,k=2", {"skip": "1/2-3"}),
    ],
)
def test_the_argument(text: str, options: dict[str, object]) -> None:
    assert dict(parse_speculation(text).parts[0].options) == options


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layer-skip:exit=0", "exit=0 must lie in 1"),
        ("layer-skip:exit=x", "whole number"),
        ("layer-skip:skip=3-1", "ends before it begins"),
        ("layer-skip:skip=a", "as in 8-15/20"),
        ("layer-skip:8", "exit=E or skip=LIST"),
        ("layer-skip:depth=3", "no option 'depth'"),
    ],
)
def test_a_bad_argument_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_speculation(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layer-skip:exit=4", "exit=4 must lie in 1..3; the model has 4 layers"),
        ("layer-skip:skip=2-4", "must name layers in 0..3; the model has 4"),
        ("layer-skip:skip=0-3", "leaves none of the model's 4 layers"),
        ("layer-skip:exit=1,skip=1", "give one of"),
        ("layer-skip:auto,exit=1", "give one of"),
    ],
)
def test_what_the_model_can_not_do_is_refused(host: Host, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_speculation(text).parts[0].make(host)


def test_without_a_model_or_layers_to_skip_there_is_no_drafter(host: Host) -> None:
    part = parse_speculation("layer-skip:exit=1").parts[0]
    with pytest.raises(InputError, match="no model"):
        part.make(None)
    with pytest.raises(InputError, match="has 1 layer"):
        part.make(replace(host, config=replace(host.config, num_layers=1)))
    drafter = part.make(host)
    assert isinstance(drafter, LayerSkipDrafter) and isinstance(drafter, ModelDrafter)
    assert drafter.layers == (0,)
    skipping = parse_speculation("layer-skip:skip=1/3").parts[0].make(host)
    assert isinstance(skipping, LayerSkipDrafter) and skipping.layers == (0, 2)


# ---- what it drafts


def ask(one: Running, budget: int, **more: Any) -> DraftRequest:
    return DraftRequest(one.id, one.tokens, budget, budget, blocks=one.blocks, params=one.params, seed=one.seed, **more)


def twin_chain(host: Host, layers: list[int], one: Running, drafted: list[int], count: int) -> list[tuple[int, float]]:
    """Tokens and their probabilities, each from KV made anew: the target's, then the view's from the last token on."""
    program = view(host.config, host.program, layers)
    executable = host.backend.prepare(program, host.weights)
    found: list[tuple[int, float]] = []
    for _ in range(count):
        kv: Any = host.backend.new_kv(host.program.kv, BLOCKS)
        end = len(one.tokens) - 1
        host.executable.forward(TreeBatch.build([Rows(one.tokens[:end], 0, one.blocks, logits=False)]), kv, False)
        drafts = [*drafted, *(token for token, _ in found)]
        result = executable.forward(TreeBatch.build([Rows([one.tokens[-1], *drafts], end, one.blocks)]), kv, True)
        assert result.logits is not None
        row = result.logits[-1]
        token = choose(row, one.params, one.seed, end + 1 + len(drafts))
        shifted = row.astype(np.float64) - row.max()
        found.append((token, float(np.exp(shifted[token]) / np.exp(shifted).sum())))
    return found


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("layers", [[0, 1], [0, 2, 3], [1, 3]])
def test_drafts_are_what_the_view_decodes_behind_the_targets_kv(
    host: Host, layers: list[int], params: SamplingParams
) -> None:
    clear(host)
    running = three(params)
    Loop(host, None).prefill(running)
    drafter = LayerSkipDrafter(host, layers)
    trees = drafter.propose([ask(running[0], 4), ask(running[1], 2), ask(running[2], 3, drafted=[9, 8])])
    for one, tree, drafted, count in zip(running, trees, ([], [], [9, 8]), (4, 2, 3), strict=True):
        tree.check(VOCAB)
        want = twin_chain(host, layers, one, drafted, count)
        assert tree.tokens.tolist() == [token for token, _ in want]
        assert tree.parents.tolist() == list(range(-1, count - 1))
        np.testing.assert_allclose(tree.confidences, [chance for _, chance in want], rtol=1e-5)
        assert drafter.backlog(ask(one, 1)) == 0
    # All requests are in one batch for each pass, and those that are done leave it.
    assert [batch.num_requests for batch, _ in drafter.passes] == [3, 3, 2, 1]
    assert [batch.num_rows for batch, _ in drafter.passes] == [5, 3, 2, 1]
    assert all(ms > 0 for _, ms in drafter.passes)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("layers", [[0, 1, 2], [0, 2, 3]])
def test_committed_kv_and_logits_are_those_of_plain_decoding(
    host: Host, layers: list[int], params: SamplingParams
) -> None:
    """Also where the tree that is verified is not what was drafted: cut, grafted, or with branches."""
    rng = np.random.default_rng(8)

    def change(tree: DraftTree) -> DraftTree:
        cut = tree.first(int(rng.integers(0, len(tree) + 1)))
        return cut.graft(-1, random_tree(rng, 3, VOCAB), 6) if rng.random() < 0.4 else cut

    for cut in (lambda tree: tree, change):
        running = run(host, LayerSkipDrafter(host, layers), 12, params, cut=cut)
        loop: Loop = running[0].loop  # type: ignore[attr-defined]
        assert 0 < loop.accepted < loop.drafted
        found = [committed_kv(host, one) for one in running]
        want = plain(host, running, params)
        for one, other, kv in zip(running, want, found, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_array_equal(one.rows, other.rows)
            for mine, theirs in zip(kv, committed_kv(host, other), strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_slots_end_with_the_blocks_and_the_context(host: Host) -> None:
    clear(host)
    one = Running(0, list(range(14)), [3])
    Loop(host, None).prefill([one])
    drafter = LayerSkipDrafter(host, [0, 1])
    (tree,) = drafter.propose([ask(one, 8)])
    assert len(tree) == 3  # rows in slots 13, 14 and 15
    short = replace(host, program=view(host.config, host.program, range(LAYERS)))
    short = replace(
        short, program=replace(short.program, rope_cos=host.program.rope_cos[:15], rope_sin=host.program.rope_sin[:15])
    )
    (tree,) = LayerSkipDrafter(short, [0, 1]).propose([ask(replace(one, blocks=[3, 4]), 8)])
    assert len(tree) == 2


def test_a_row_that_is_not_finite_ends_the_draft(host: Host) -> None:
    """In a step that computes a prompt there is no KV yet, and the reference shows that as NaN."""
    config, tensors = tiny_model("llama", 5, num_layers=3)
    other = tiny_host(ReferenceBackend(), config, tensors)
    one = Running(0, list(range(20)), [0, 1, 2])
    drafter = LayerSkipDrafter(other, [0, 2])
    assert len(drafter.propose([ask(one, 4)])[0]) == 0
    Loop(other, None).prefill([one])
    assert len(drafter.propose([ask(one, 4)])[0]) == 4


def test_drawn_drafts_carry_their_laws(host: Host) -> None:
    clear(host)
    params = SamplingParams(temperature=0.9, acceptance="ratio")
    running = three(params)
    Loop(host, None).prefill(running)
    layers = [0, 1, 3]
    drafter = LayerSkipDrafter(host, layers)
    trees = drafter.propose([ask(one, 3) for one in running])
    again = LayerSkipDrafter(host, layers).propose([ask(one, 3) for one in running])
    program = view(host.config, host.program, layers)
    executable = host.backend.prepare(program, host.weights)
    for one, tree, other in zip(running, trees, again, strict=True):
        tree.check(VOCAB)
        assert len(tree.laws) == 3 and tree.tokens.tolist() == other.tokens.tolist()
        rows = Rows([one.tokens[-1]], len(one.tokens) - 1, one.blocks, tree)
        logits = executable.forward(TreeBatch.build([rows]), host.kv, True).logits
        assert logits is not None
        for node, law in enumerate(tree.laws):
            want = probabilities(logits[node], params)
            np.testing.assert_array_equal(law, want)
            assert tree.confidences[node] == pytest.approx(float(want @ want))  # tells nothing of the token
    # The draws follow the law: of many seeds, the first token's.
    one, tokens = running[0], []
    for seed in range(400):
        (tree,) = drafter.propose([ask(replace(one, seed=seed), 1)])
        tokens.append(int(tree.tokens[0]))
    law = tree.laws[0]
    assert law is not None
    likely = np.flatnonzero(law > 0.05)
    found = np.bincount(tokens, minlength=VOCAB)[likely] / 400
    assert (np.abs(found - law[likely]) < 4 * np.sqrt(law[likely] / 400)).all()


def test_the_price_ends_a_draft(host: Host) -> None:
    clear(host)
    running = three()
    Loop(host, None).prefill(running)

    def drafts(tokens_per_ms: float, pass_ms: float, row_ms: float, chance: Any) -> tuple[list[int], int]:
        drafter = LayerSkipDrafter(host, [0, 1, 2])
        trees = drafter.propose(
            [ask(one, 6) for one in running], Price(tokens_per_ms, pass_ms, lambda rows: row_ms, chance)
        )
        return [len(tree) for tree in trees], len(drafter.passes)

    assert drafts(1.0, 0.0, 0.0, lambda id, depth, confidence: 1.0) == ([6, 6, 6], 6)
    # A pass costs more than three nodes bring: the first alone is made, since the asker wanted it.
    assert drafts(1.0, 3.0, 0.0, lambda id, depth, confidence: 0.9) == ([1, 1, 1], 1)
    # The chances of 0.5 halve with each depth: 3 of 0.25 pay for a pass of 0.7, 3 of 0.125 do not.
    assert drafts(1.0, 0.7, 0.0, lambda id, depth, confidence: 0.5) == ([2, 2, 2], 2)
    # A drawn token stays: whether it does must not depend on it. The draft ends behind it.
    drawn = [replace(one, params=SamplingParams(temperature=1.0, acceptance="ratio")) for one in running]
    price = Price(1.0, 0.0, lambda rows: 0.5, lambda id, depth, confidence: 0.4)
    trees = LayerSkipDrafter(host, [0, 1, 2]).propose([ask(one, 6) for one in drawn], price)
    assert [len(tree) for tree in trees] == [1, 1, 1]
    # Behind a node that would not pay for its row nothing is drafted, the requests with better chances go on.
    assert drafts(1.0, 0.0, 0.5, lambda id, depth, confidence: 0.4 if id == 1 else 1.0) == ([6, 1, 6], 6)


# ---- the split target


@pytest.mark.parametrize("backend", [NativeBackend(2), ReferenceBackend()], ids=["native", "reference"])
def test_a_fed_program_goes_on_where_another_was_tapped(backend: Any) -> None:
    kinds = "Q4_K+Q6_K" if isinstance(backend, NativeBackend) else "F32"
    host = tiny_host(backend, *tiny_model("qwen2", 6, kinds, num_layers=3))
    rng = np.random.default_rng(1)
    rows = Rows(rng.integers(0, VOCAB, 20).tolist(), 0, [4, 1], random_tree(rng, 8, VOCAB), all_logits=True)
    batch = TreeBatch.build([rows])
    whole = host.executable.forward(batch, host.kv, True)
    early = backend.prepare(headless(view(host.config, host.program, range(2), (0, 2))), host.weights)
    late = backend.prepare(fed(view(host.config, host.program, (2,))), host.weights)
    other: Any = backend.new_kv(host.program.kv, BLOCKS)
    result = early.forward(rows_of(batch, np.ones(28, np.bool_)), other, False)
    assert len(result.argmax) == 0 and [tap.shape for tap in result.taps] == [(28, host.config.hidden_size)] * 2
    found = late.forward(batch, other, True, result.taps[1:])
    np.testing.assert_array_equal(found.logits, whole.logits)
    np.testing.assert_array_equal(found.argmax, whole.argmax)
    for feeds in ((), result.taps, (result.taps[0][:-1],), (result.taps[0][:, :-1],)):
        with pytest.raises(ValueError, match="feed"):
            late.forward(batch, other, True, feeds)
    with pytest.raises(ValueError, match="feed"):
        host.executable.forward(batch, other, True, result.taps[:1])


def bits(host: Host) -> list[np.ndarray]:
    kv: Any = host.kv
    return [view.copy() for layer in range(host.program.kv.layers) for view in (kv.keys(layer), kv.values(layer))]


def check_split(host: Host, rng: np.random.Generator, at: int, vocab: int, cases: int) -> None:
    """Random batches of chunks and trees, of which random rows are known, give the bits of the whole program."""
    split = SplitExecutable(host.config, host.program, at, host.backend, host.weights)
    early = host.backend.prepare(headless(view(host.config, host.program, range(at), (at,))), host.weights)
    for _ in range(cases):
        tables = rng.permutation(host.num_blocks)[:24].reshape(4, 6).tolist()
        prefixes = [rng.integers(0, vocab, int(rng.integers(1, 40))).tolist() for _ in tables]
        chunks = [Rows(tokens, 0, table, logits=False) for tokens, table in zip(prefixes, tables, strict=True)]
        host.executable.forward(TreeBatch.build(chunks), host.kv, False)
        rows = []
        for tokens, table in zip(prefixes, tables, strict=True):
            fresh = rng.integers(0, vocab, int(rng.integers(1, 5))).tolist()
            tree = random_tree(rng, int(rng.integers(0, 9)), vocab)
            rows.append(Rows(fresh, len(tokens), table, tree, all_logits=bool(rng.integers(2))))
        batch = TreeBatch.build(rows)
        whole = host.executable.forward(batch, host.kv, True)
        want = bits(host)
        every = np.ones(batch.num_rows, np.bool_)
        (hidden,) = early.forward(rows_of(batch, every), host.kv, False).taps
        known = np.flatnonzero(rng.random(batch.num_rows) < rng.random()).astype(np.int32)
        # The unknown rows' KV must come from the split's own first half, and all rows' from its second.
        kv: Any = host.kv
        owner = np.repeat(np.arange(4), np.diff(batch.row_starts))
        for row in range(batch.num_rows):
            block, slot = tables[owner[row]][batch.slots[row] // BLOCK_SIZE], batch.slots[row] % BLOCK_SIZE
            for layer in range(at if row in known else 0, host.program.kv.layers):
                kv.keys(layer)[block, :, :, slot] = 0x7E00
                kv.values(layer)[block, :, slot] = 0x7E00
        found = split.forward(batch, host.kv, True, States(known, hidden[known]))
        np.testing.assert_array_equal(found.logits, whole.logits)
        np.testing.assert_array_equal(found.argmax, whole.argmax)
        for mine, theirs in zip(bits(host), want, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_split_target_is_the_whole_target(architecture: Any) -> None:
    rng = np.random.default_rng(17)
    host = tiny_host(NativeBackend(2), *tiny_model(architecture, 9, "Q4_K+Q6_K", num_layers=LAYERS), blocks=32)
    for at in range(1, LAYERS):
        check_split(host, rng, at, VOCAB, cases=8)


def test_a_split_real_model_is_the_whole_model(smollm2: LLM) -> None:
    target = smollm2.target
    backend = NativeBackend(2)
    kv = backend.new_kv(target.program.kv, 40)
    executable = backend.prepare(target.program, smollm2.weights)
    host = Host(smollm2.config, target.program, executable, smollm2.weights, kv, 40, backend, smollm2.tokenizer, 8)
    check_split(host, np.random.default_rng(2), 12, smollm2.config.vocab_size, cases=2)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_targets_pass_goes_on_from_the_drafts(host: Host, params: SamplingParams) -> None:
    rng = np.random.default_rng(4)

    def change(tree: DraftTree) -> DraftTree:
        cut = tree.first(int(rng.integers(1, len(tree) + 1)))
        other = random_tree(rng, 2, VOCAB)
        match rng.integers(4):
            case 0:
                return cut.graft(-1, other, 6)
            case 1:
                return other.graft(-1, cut, 6)  # the drafts' rows lie in other slots
            case 2 if len(set(cut.tokens.tolist())) == len(cut):
                return DraftTree(cut.tokens, np.full(len(cut), -1, np.int32))
        return cut

    for cut in (lambda tree: tree, change):
        running = run(host, LayerSkipDrafter(host, [0, 1]), 25, params, cut=cut, split=True)
        loop: Loop = running[0].loop  # type: ignore[attr-defined]
        assert loop.split_passes > 3
        found = [committed_kv(host, one) for one in running]
        for one, other, kv in zip(running, plain(host, running, params), found, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_array_equal(one.rows, other.rows)
            for mine, theirs in zip(kv, committed_kv(host, other), strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_rows_of_other_drafts_are_not_taken_for_known(host: Host) -> None:
    """Every row is right, also those that no rule will ask for."""
    clear(host)
    running = three()
    Loop(host, None).prefill(running)
    drafter = LayerSkipDrafter(host, [0, 1])
    for at in range(5):
        trees = drafter.propose([ask(one, 4) for one in running])
        other = trees[1].tokens.copy()
        other[min(at, 3)] = (other[min(at, 3)] + 1) % VOCAB
        trees[1] = DraftTree(other, trees[1].parents)
        batch = TreeBatch.build(
            [
                Rows(one.tokens[-1:], len(one.tokens) - 1, one.blocks, tree)
                for one, tree in zip(running, trees, strict=True)
            ]
        )
        found = drafter.target_pass(batch, True, [one.id for one in running], trees)
        assert found is not None
        np.testing.assert_array_equal(found.logits, host.executable.forward(batch, host.kv, True).logits)


def test_the_targets_pass_uses_nothing_that_may_be_stale(host: Host) -> None:
    clear(host)
    running = three()
    Loop(host, None).prefill(running)
    drafter = LayerSkipDrafter(host, [0, 1])
    one = running[2]

    def known(rows: Rows, tree: DraftTree) -> bool:
        return drafter.target_pass(TreeBatch.build([rows]), True, [one.id], [tree]) is not None

    end = len(one.tokens)
    (tree,) = drafter.propose([ask(one, 3)])
    rows = Rows(one.tokens[-1:], end - 1, one.blocks, tree)
    assert known(rows, tree) and not known(rows, tree)  # once for each proposal
    (tree,) = drafter.propose([ask(one, 3)])
    assert not known(Rows(one.tokens[-3:], end - 3, one.blocks, tree), tree)  # a chunk that ends a prompt
    (tree,) = drafter.propose([ask(one, 3)])
    assert not known(Rows(one.tokens[-2:-1], end - 2, one.blocks, tree), tree)  # another last token
    drafter.propose([ask(one, 3)])
    drafter.end(one.id)
    assert not known(rows, tree)
    skipping = LayerSkipDrafter(host, [0, 2])
    (tree,) = skipping.propose([ask(one, 3)])
    assert skipping.target_pass(TreeBatch.build([rows]), True, [one.id], [tree]) is None  # not the first layers


# ---- the search


class Planted:
    """A text on which each layer costs agreement of its own, in the order of its influence."""

    def __init__(self, costs: list[float]) -> None:
        self.costs = costs
        self.runs: list[frozenset[int]] = []

    def run(self, skipped: frozenset[int], base: object) -> Any:
        assert base is None if not self.runs else base is not None
        self.runs.append(skipped)
        influence = {layer: cost for layer, cost in enumerate(self.costs) if layer not in skipped}
        return SimpleNamespace(match=max(0.0, 1.0 - sum(self.costs[layer] for layer in skipped)), influence=influence)


def test_the_search_finds_the_layers_that_do_nothing() -> None:
    costs = [0.5] + [0.3] * 10 + [0.5]
    for layer in (3, 4, 8, 9):
        costs[layer] = 0.001
    text = Planted(costs)
    shown: list[float] = []
    found = search(text, len(costs), 1 / 13, shown.append)
    assert found.skipped == (3, 4, 8, 9)
    assert found.match == pytest.approx(0.996)
    assert found.speed_up == expected(4, found.match, 1 / 13)[0] > 1.3
    assert len(text.runs) == len(set(text.runs)) <= 1 + ROUNDS * TRIED + EXCHANGES
    assert shown == sorted(shown) and shown[-1] == 1.0


def test_an_exchange_mends_a_choice() -> None:
    """Layer 1 alone does least, but 2 and 3 go together better than with it."""

    class Coupled(Planted):
        def run(self, skipped: frozenset[int], base: object) -> Any:
            trial = super().run(skipped, base)
            together = {(1,): 0.99, (2,): 0.95, (3,): 0.95, (1, 2): 0.9, (1, 3): 0.9, (2, 3): 1.0}
            trial.match = 1.0 if not skipped else together.get(tuple(sorted(skipped)), 0.1)
            return trial

    assert search(Coupled([0.5, 0.01, 0.02, 0.03, 0.5, 0.5]), 6, 1 / 7).skipped == (2, 3)


@pytest.mark.parametrize("layers", [2, 3, 5, 80])
def test_a_search_ends_and_leaves_layers(layers: int) -> None:
    text = Planted([0.2] * layers)
    found = search(text, layers, 1 / (layers + 1))
    assert 0 < len(found.skipped) < layers
    assert len(text.runs) <= 1 + (1 + PATIENCE) * TRIED + EXCHANGES + TRIED  # nothing gets better
    with pytest.raises(ValueError, match="one layer"):
        search(Planted([0.1]), 1, 0.5)


def test_expected_speed_up_is_leviathans() -> None:
    gain, drafts = expected(5, 0.8, 0.1)  # a draft costs half a pass and a row
    gains = [(1 - 0.8 ** (k + 1)) / (0.2 * (1 + k * 0.52)) for k in range(1, 17)]
    assert gain == pytest.approx(max(gains)) and drafts == 1 + int(np.argmax(gains))
    assert expected(1, 0.0, 0.1) == (pytest.approx(1 / 1.92), 1)


@pytest.mark.parametrize("skipped", [{1}, {2, 3}, {0, 2}, {3}])
def test_the_text_tells_how_often_drafts_are_right(host: Host, skipped: set[int]) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB, count).tolist() for count in (9, 14)]
    text = TargetText(host.config, host.program, host.executable, host.backend, host.weights, prompts)
    base = text.run(frozenset(), None)
    assert base.match == 1.0  # the target is its own best drafter, to the bit
    assert set(base.influence) == set(range(LAYERS)) and all(0 < turn < 2 for turn in base.influence.values())
    found = text.run(frozenset(skipped), None)
    for start in (frozenset[int](), frozenset({1}), frozenset({3})):
        again = text.run(frozenset(skipped), text.run(start, None))
        assert again.match == found.match and again.layers == found.layers
        assert len(again.states) == len(again.layers) + 1
        for mine, theirs in zip(again.states, found.states, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    # The slow twin: each chain on its own, behind KV made anew.
    layers = [layer for layer in range(LAYERS) if layer not in skipped]
    executable = host.backend.prepare(view(host.config, host.program, layers), host.weights)
    right = []
    for prompt in prompts:
        clear(host)
        one = Running(0, list(prompt), list(range(4)))
        loop = Loop(host, None)
        loop.prefill([one])
        for _ in range(NEW_TOKENS):
            loop.step([one])
        for at in range(len(prompt) - 1, len(one.tokens) - 1, CHAIN):
            kv = host.backend.new_kv(host.program.kv, 4)
            chain = one.tokens[at : min(at + CHAIN, len(one.tokens) - 1)]
            if at:
                prefix = Rows(one.tokens[:at], 0, one.blocks, logits=False)
                host.executable.forward(TreeBatch.build([prefix]), kv, False)
            drafts = Rows(chain, at, one.blocks, all_logits=True)
            choices = executable.forward(TreeBatch.build([drafts]), kv, False).argmax
            right += (choices == np.array(one.tokens[at + 1 : at + 1 + len(chain)])).tolist()
    assert found.match == pytest.approx(np.mean(right))


def test_the_result_is_kept_for_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layer_skip, "cache_folder", lambda: tmp_path)
    host = small()
    drafter = LayerSkipDrafter.make(host)
    found = searched(host)
    assert drafter.layers == tuple(layer for layer in range(LAYERS) if layer not in found.skipped)
    (path,) = (tmp_path / "layer-skip").iterdir()
    monkeypatch.setattr(layer_skip, "TargetText", None)  # another search would fail
    assert searched(replace(host, kept={})) == found
    assert LayerSkipDrafter.make(replace(host, kept={}), search="auto").layers == drafter.layers
    # It is for this model: another one has its own.
    with pytest.raises(TypeError):
        searched(small(name="other"))
    content = json.loads(path.read_text())
    for damage in (
        "",
        "[]",
        "{}",
        json.dumps({**content, "key": 1}),
        json.dumps({**content, "found": {}}),
        json.dumps({**content, "found": {**content["found"], "skipped": [LAYERS]}}),
        json.dumps({**content, "found": {**content["found"], "skipped": list(range(LAYERS))}}),
        json.dumps({**content, "found": {**content["found"], "skipped": []}}),
        json.dumps({**content, "found": {**content["found"], "skipped": 7}}),
    ):
        path.write_text(damage)
        with pytest.raises(TypeError):
            searched(replace(host, kept={}))


def test_a_folder_that_can_not_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = Found((1,), 0.5, 1, 0.9)
    assert kept({"a": 1}, 3, blocked / "deeper", lambda: found) == found


def test_a_short_context_has_a_short_text() -> None:
    for context in (2, 5, 20):
        config, tensors = tiny_model("llama", 5, "Q4_K", num_layers=2)
        host = tiny_host(NativeBackend(1), config, tensors, context=context)
        prompts = [list(range(30)), [1]]
        text = TargetText(config, host.program, host.executable, host.backend, host.weights, prompts)
        assert text.run(frozenset(), None).match == 1.0
