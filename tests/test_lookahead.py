"""Lookahead: its trees are the paper's mask, its window that of a plain recomputation, its text the target's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from doubles import Letters
from pilotfish.backends.native import NativeBackend
from pilotfish.backends.reference import ReferenceBackend
from pilotfish.drafters.base import DraftRequest, Observer
from pilotfish.drafters.lookahead import LookaheadDrafter, NgramPool
from pilotfish.drafters.speculation import parse_speculation
from pilotfish.engine import Engine, Target
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.program import BLOCK_SIZE, Executable
from pilotfish.tree import DraftTree, Rows, TreeBatch
from tiny import tiny_model

REFERENCE = ReferenceBackend()


class Model:
    """A tiny model, one request of which is decoded step by step with any drafter."""

    def __init__(self) -> None:
        config, tensors = tiny_model("llama", 11)
        self.program = decoder_program(config, 256)
        self.executable: Executable = REFERENCE.prepare(self.program, REFERENCE.load(tensors))

    def choices(self, tokens: Sequence[int], start: int = 0) -> list[int]:
        """The likeliest token after each of the tokens from `start` on, in one pass without drafts."""
        kv = REFERENCE.new_kv(self.program.kv, 16)
        batch = TreeBatch.build([Rows(tokens, 0, range(16), all_logits=True)])
        return self.executable.forward(batch, kv, logits=False).argmax[start:].tolist()

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        """The prompt and the target's own text, one token at a time."""
        kv, tokens, done = REFERENCE.new_kv(self.program.kv, 32), list(prompt), 0
        for _ in range(count):
            batch = TreeBatch.build([Rows(tokens[done:], done, range(32))])
            done = len(tokens)
            tokens.append(int(self.executable.forward(batch, kv, logits=False).argmax[0]))
        return tokens

    def steps(self, drafter: LookaheadDrafter, tokens: list[int], count: int, budget: int = 64) -> Iterator[DraftTree]:
        """Decode until there are `count` tokens more; gives each tree after it was verified and observed."""
        kv, done, end = REFERENCE.new_kv(self.program.kv, 32), 0, len(tokens) + count
        blocks, prompt = range(32), len(tokens)
        while len(tokens) < end:
            depth = max(1, end - len(tokens) - 1)
            (tree,) = drafter.propose([DraftRequest(0, tokens, budget, depth, prompt=prompt)])
            tree.check(self.program.vocab_size)
            assert len(tree) <= budget and tree.depths().max(initial=0) <= depth
            batch = TreeBatch.build([Rows(tokens[done:], done, blocks, tree)])
            said = self.executable.forward(batch, kv, logits=False).argmax
            path, node = [], -1
            while (child := tree.child(node, int(said[node + 1]))) is not None:
                path.append(child)
                node = child
            if path:
                kv.move(blocks, [len(tokens) + n for n in path], [len(tokens) + depth for depth in range(len(path))])
            done = len(tokens) + len(path)
            drafter.observe(0, tree, said)
            yield tree
            tokens += [int(said[n + 1]) for n in (-1, *path)][: end - len(tokens)]
            drafter.check()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def _prompt(seed: int, count: int = 12) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(count)]


def _mask_rows(columns: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int]], np.ndarray, list[int]]:
    """The window as the paper lays it out: (level, column) of each row, what each sees, positions behind the text."""
    rows = [(level, column) for level in range(len(columns[0])) for column in range(len(columns))]
    mask = np.zeros((len(rows), len(rows)), bool)
    for row, (level, column) in enumerate(rows):
        for other, (its_level, its_column) in enumerate(rows):
            if its_level == 0:
                mask[row, other] = its_column <= column
            else:
                mask[row, other] = its_column == column and its_level <= level
    return rows, mask, [level + column for level, column in rows]


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(5, 3, 3), (4, 4, 2), (1, 2, 1), (7, 2, 0), (3, 5, 4)])
def test_window_and_ngrams_equal_a_recomputation_with_the_mask(
    model: Model, window: int, ngram: int, guesses: int
) -> None:
    drafter = LookaheadDrafter(window, ngram, guesses)
    tokens = _prompt(window)
    full = compared = 0
    before: list[list[int]] = []
    said: list[int] = []
    length = len(tokens)
    for _ in model.steps(drafter, tokens, 60):
        if len(tokens) > 40:  # not to where the end cuts the window
            break
        kept = drafter._requests[0]
        columns = [list(column) for column in kept.columns]
        assert len(columns) == window
        if before:
            # Last step's answers are the lowest level; level 0 fell away if they made ngram levels.
            grown = [[*column, output] for column, output in zip(before, said, strict=True)]
            gone = len(tokens) - length
            if len(grown[0]) == ngram:
                grown, gone = [column[1:] for column in grown], gone - 1
            expected = grown[gone:]
            assert columns[: len(expected)] == expected
            assert all(len(column) == len(grown[0]) for column in columns)
            compared += len(expected)
        rows, mask, positions = _mask_rows(columns)
        said = []
        for row, (level, column) in enumerate(rows):
            seen = sorted((positions[other], rows[other]) for other in np.flatnonzero(mask[row]))
            # What a row sees are tokens at positions without a gap: a text of its own, computed as such.
            assert [position for position, _ in seen] == list(range(level + column + 1))
            text = [*tokens, *(columns[its][at] for _, (at, its) in seen)]
            if level == len(columns[0]) - 1:
                said.append(model.choices(text, len(text) - 1)[0])
        assert kept.outputs == said
        if len(columns[0]) == ngram - 1 and guesses:
            full += 1
            for column, output in list(zip(columns, said, strict=True))[-guesses:]:
                assert (*column[1:], output) in [rest for rest, _ in kept.pool.guesses(column[0])]
        before, length = columns, len(tokens)
    assert compared > 3
    assert full or not guesses


