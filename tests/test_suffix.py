"""The suffix drafter against brute-force counting over the raw tokens, and that its memory is bounded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from doubles import Letters
from pilotfish.backends.native import NativeBackend
from pilotfish.drafters import suffix
from pilotfish.drafters.base import Drafter, DraftRequest
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.drafters.suffix import Pool, SuffixAutomaton, SuffixDrafter, Text
from pilotfish.engine import Engine, Target
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.request import Request
from tiny import tiny_model

Texts = Sequence[Sequence[int]]
Tree = tuple[list[int], list[int]]  # tokens and parents


def _occurrences(texts: Texts, context: Sequence[int]) -> int:
    size = len(context)
    return sum(list(text[i : i + size]) == list(context) for text in texts for i in range(len(text) - size + 1))


def _followers(texts: Texts, context: Sequence[int]) -> Counter[int]:
    size = len(context)
    return Counter(
        text[i + size] for text in texts for i in range(len(text) - size) if list(text[i : i + size]) == list(context)
    )


def _slow_tree(texts: Texts, context: list[int], budget: int, max_depth: int, least: float) -> tuple[float, Tree]:
    """Expected acceptances, tokens and parents of the best tree after a context, by looking at everything."""
    tokens: list[int] = []
    parents: list[int] = []
    score = 0.0
    open_nodes: list[tuple[float, int, int, list[int], int]] = []
    node, probability, depth = -1, 1.0, 0
    while True:
        if depth < max_depth:
            while context and not _followers(texts, context):
                context = context[1:]
            followers = _followers(texts, context) if context else Counter[int]()
            for token, count in followers.items():
                chance = probability * (count / sum(followers.values()))
                if len(followers) < suffix.SUCCESSORS and chance >= least:
                    open_nodes.append((-chance, token, node, [*context, token], depth + 1))
        if not open_nodes or len(tokens) == budget:
            return score, (tokens, parents)
        best = min(open_nodes, key=lambda item: item[:3])
        open_nodes.remove(best)
        probability, node, depth, context = -best[0], len(tokens), best[4], best[3]
        tokens.append(best[1])
        parents.append(best[2])
        score += probability


def _slow(sources: Sequence[Texts], request: DraftRequest, depth: int, least: float) -> Tree:
    """The rule, said plainly: of the trees after the longest contexts of each source, the one with the best score."""
    most, tree = 0.0, ([], [])
    for texts in sources:
        seen = tried = 0
        for length in range(min(depth, len(request.tokens)), 0, -1):
            context = list(request.tokens[-length:])
            occurrences = _occurrences(texts, context)
            if not _followers(texts, context) or occurrences == seen or tried == suffix.CONTEXTS:
                continue  # a context that occurs at the same places is the same
            seen, tried = occurrences, tried + 1
            score, found = _slow_tree(texts, context, request.budget, request.max_depth, least)
            if score > most + suffix.TIE:
                most, tree = score, found
    return tree


def _cut(tokens: Sequence[int]) -> list[list[int]]:
    """The texts that a request's own tokens are cut into."""
    texts: list[list[int]] = []
    full = True
    for token in tokens:
        if full:
            texts.append([])
        texts[-1].append(token)
        counts = {_occurrences(texts, texts[-1][i:]) for i in range(len(texts[-1]))}
        full = len(counts) >= suffix.TEXT_SUFFIXES
    return texts


@pytest.mark.parametrize("seed", range(30))
def test_equals_brute_force_over_random_operations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(suffix, "TEXT_SUFFIXES", rng.choice([4, 8, 100]))
    monkeypatch.setattr(suffix, "SUCCESSORS", rng.choice([3, 64]))
    letters, depth, least = rng.choice([2, 3, 6]), rng.randint(4, 9), rng.choice([1, 10, 34])
    drafter = SuffixDrafter(depth, rng.choice([0, 7, 40, 1000]), least)
    running: dict[int, list[int]] = {}
    sizes = set()
    for step in range(40):
        if len(running) < 3 and rng.random() < 0.4:
            running[step] = [rng.randrange(letters) for _ in range(rng.randint(1, 12))]
        for tokens in running.values():
            tokens += [rng.randrange(letters) for _ in range(rng.randint(0, 3))]
        if running and rng.random() < 0.1:
            gone = rng.choice(list(running))
            drafter.end(gone)
            del running[gone]
        requests = [DraftRequest(id, tokens, rng.randint(1, 9), rng.randint(1, 9)) for id, tokens in running.items()]
        trees = drafter.propose(requests)
        drafter.check()
        pool = [list(text.tokens) for text in drafter.pool.texts]
        for request, tree in zip(requests, trees, strict=True):
            tree.check(letters)
            expected = _slow([_cut(request.tokens), pool], request, depth, least / 100)
            assert (tree.tokens.tolist(), tree.parents.tolist()) == expected
            sizes.add(len(tree))
    assert len(sizes) > 3


@pytest.mark.parametrize("seed", range(20))
def test_the_pool_counts_exactly_and_evicts_the_oldest_first(seed: int) -> None:
    rng = random.Random(seed)
    letters, capacity = rng.choice([1, 2, 4]), rng.choice([1, 2, 9, 50])
    pool = Pool(capacity)
    texts: list[Text | None] = [None] * 3
    begun: list[Text] = []
    for step in range(150):
        writer = rng.randrange(3)
        if rng.random() < 0.05:
            texts[writer] = None
        text = texts[writer] = pool.append(texts[writer], rng.randrange(letters))
        assert text is not None
        if text not in begun:
            begun.append(text)
        assert pool.size == min(step + 1, capacity)
        assert list(pool.texts) == begun[len(begun) - len(pool.texts) :]
        assert not any(other.tokens for other in begun[: len(begun) - len(pool.texts)])
        if step % 5 == 0:
            pool.check()
    pool.check()


