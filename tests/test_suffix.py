"""The suffix drafter and its store of places against brute force over the raw tokens, and that memory is bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from doubles import Letters
from pilotfish.backends.native import NativeBackend
from pilotfish.drafters import places as places_module
from pilotfish.drafters import suffix
from pilotfish.drafters.base import Drafter, DraftRequest
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.drafters.places import WINDOWS, Places, Text, hashes_of
from pilotfish.drafters.reliability import Reliability
from pilotfish.drafters.suffix import SuffixDrafter
from pilotfish.engine import Engine, Target
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.request import Request
from pilotfish.tree import DraftTree
from tiny import tiny_model

Found = list[tuple[int, list[int], int]]


def _slow_find(known: Sequence[tuple[list[int], int]], context: list[int], ahead: int, least: int) -> Found:
    """The rule, said plainly. `known`: (text, at) in the order of coming."""
    for window in WINDOWS:
        found: Found = []
        for tokens, at in reversed(known):
            length = 0
            while length < min(at, len(context)) and tokens[at - 1 - length] == context[-1 - length]:
                length += 1
            if length >= window >= least and at < len(tokens) + ahead:
                found.append((length, tokens, at))
        if found:
            return found[: places_module.PLACES]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_places_are_found_as_by_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(places_module, "TRIES", 10**6)
    letters, capacity = rng.choice([1, 2, 4, 100_000]), rng.choice([None, 1, 2, 9, 50])
    store = Places(capacity)
    texts = [Text([]) for _ in range(3)]
    known: list[tuple[list[int], int]] = []
    sizes = set()
    for step in range(150):
        writer = rng.randrange(3)
        if rng.random() < 0.05:
            texts[writer] = Text([])
        tokens = texts[writer].tokens
        assert isinstance(tokens, list)
        for _ in range(rng.randint(1, 3)):
            tokens.append(rng.randrange(letters))
            known.append((tokens, len(tokens)))
        store.take_in(texts[writer])
        known = known[-capacity:] if capacity else known
        assert store.size == len(known)
        context = tokens[-rng.randint(1, 12) :]
        ahead, least = rng.choice([0, 0, 1]), rng.choice([1, 1, 3, 8])
        found = store.find(context, hashes_of(context), ahead, least)
        assert found == _slow_find(known, context, ahead, least)
        sizes.add(len(found))
        if step % 10 == 0:
            store.check()
    assert len(sizes) > 1


def test_tables_grow() -> None:
    rng = random.Random(3)
    for capacity in (None, 5000):
        store, text = Places(capacity), Text([rng.randrange(300) for _ in range(900)])
        store.take_in(text)
        before = len(store._latest[0])
        for _ in range(4):
            text.tokens = [*text.tokens, *(rng.randrange(300) for _ in range(1500))]
            store.take_in(text)
            store.check()
        assert len(store._latest[0]) > before and len(store._latest[0]) >= store.size
    assert len(Places(expected=3000)._latest[0]) >= 3000


def test_check_finds_wrong_chains() -> None:
    store = Places()
    store.take_in(Text([1, 2, 1, 2, 3]))
    store.check()
    store._earlier[2][3] = 0
    with pytest.raises(AssertionError):
        store.check()


def test_many_windows_of_one_hash_take_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "_MIX", 0)  # all hashes are one
    rng = random.Random(5)
    store, text = Places(), Text([rng.randrange(500) for _ in range(2000)])
    store.take_in(text)
    found = store.find([9], hashes_of([9]))
    assert len(found) <= places_module.PLACES
    assert all(len(text.tokens) - at <= places_module.TRIES for _, _, at in found)


# -- the drafter -------------------------------------------------------------------------------------------------------


def _places_of(texts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    return [(tokens, at) for tokens in texts for at in range(1, len(tokens) + 1)]


def _slow_continuations(
    own: list[int], pool: list[tuple[list[int], int]], request: DraftRequest, depth: int
) -> Iterator[tuple[float, int, list[int]]]:
    """Weight, length of the context and tokens of everything that the tree is made of."""
    drafted = list(request.drafted)
    context = [*own, *drafted][-depth:]
    count = min(request.budget, request.max_depth)
    found = _slow_find(_places_of([own]), context, len(drafted), 1)
    least = max((window for window in WINDOWS if any(length >= window for length, _, _ in found)), default=1)
    for length, _, at in found:
        rest = [*own, *drafted]
        while len(rest) < at + count:
            rest.append(rest[at - len(own) - len(drafted)])
        yield suffix.OWN * 2.0 ** min(length, suffix.DOUBLINGS), length, rest[at : at + count]
    if any(length >= suffix.SURE for length, _, _ in found):
        return
    for length, tokens, at in _slow_find(pool, context, 0, least):
        yield 2.0 ** min(length, suffix.DOUBLINGS), length, tokens[at : at + count]


def _slow_nodes(
    found: list[tuple[float, int, list[int]]], chances: Sequence[float], least: float
) -> dict[tuple[int, ...], tuple[float, float]]:
    """path -> (confidence, probability) of all nodes that may be drafted."""
    nodes: dict[tuple[int, ...], tuple[float, float]] = {}
    shares = {(): 1.0}
    for path in sorted({tuple(rest[:end]) for _, _, rest in found for end in range(1, len(rest) + 1)}, key=len):
        parent, depth = path[:-1], len(path)
        if parent and parent not in nodes:
            continue
        through = [(weight, length) for weight, length, rest in found if tuple(rest[:depth]) == path]
        going = sum(w for w, _, rest in found if tuple(rest[: depth - 1]) == parent and len(rest) >= depth)
        part = sum(weight for weight, _ in through) / going
        confidence = part * chances[max(length for _, length in through) + depth - 1]
        probability = confidence * (nodes[parent][1] if parent else 1.0)
        shares[path] = shares[parent] * part
        if shares[path] >= least and probability >= suffix.FLOOR:
            nodes[path] = confidence, probability
    return nodes


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("seed", range(30))
def test_draws_the_best_tree_over_random_operations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(places_module, "TRIES", 10**6)
    monkeypatch.setattr(suffix, "TEXT", rng.choice([7, 1000]))
    monkeypatch.setattr(suffix, "SURE", rng.choice([5, 16]))
    letters, depth, least = rng.choice([2, 3, 6]), rng.randint(4, 12), rng.choice([0.0123, 0.0987, 0.3371])
    shared = rng.choice([0, 7, 40, 1000])
    drafter = SuffixDrafter(depth, shared)
    drafter._least = least  # no fraction of small numbers: rounding decides nothing
    running: dict[int, tuple[int, list[int]]] = {}
    sizes = set()
    for step in range(40):
        if len(running) < 3 and rng.random() < 0.4:
            prompt = rng.randint(1, 12)
            running[step] = prompt, [rng.randrange(letters) for _ in range(prompt + rng.choice([0, 0, 5]))]
        for _, tokens in running.values():
            tokens += [rng.randrange(letters) for _ in range(rng.randint(0, 3))]
        if running and rng.random() < 0.1:
            gone = rng.choice(list(running))
            drafter.end(gone)
            del running[gone]
        requests = [
            DraftRequest(
                id,
                tokens,
                rng.randint(1, 9),
                rng.randint(1, 9),
                prompt=prompt,
                drafted=[rng.randrange(letters) for _ in range(rng.choice([0, 0, 1, 3]))],
            )
            for id, (prompt, tokens) in running.items()
        ]
        trees = drafter.propose(requests)
        drafter.check()
        pool: list[tuple[list[int], int]] = []
        if drafter.pool is not None:
            numbers = range(drafter.pool._oldest, drafter.pool.count + 1)
            slots = [number % shared for number in numbers]
            pool = [(list(drafter.pool._texts[slot].tokens), drafter.pool._ats[slot]) for slot in slots]
        for request, tree in zip(requests, trees, strict=True):
            tree.check(letters)
            found = list(_slow_continuations(list(request.tokens), pool, request, depth))
            chances = drafter._requests[request.id].reliability.chances
            nodes = _slow_nodes(found, chances, least)
            paths = _paths(tree)
            assert len(tree) == min(request.budget, len(nodes))
            assert all(
                nodes[path][0] == pytest.approx(said) for path, said in zip(paths, tree.confidences, strict=True)
            )
            best = sorted((probability for _, probability in nodes.values()), reverse=True)[: len(tree)]
            assert sorted((nodes[path][1] for path in paths), reverse=True) == pytest.approx(best)
            sizes.add(len(tree))
    assert len(sizes) > 3


def test_memory_is_bounded() -> None:
    rng = random.Random(2)
    drafter = SuffixDrafter(shared=500)
    assert drafter.pool is not None
    for id in range(40):
        tokens = [rng.randrange(50)]
        drafter.propose([DraftRequest(id, tokens, 4, 4, prompt=1)])
        tokens += [rng.randrange(rng.choice([2, 50])) for _ in range(rng.choice([20, 700]))]
        drafter.end(id)
        assert drafter.pool.size <= 500
        assert len(drafter.pool._texts) <= 500 and all(len(chain) <= 500 for chain in drafter.pool._earlier)
    assert drafter.pool.size == 500
    assert len(drafter.pool._latest[0]) <= 4 * 500
    assert not drafter._requests
    drafter.check()


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_loop_is_drafted_beyond_its_end(period: int) -> None:
    drafter = SuffixDrafter()
    tokens = list(range(period)) * 2
    for _ in range(150):
        (tree,) = drafter.propose([DraftRequest(0, tokens, 12, 12, prompt=1)])
        assert tree.tokens.tolist() == [(len(tokens) + i) % period for i in range(12)]
        tokens += tree.tokens.tolist()


def _draft(
    drafter: SuffixDrafter,
    tokens: list[int],
    budget: int = 4,
    depth: int = 9,
    id: int = 0,
    prompt: int = 99,
    drafted: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    request = DraftRequest(id, tokens, budget, depth, prompt=min(prompt, len(tokens)), drafted=drafted)
    (tree,) = drafter.propose([request])
    assert not tree.laws and (not len(tree) or tree.drafter == "suffix")
    return tree.tokens.tolist(), tree.parents.tolist()


def test_trees() -> None:
    drafter = SuffixDrafter()
    assert _draft(drafter, [1, 2, 3, 4, 1, 2], 3) == ([3, 4, 1], [-1, 0, 1])
    assert _draft(drafter, [1, 2, 3, 4, 1, 2], 3, depth=1) == ([3], [-1])
    assert _draft(drafter, [5, 6, 7], id=1) == ([], [])
    # After 1 came 2 twice and 3 once: a third is not enough for 34 percent.
    text = [1, 2, 8, 5, 1, 3, 9, 6, 1, 2, 8, 7, 1]
    assert _draft(SuffixDrafter(min=34), text, 9, depth=2) == ([2, 8], [-1, 0])
    tokens, parents = _draft(SuffixDrafter(), text, 9, depth=1)
    assert (tokens, parents) == ([2, 3], [-1, -1])
    # The longer context counts for more than two shorter ones.
    assert _draft(drafter, [3, 1, 5, 1, 4, 1, 4, 3, 1], 1, id=2) == ([5], [-1])


def test_what_follows_drafts() -> None:
    drafter = SuffixDrafter()
    text = [1, 2, 3, 4, 5, 6, 9, 1]
    assert _draft(drafter, text, 3, drafted=[2, 3]) == ([4, 5, 6], [-1, 0, 1])
    assert _draft(drafter, text, 2, drafted=[8, 8]) == ([], [])  # drafts are no places
    assert _draft(drafter, text, 2) == ([2, 3], [-1, 0])
    assert _draft(drafter, [*text, 8], 2) == ([], [])  # the 8 was only a draft


def test_outputs_are_shared_and_prompts_are_not() -> None:
    drafter = SuffixDrafter()
    first = [7, 8, 9]
    assert _draft(drafter, first, prompt=3) == ([], [])
    first += [1, 2, 3, 4]
    _draft(drafter, first, prompt=3)
    assert _draft(drafter, [7, 8], id=1) == ([], [])
    assert _draft(drafter, [5, 1, 2], id=2)[0] == [3, 4]  # while the other request runs
    first += [6]  # by the step that ended it
    drafter.end(0)
    drafter.end(0)
    assert _draft(drafter, [5, 1, 2], id=3)[0] == [3, 4, 6]
    late = SuffixDrafter()
    _draft(late, [7, 8, 1, 2, 3, 4], prompt=2)  # first asked when there is output already
    assert _draft(late, [5, 7], id=1) == ([], [])
    assert _draft(late, [5, 1, 2], id=2)[0] == [3, 4]
    alone = SuffixDrafter(shared=0)
    _draft(alone, [7, 1, 2, 3], prompt=1)
    assert _draft(alone, [5, 1, 2], id=1) == ([], []) and alone.pool is None


def test_confidences_learn_and_tell_long_contexts_from_short_ones() -> None:
    fresh = Reliability().chances
    assert fresh == sorted(fresh) and 0 < fresh[1] < fresh[32] < 1
    wrong, right = Reliability(), Reliability()
    for _ in range(100):
        wrong.learn(2, [5, 6], [7])
        right.learn(2, [5, 6], [5, 6])
    assert wrong.chances[2] < 0.1 and right.chances[2] > 0.9
    assert right.chances[3] > fresh[3] and wrong.chances[3] == fresh[3]  # after the first token the context is longer
    for _ in range(10_000):
        right.learn(2, [5], [7])
    assert right.chances[2] < 0.1  # what was long ago is forgotten
    drafter = SuffixDrafter()
    tokens = [4, 1, 2, 3, 9, 8, 2, 3]
    (before,) = drafter.propose([DraftRequest(0, tokens, 1, 1, prompt=8)])
    assert before.tokens.tolist() == [9]
    tokens += [7, 1, 2, 3]
    (after,) = drafter.propose([DraftRequest(0, tokens, 1, 1, prompt=8)])
    assert after.confidences[0] > before.confidences[0]  # three tokens of context instead of two


def _accepted(drafter: Drafter, prompt: list[int], output: list[int], budget: int = 8) -> int:
    """Accepted drafts of a request whose output is known."""
    tokens, end = list(prompt), len(prompt) + len(output)
    truth = prompt + output
    accepted = 0
    while (left := end - len(tokens) - 1) > 0:
        (tree,) = drafter.propose([DraftRequest(0, tokens, budget, left, prompt=len(prompt))])
        node, stood = -1, 0
        while (child := tree.child(node, truth[len(tokens) + stood])) is not None:
            node, stood = child, stood + 1
        tokens += truth[len(tokens) : len(tokens) + stood + 1]
        accepted += stood
    return accepted


@pytest.mark.parametrize("seed", range(6))
def test_accepts_at_least_what_ngram_does(seed: int) -> None:
    rng = random.Random(seed)
    sentences = [[rng.randrange(300) for _ in range(rng.randint(4, 15))] for _ in range(12)]
    prompt = [token for _ in range(40) for token in rng.choice(sentences)]
    for output in (
        [token for _ in range(20) for token in rng.choice(sentences)],
        prompt[50:250],
        prompt[-7:] * 25,
        [*prompt[20:90], 299, *prompt[91:160]],
    ):
        assert _accepted(SuffixDrafter(), prompt, output) >= _accepted(NgramDrafter(), prompt, output) > 0


def _target(num_blocks: int = 64) -> Target:
    config, tensors = tiny_model("llama", 11, kinds="Q4_0+Q8_0")
    backend = NativeBackend(threads=2)
    program = decoder_program(config, 512)
    executable = backend.prepare(program, backend.load(tensors))
    return Target(program, executable, backend.new_kv(program.kv, num_blocks), num_blocks)


def _run(target: Target, drafter: Drafter | None, params: SamplingParams, **options: int) -> list[Request]:
    engine = Engine(target, drafter, 6, texts=Letters(), **options)
    rng = random.Random(4)
    prompts = [[rng.randrange(128) for _ in range(rng.randint(3, 9))] * 4 for _ in range(5)]
    requests = [engine.add(prompt, params)[0] for prompt in prompts]
    while engine.busy:
        engine.step()
        engine.check()
    assert engine.drafting.failures == 0
    return requests


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("num_blocks", [64, 11], ids=["roomy", "preempting"])
def test_the_engine_writes_the_same(temperature: float, num_blocks: int) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, top_k=4)
    plain = _run(_target(), None, params)
    target = _target(num_blocks)
    drafter = SuffixDrafter()
    for again in range(2):
        requests = _run(target, drafter, params, max_num_seqs=4, token_budget=40)
        assert [request.tokens for request in requests] == [request.tokens for request in plain]
        assert not drafter._requests
        drafted, accepted = (sum(getattr(r.counts, name) for r in requests) for name in ("drafted", "accepted"))
        assert drafted > 0
        if again:  # the pool has it all, in the order in which it was written
            assert accepted > drafted / 2
    drafter.check()