def test_the_tree_has_the_rows_of_the_mask() -> None:
    """Paths, positions and visible slots of the tree batch are those of the mask."""
    drafter = LookaheadDrafter(4, 4, 2)
    tokens = [1, 2, 3, 1, 2, 9, 7]
    drafter.propose([DraftRequest(0, tokens, 64, 64)])
    kept = drafter._requests[0]
    kept.columns = [[10 * column + level + 20 for level in range(3)] for column in range(4)]
    kept.length += 1
    tokens += [2]
    (tree,) = drafter.propose([DraftRequest(0, tokens, 64, 64)])
    assert len(tree) == 2 * 3 + 4 * 3
    assert tree.tokens.tolist()[:6] == [9, 7, 2, 3, 1, 2]  # the pool's n-grams, the latest first
    batch = TreeBatch.build([Rows(tokens, 0, range(4), tree)])
    rows, mask, positions = _mask_rows(kept.columns)
    place = {kept.columns[column][level]: row for row, (level, column) in enumerate(rows)}
    for node in range(6, len(tree)):
        row, at = place[int(tree.tokens[node])], len(tokens) + node
        assert batch.positions[at] == len(tokens) + positions[row]
        first, stop = batch.path_starts[at], batch.path_starts[at + 1]
        path = batch.path_slots[first:stop].tolist() or list(range(len(tokens), batch.positions[at] + 1))
        assert {place[int(batch.tokens[slot])] for slot in path} == set(np.flatnonzero(mask[row]).tolist())


def test_equal_siblings_are_one_node() -> None:
    drafter = LookaheadDrafter(3, 3, 2)
    tokens = [5, 6, 5, 6, 5, 6]
    drafter.propose([DraftRequest(0, tokens, 64, 64)])
    kept = drafter._requests[0]
    kept.columns = [[5, 6], [6, 5], [5, 7]]
    tokens += [5]
    kept.length += 1
    (tree,) = drafter.propose([DraftRequest(0, tokens, 64, 64)])
    tree.check(128)
    # The guess 6 5 apart: 5 - 6 - 5 - 7 is the whole window, as (1, 0) is (0, 1) and (1, 1) is (0, 2).
    assert tree.tokens.tolist() == [6, 5, 5, 6, 5, 7]
    assert tree.parents.tolist() == [-1, 0, -1, 2, 3, 4]


@pytest.mark.parametrize("budget", [1, 2, 5, 8, 16, 64])
def test_the_window_shrinks_to_the_budget(model: Model, budget: int) -> None:
    tokens = _prompt(3) * 2
    plain = model.plain(tokens, 20)
    drafter = LookaheadDrafter(20, 4, 3)
    sizes = [len(tree) for tree in model.steps(drafter, tokens, 20, budget)]
    assert tokens == plain
    assert max(sizes) > budget / 2


@pytest.mark.parametrize("seed", range(4))
def test_writes_the_same_and_takes_fewer_steps(model: Model, seed: int) -> None:
    tokens = _prompt(seed)
    plain = model.plain(tokens, 100)
    steps = sum(1 for _ in model.steps(LookaheadDrafter(), tokens, 100))
    assert tokens == plain
    assert steps < 100