def test_a_removed_text_leaves_nothing() -> None:
    rng = random.Random(1)
    automaton = SuffixAutomaton()
    texts = []
    for _ in range(20):
        texts.append(Text())
        while len(texts[-1].tokens) < 40 and not texts[-1].full:
            automaton.append(texts[-1], rng.randrange(3))
    automaton.check(texts)
    rng.shuffle(texts)  # in any order
    while texts:
        while texts[-1].tokens:
            automaton.remove(texts[-1])
        texts.pop()
        automaton.check(texts)
    assert automaton.num_states == 1


def test_contexts_with_the_same_places_come_once() -> None:
    automaton, kept, other = SuffixAutomaton(), Text(), Text()
    for text, tokens in ((kept, (1, 2, 3)), (other, (9, 2, 4))):
        for token in tokens:
            automaton.append(text, token)
    assert len(list(automaton.contexts([1, 2]))) == 2
    while other.tokens:
        automaton.remove(other)
    assert len(list(automaton.contexts([1, 2]))) == 1  # although 2 still has a state of its own


def test_check_finds_wrong_counts() -> None:
    automaton, text = SuffixAutomaton(), Text()
    for token in (1, 2, 1, 2, 3):
        automaton.append(text, token)
    automaton.check([text])
    for wrong in ([], [text, text], [Text(text.tokens[:-1])]):
        with pytest.raises(AssertionError):
            automaton.check(wrong)


def test_memory_is_bounded() -> None:
    rng = random.Random(2)
    drafter = SuffixDrafter(shared=500)
    most = 0
    for id in range(40):
        tokens = [rng.randrange(50)]
        drafter.propose([DraftRequest(id, tokens, 4, 4)])
        tokens += [rng.randrange(rng.choice([2, 50])) for _ in range(rng.choice([20, 700]))]
        drafter.end(id)
        assert drafter.pool.size <= 500
        most = max(most, drafter.pool.automaton.num_states)
    assert drafter.pool.size == 500 and 500 < most <= 1002
    assert not drafter._requests


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_loop_does_not_get_slower(period: int) -> None:
    """Work per token, not time: suffixes with counts of their own stay few, and all of a budget is drafted."""
    drafter = SuffixDrafter()
    tokens = list(range(period)) * 2
    for _ in range(150):
        (tree,) = drafter.propose([DraftRequest(0, tokens, 12, 12)])
        assert tree.tokens.tolist() == [(len(tokens) + i) % period for i in range(12)]
        tokens += tree.tokens.tolist()
        kept = drafter._requests[0]
        for automaton, text in ((kept.automaton, kept.text), (drafter.pool.automaton, kept.output)):
            state = text.states[-1] if text is not None else 0
            suffixes = 0
            while state:
                state, suffixes = automaton._link[state], suffixes + 1
            assert suffixes <= suffix.TEXT_SUFFIXES
    assert len(drafter.pool.texts) > 5


def _draft(drafter: SuffixDrafter, tokens: list[int], budget: int = 4, depth: int = 9, id: int = 0) -> Tree:
    (tree,) = drafter.propose([DraftRequest(id, tokens, budget, depth)])
    assert tree.drafter == "suffix" and not tree.laws
    return tree.tokens.tolist(), tree.parents.tolist()


def test_trees() -> None:
    drafter = SuffixDrafter()
    assert _draft(drafter, [1, 2, 3, 4, 1, 2], 3) == ([3, 4, 1], [-1, 0, 1])
    assert _draft(drafter, [1, 2, 3, 4, 1, 2], 3, depth=1) == ([3], [-1])
    assert _draft(drafter, [5, 6, 7], id=1) == ([], [])
    # After 1 came 2 twice and 3 once: 2 is likelier, and what always followed it is as likely as itself.
    text = [1, 2, 8, 5, 1, 3, 9, 6, 1, 2, 8, 7, 1]
    assert _draft(drafter, text, 3, id=2) == ([2, 8, 3], [-1, 0, -1])
    # Equally likely: the lower token first.
    assert _draft(drafter, [1, 4, 5, 1, 3, 6, 1], 2, id=3) == ([3, 4], [-1, -1])
    # A third is not enough for 34 percent.
    assert _draft(SuffixDrafter(min=34), text, 9, depth=2) == ([2, 8], [-1, 0])


def test_outputs_are_shared_and_prompts_are_not() -> None:
    drafter = SuffixDrafter()
    first = [7, 8, 9]
    assert _draft(drafter, first) == ([], [])
    first += [1, 2, 3, 4]
    _draft(drafter, first)
    assert _draft(drafter, [7, 8], id=1) == ([], [])
    assert _draft(drafter, [5, 1, 2], id=2)[0] == [3, 4]  # while the other request runs
    first += [6]  # by the step that ended it
    drafter.end(0)
    drafter.end(0)
    assert _draft(drafter, [5, 1, 2], id=3)[0] == [3, 4, 6]
    alone = SuffixDrafter(shared=0)
    _draft(alone, [7])
    _draft(alone, [7, 1, 2, 3])
    assert _draft(alone, [5, 1, 2], id=1) == ([], []) and alone.pool.size == 0


def _accepted(drafter: Drafter, prompt: list[int], output: list[int], budget: int = 8) -> int:
    """Accepted drafts of a request whose output is known."""
    tokens, end = list(prompt), len(prompt) + len(output)
    truth = prompt + output
    accepted = 0
    while (left := end - len(tokens) - 1) > 0:
        (tree,) = drafter.propose([DraftRequest(0, tokens, budget, left)])
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