def test_goes_on_when_another_tree_was_verified() -> None:
    drafter = LookaheadDrafter(3, 3, 2)
    tokens = [1, 2, 3]
    (tree,) = drafter.propose([DraftRequest(0, tokens, 64, 64)])
    kept = drafter._requests[0]
    start = [list(column) for column in kept.columns]
    # A column that is missing, and those below it, have no output; the rest counts.
    pruned = tree.first(1)
    drafter.observe(0, pruned, np.array([50, 60], np.int32))
    assert kept.outputs == [60, None, None]
    tokens += [50]
    drafter.propose([DraftRequest(0, tokens, 64, 64)])
    assert kept.columns[0][0] == start[1][0]  # there was no level to fall away: one token, one column
    drafter.observe(0, DraftTree.chain([99]), np.array([51, 52], np.int32))
    assert kept.outputs is None
    before = [list(column) for column in kept.columns]
    drafter.observe(0, tree, np.full(1 + len(tree), 7, np.int32))  # of a step that it did not draft for
    assert kept.outputs is None
    tokens += [51, 52]
    drafter.propose([DraftRequest(0, tokens, 64, 64)])
    assert kept.columns[:1] == before[2:]
    drafter.observe(5, tree, np.array([1], np.int32))  # unknown
    drafter.check()
    drafter.end(0)
    drafter.end(0)
    assert not drafter._requests


def test_rows_without_a_finite_logit_teach_nothing() -> None:
    drafter = LookaheadDrafter(3, 2, 2)
    (tree,) = drafter.propose([DraftRequest(0, [1, 2, 3], 64, 64)])
    size = drafter._requests[0].pool.size
    drafter.observe(0, tree, np.full(1 + len(tree), -1, np.int32))
    assert drafter._requests[0].outputs is None and drafter._requests[0].pool.size == size


def test_behind_drafts_only_guesses() -> None:
    drafter = LookaheadDrafter(4, 3, 2)
    tokens = [1, 2, 3, 9, 8, 2]
    (tree,) = drafter.propose([DraftRequest(0, tokens, 64, 64, drafted=[1])])
    assert tree.tokens.tolist() == [2, 3] and not drafter._requests[0].waits
    (tree,) = drafter.propose([DraftRequest(0, tokens, 64, 64, drafted=[77])])
    assert len(tree) == 0


def test_confidences_follow_what_stood() -> None:
    drafter = LookaheadDrafter(0, 2, 3)
    good, bad = [1, 2] * 3, [5, 6, 5, 7, 5]
    drafter.propose([DraftRequest(0, good, 4, 4), DraftRequest(1, bad, 4, 4)])
    for step in range(12):
        good.append(1 if good[-1] == 2 else 2)
        bad += [100 + step, 5]
        trees = drafter.propose([DraftRequest(0, good, 4, 4), DraftRequest(1, bad, 4, 4)])
    assert trees[0].confidences[0] > 0.8 > 0.3 > trees[1].confidences[0]
    assert sum(trees[1].confidences) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_the_pool_is_bounded_and_forgets_the_oldest(seed: int) -> None:
    rng = random.Random(seed)
    each, most = rng.choice([0, 1, 3]), rng.choice([1, 5, 40])
    pool = NgramPool(each, most)
    history: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(400):
        first, rest = rng.randrange(12), (rng.randrange(3), rng.randrange(2))
        pool.add(first, rest)
        history.append((first, rest))
        pool.check()
        latest = list(dict.fromkeys(rest for other, rest in reversed(history) if other == first))
        found = [rest for rest, _ in pool.guesses(first)]
        assert found == latest[: len(found)] and len(found) <= each
        if each:
            assert found and pool.latest(first) == rest[0]
    assert pool.size <= most
    assert pool.guesses(99) == [] and pool.latest(99) is None


def test_options() -> None:
    speculation = parse_speculation("lookahead:window=7,ngram=4,guesses=2")
    drafter = speculation.parts[0].make(None)
    assert isinstance(drafter, LookaheadDrafter) and isinstance(drafter, Observer)
    assert drafter.WHOLE
    default = parse_speculation("lookahead").parts[0].make(None)
    (tree,) = default.propose([DraftRequest(0, list(range(50)), 64, 64)])
    assert 0 < len(tree) <= 16


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("num_blocks", [64, 14], ids=["roomy", "preempting"])
def test_the_engine_writes_the_same(temperature: float, num_blocks: int) -> None:
    config, tensors = tiny_model("llama", 11, kinds="Q4_0+Q8_0")
    backend = NativeBackend(threads=2)
    program = decoder_program(config, 512)
    executable = backend.prepare(program, backend.load(tensors))
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, top_k=4)
    texts: list[list[list[int]]] = []
    for drafter in (None, LookaheadDrafter()):
        target = Target(program, executable, backend.new_kv(program.kv, num_blocks), num_blocks)
        engine = Engine(target, drafter, 16, texts=Letters(), max_num_seqs=4)
        requests = [engine.add(_prompt(seed) * 3, params)[0] for seed in range(5)]
        while engine.busy:
            engine.step()
            engine.check()
            if drafter is not None:
                drafter.check()
        assert engine.drafting.failures == 0
        texts.append([list(request.tokens) for request in requests])
        if drafter is not None:
            assert sum(request.counts.accepted for request in requests) > 0
            assert not drafter._requests
    assert texts[0] == texts[1]
    assert BLOCK_SIZE * num_blocks > 96
