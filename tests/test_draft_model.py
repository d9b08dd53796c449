"""The draft model against a twin that computes every row from nothing, in the hands of an unreliable engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_writer import gguf_bytes, tiny_gguf
from pilotfish import LLM
from pilotfish.backends.native import NativeBackend, choose, log_probabilities
from pilotfish.backends.reference import ReferenceBackend
from pilotfish.drafters.base import DraftRequest, Host, Measurable, Price
from pilotfish.drafters.choices import RowReader
from pilotfish.drafters.draft import DraftModelDrafter
from pilotfish.drafters.draft_model import MOST_LEARNT, DraftModel, TrimmedHead, kept_ids, read_vocab
from pilotfish.drafters.passes import BESIDE_ROWS, CATCH_UP_ROWS, PassRows, lay, shares
from pilotfish.drafters.speculation import parse_speculation
from pilotfish.errors import InputError, PilotfishError
from pilotfish.loaders.loaded import LoadedModel
from pilotfish.loaders.tokenizer import TokenizerSource
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.program import BLOCK_SIZE
from pilotfish.quant import Tensor
from pilotfish.sampling import probabilities
from pilotfish.tree import DraftTree, Rows, TreeBatch
from tiny import random_tensor, random_tree, tiny_model

VOCAB = 128


class FewTokens:
    """What trimming asks of a tokenizer."""

    special_ids = frozenset({127})
    eos_ids = frozenset({126})


def make_host(backend: Any, num_blocks: int = 24, vocab: int = VOCAB, context: int = 1024) -> Host:
    config, tensors = tiny_model("llama", seed=11, vocab_size=vocab)
    program = decoder_program(config, context)
    weights = backend.load(tensors)
    executable = backend.prepare(program, weights)
    kv = backend.new_kv(program.kv, num_blocks)
    return Host(config, program, executable, weights, kv, num_blocks, backend, None, 4)


def make_drafter(host: Host, branches: int = 1, vocab: str = "all", **overrides: Any) -> DraftModelDrafter:
    config, tensors = tiny_model("qwen2", seed=12, **overrides)
    loaded = LoadedModel(config, tensors, TokenizerSource(), "")
    model = DraftModel.load(loaded, FewTokens(), host, None, vocab, host.program.vocab_size)  # type: ignore[arg-type]
    return DraftModelDrafter(model, branches)


class Scratch:
    """The rows of the draft model, each computed from all its tokens in a KV of its own."""

    def __init__(self, drafter: DraftModelDrafter, host: Host) -> None:
        self.model, self.host = drafter.model, host

    def row(self, tokens: Sequence[int]) -> np.ndarray:
        kv = self.host.backend.new_kv(self.model.program.kv, 64)
        batch = TreeBatch.build([Rows(list(tokens), 0, list(range(64)))])
        logits = self.model.executable.forward(batch, kv, True).logits
        assert logits is not None
        return logits[0]

    def check(self, request: DraftRequest, tree: DraftTree, branches: int) -> None:
        """Every node is what the model's own row says behind its path, told with its confidence."""
        tree.check(VOCAB)
        assert len(tree) <= request.budget and tree.depths().max(initial=0) <= request.max_depth
        base = [*request.tokens, *request.drafted]
        for node in {-1, *tree.parents.tolist()} if len(tree) else set():
            row = self.row([*base, *(int(tree.tokens[at]) for at in tree.path(node))])
            children = np.flatnonzero(tree.parents == node).tolist()
            position = len(base) + len(tree.path(node))
            choices = self.model.reader.choices(request, row, position, branches)
            assert [int(tree.tokens[child]) for child in children] == [c.token for c in choices][: len(children)]
            assert [tree.confidences[child] for child in children] == [c.confidence for c in choices][: len(children)]


class Engine:
    """Requests that grow, share blocks, lose them and get others: what the drafter sees of an engine."""

    def __init__(self, rng: random.Random, num_blocks: int, params: SamplingParams) -> None:
        self.rng, self.params = rng, params
        self.free = list(range(num_blocks))
        self.running: dict[int, tuple[list[int], list[int]]] = {}
        self.ids = 0

    def begin(self) -> None:
        tokens = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 40))]
        self.running[self.ids] = tokens, []
        self.ids += 1

    def share(self, id: int) -> None:
        """A request that begins with the full blocks of another; a block is free when nobody holds it."""
        tokens, blocks = self.running[id]
        shared = min(len(blocks), (len(tokens) - 1) // BLOCK_SIZE)
        if shared:
            own = tokens[: shared * BLOCK_SIZE] + [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 9))]
            self.running[self.ids] = own, blocks[:shared]
            self.ids += 1

    def preempt(self, id: int) -> None:
        tokens, blocks = self.running[id]
        self.running[id] = tokens, []
        self.release(blocks)

    def end(self, id: int) -> None:
        self.release(self.running.pop(id)[1])

    def release(self, blocks: list[int]) -> None:
        held = {block for _, others in self.running.values() for block in others}
        self.free += [block for block in blocks if block not in held and block not in self.free]
        self.rng.shuffle(self.free)

    def request(self, id: int) -> DraftRequest | None:
        tokens, blocks = self.running[id]
        budget = self.rng.randint(1, 9)
        while len(blocks) * BLOCK_SIZE < len(tokens) + budget:
            if not self.free:
                return None
            blocks.append(self.free.pop())
        depth = self.rng.choice([1, 3, 64])
        return DraftRequest(id, tokens, budget, depth, blocks=blocks, params=self.params, seed=id + 5, prompt=1)


@pytest.mark.parametrize(
    ("branches", "params"),
    [
        (1, SamplingParams(temperature=0.0)),
        (2, SamplingParams(temperature=0.0)),
        (3, SamplingParams(temperature=0.9, top_p=0.95)),
        (1, SamplingParams(temperature=0.9, top_k=20)),
    ],
    ids=["chain", "tree", "sampled tree", "sampled chain"],
)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_every_draft_is_the_models_own_whatever_happens_to_the_blocks(
    backend: str, branches: int, params: SamplingParams
) -> None:
    rng = random.Random(branches)
    host = make_host(NativeBackend(threads=1) if backend == "native" else ReferenceBackend())
    drafter = make_drafter(host, branches)
    scratch = Scratch(drafter, host)
    engine = Engine(rng, host.num_blocks, params)
    again = drafts = 0
    for _ in range(200 if backend == "native" else 25):
        if len(engine.running) < 2:
            engine.begin()
        id = rng.choice(list(engine.running))
        what = rng.random()
        if what < 0.1:
            engine.share(id)
        elif what < 0.2:
            engine.preempt(id)
        elif what < 0.3 or len(engine.running[id][0]) > 90:
            engine.end(id)
            drafter.end(id)
        asked = [r for id in list(engine.running) if rng.random() < 0.8 and (r := engine.request(id))]
        trees = drafter.propose(asked)
        for request, tree in zip(asked, trees, strict=True):
            if backend == "native":
                scratch.check(request, tree, branches)
            drafts += len(tree)
            assert len(tree) or request.budget == 0
            tokens = engine.running[request.id][0]
            if len(tree) and rng.random() < 0.7:  # some path stands
                path = tree.path(rng.randrange(len(tree)))
                stands = path[: rng.randint(0, len(path))]
                tokens += [int(tree.tokens[node]) for node in stands]
                again += len(stands)
            tokens.append(rng.randrange(VOCAB))
            assert drafter.backlog(request) <= 1  # what stands need not be computed again, but for a leaf
        drafter.passes.clear()
    assert drafts > 50 and again > 10


def test_accepted_branches_are_moved_not_computed_again() -> None:
    host = make_host(NativeBackend(threads=1))
    drafter = make_drafter(host, branches=3)
    tokens, blocks = [5, 9, 33, 2], [3, 7]
    moved = 0
    for _ in range(6):
        request = DraftRequest(0, tokens, 12, 64, blocks=blocks)
        tree = drafter.propose([request])[0]
        deep = int(np.flatnonzero(tree.depths() >= 2)[-1])  # not the first branch
        path = tree.path(deep)
        moved += path != list(range(len(path)))
        tokens = [*tokens, *(int(tree.tokens[node]) for node in path[:-1]), 77]
        assert drafter.backlog(DraftRequest(0, tokens, 12, 64, blocks=blocks)) <= 1
    assert moved


def test_a_long_prompt_is_caught_up_with_beside_the_drafting_of_others() -> None:
    host = make_host(NativeBackend(threads=1), num_blocks=100)
    drafter = make_drafter(host)
    rng = random.Random(3)
    long = DraftRequest(0, [rng.randrange(VOCAB) for _ in range(1000)], 4, 64, blocks=range(64))
    short = DraftRequest(1, [1, 2, 3], 4, 64, blocks=[70])
    assert drafter.backlog(long) == 999
    assert not len(drafter.propose([long])[0])
    assert drafter.passes[0][0].num_rows == CATCH_UP_ROWS and len(drafter.passes) == 1
    sizes = []
    for _ in range(4):
        trees = drafter.propose([long, short])
        sizes.append([len(tree) for tree in trees])
    assert sizes == [[0, 4], [0, 4], [0, 4], [4, 4]]
    assert all(batch.num_rows <= BESIDE_ROWS + 3 for batch, _ in drafter.passes[1:])
    Scratch(drafter, host).check(long, trees[0], 1)
    drafter.passes.clear()
    drafter.end(0)
    other = DraftRequest(2, [*long.tokens[:640], 5], 4, 64, blocks=[*range(40), 99, 98])
    assert drafter.backlog(other) == 0  # computed for another request


def test_drafts_behind_the_tokens_are_taken_in() -> None:
    host = make_host(NativeBackend(threads=1))
    drafter = make_drafter(host)
    request = DraftRequest(0, [4, 5, 6], 3, 64, drafted=[7, 8], blocks=[2])
    tree = drafter.propose([request])[0]
    Scratch(drafter, host).check(request, tree, 1)
    assert drafter.backlog(DraftRequest(0, [4, 5, 6, 7, 8, int(tree.tokens[0])], 3, 64, blocks=[2])) == 0


def test_shares_of_the_first_pass() -> None:
    assert shares([]) == [] and shares([5, 1, 16]) == [5, 1, 16]
    assert shares([300, 200, 100]) == [212, 200, 100]
    assert shares([300, 1, 2]) == [128, 1, 2] and shares([300, 1, 100]) == [28, 1, 100]
    assert shares([1] * 600) == [1] * 600


def _price(tokens_per_ms: float, chance: Any = None) -> Price:
    return Price(tokens_per_ms, 8.0, lambda rows: 2.0, chance or (lambda id, depth, confidence: confidence))


def test_passes_are_made_while_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.drafters.draft.SIBLINGS", 1)
    host = make_host(NativeBackend(threads=1))
    drafter = make_drafter(host)
    tokens = [1, 2, 3]

    def chain(price: Price | None) -> DraftTree:
        return drafter.propose([DraftRequest(0, tokens, 16, 64, blocks=[0, 1])], price)[0]

    full = chain(None)
    assert len(full) == 16
    lengths = [len(chain(_price(worth))) for worth in (0.0, 0.002, 0.01, 0.03)]
    assert lengths[0] == 16 and lengths == sorted(lengths, reverse=True) and lengths[2] < 16
    sure = [len(chain(_price(worth, lambda id, depth, confidence: 0.9))) for worth in (0.02, 0.05, 0.5)]
    assert sure == [15, 6, 1]  # while 0.9^n is above the cost, 10 ms at that worth
    drafter.passes.clear()
    chain(_price(0.5, lambda id, depth, confidence: 0.9))
    assert len(drafter.passes) == 1


def test_nothing_is_drafted_behind_an_end() -> None:
    host = make_host(NativeBackend(threads=1))
    drafter = make_drafter(host)
    tokens = drafter.propose([DraftRequest(0, [1, 2, 3], 8, 64, blocks=[0])])[0].tokens.tolist()
    end = next(at for at, token in enumerate(tokens) if tokens.index(token) == at >= 2)
    ending = DraftModelDrafter(drafter.model, 1, frozenset({tokens[end]}))
    assert len(ending.propose([DraftRequest(0, [1, 2, 3], 8, 64, blocks=[0])])[0]) == end + 1
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    assert len(ending.propose([DraftRequest(0, [1, 2, 3], 8, 64, blocks=[0], params=params)])[0]) == 8
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[tokens[end]])
    assert len(ending.propose([DraftRequest(0, [1, 2, 3], 8, 64, blocks=[0], params=params)])[0]) == end + 1


def test_where_the_controller_chooses_a_node_has_a_sibling_that_takes_no_pass() -> None:
    host = make_host(NativeBackend(threads=1))
    drafter = make_drafter(host)
    request = DraftRequest(0, [1, 2, 3], 16, 4, blocks=[0, 1])
    tree = drafter.propose([request], _price(0.0, lambda id, depth, confidence: confidence))[0]
    passes = len(drafter.passes)
    chain = drafter.propose([DraftRequest(1, [1, 2, 3], 4, 4, blocks=[2, 3])])[0]
    assert len(tree) > len(chain) == 4 and tree.depths().max() == 4
    children = np.unique(tree.parents, return_counts=True)[1]
    assert children.max() == 2 and passes >= 4
    best = [max(np.flatnonzero(tree.parents == -1), key=lambda node: tree.confidences[node])]
    assert tree.tokens[best[0]] == chain.tokens[0]


def test_a_request_leaves_when_its_node_is_not_worth_a_row_and_others_pay_for_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pilotfish.drafters.draft.SIBLINGS", 1)
    host = make_host(NativeBackend(threads=1))
    drafter = make_drafter(host)
    requests = [DraftRequest(id, [1, 2, 3 + id], 6, 64, blocks=[id]) for id in range(3)]
    chances = {0: 1.0, 1: 0.5, 2: 0.2}
    price = _price(0.05, lambda id, depth, confidence: chances[id])
    trees = drafter.propose(requests, price)
    assert [len(tree) for tree in trees] == [6, 3, 1]  # while 0.5^n > 0.1, which is less than its share of a pass
    assert [batch.num_requests for batch, _ in drafter.passes] == [3, 2, 2, 1, 1, 1]


def test_a_request_whose_rule_draws_has_a_chain_with_its_laws() -> None:
    host = make_host(NativeBackend(threads=1))
    drafter = make_drafter(host, branches=3)
    params = SamplingParams(temperature=0.8, top_p=0.9, acceptance="ratio")
    tokens = [1, 2, 3]
    request = DraftRequest(0, tokens, 5, 64, blocks=[0], params=params, seed=3)
    tree = drafter.propose([request])[0]
    tree.check(VOCAB)
    scratch = Scratch(drafter, host)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    for node in range(5):
        law = probabilities(scratch.row([*tokens, *tree.tokens[:node].tolist()]), params)
        assert np.array_equal(tree.laws[node], law)  # type: ignore[arg-type]
        assert tree.confidences[node] == law.max()
    again = drafter.propose([request])[0]
    assert again.tokens.tolist() == tree.tokens.tolist()  # for a seed
    behind = DraftRequest(0, tokens, 4, 64, drafted=[9], blocks=[0], params=params, seed=3)
    added = drafter.propose([behind])[0]
    assert not added.laws and DraftTree.chain([9]).graft(0, added, 9).tokens[1:].tolist() == added.tokens.tolist()
    assert int(added.tokens[0]) == int(scratch.row([*tokens, 9]).argmax())


def test_what_is_drawn_follows_the_law() -> None:
    reader = RowReader(None, 8)
    row = np.linspace(0, 2, 8).astype(np.float32)
    params = SamplingParams(temperature=1.0, acceptance="ratio")
    drawn = [
        reader.choices(DraftRequest(0, [1] * n, 1, 1, params=params, seed=n % 7), row, n, 1)[0].token
        for n in range(1, 4001)
    ]
    found = np.bincount(drawn, minlength=8) / 4000
    assert np.abs(found - probabilities(row, params)).max() < 0.03


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_choices_of_a_row(temperature: float) -> None:
    rng = np.random.default_rng(4)
    ids = np.array([5, 3, 100, 64, 7], np.int32)
    row = rng.normal(size=5).astype(np.float32) * 2
    dense = np.full(VOCAB, -np.inf, np.float32)
    dense[ids] = row
    params = SamplingParams(temperature=temperature)
    choices = RowReader(ids, VOCAB).choices(DraftRequest(0, [1], 4, 4, params=params, seed=9), row, 12, 4)
    own = np.exp(row - log_probabilities(row, 1)[0])
    for choice in choices:
        assert choice.token == choose(dense, params, 9, 12)
        if temperature == 0 or choice is choices[0]:
            assert choice.confidence == pytest.approx(own[ids.tolist().index(choice.token)])
        dense[choice.token] = -np.inf
    confidences = [choice.confidence for choice in choices]
    assert len(choices) == 4 and confidences == sorted(confidences, reverse=True)


@pytest.mark.parametrize("backend", [NativeBackend(threads=1), ReferenceBackend()], ids=["native", "reference"])
def test_a_trimmed_head_gives_the_rows_of_the_whole_one(backend: Any) -> None:
    host = make_host(backend)
    whole, trimmed = make_drafter(host), make_drafter(host, vocab="1k")
    assert trimmed.model.head is None  # there are not so many tokens
    tensors = tiny_model("qwen2", seed=12)[1]
    ids = np.array([3, 9, 11, 40, 126, 127], np.int32)
    head = TrimmedHead(tensors["head"], ids, None)
    model = trimmed.model
    model.bind_head(head)
    request = DraftRequest(0, [3, 77, 50], 4, 64, blocks=[0])
    tree = trimmed.propose([request])[0]
    assert head.ids.tolist() == [*ids.tolist(), 77, 50]  # the prompt's tokens are learnt at once
    row = Scratch(whole, host).row(request.tokens)[head.ids]
    assert int(tree.tokens[0]) == head.ids[row.argmax()]
    later = [3, 77, 50, *range(60, 63)]
    trimmed.propose([DraftRequest(0, later, 4, 64, blocks=[0, 1])])
    assert len(head.ids) == 8  # an answer's tokens wait for more of them
    later += range(80, 90)
    tree = trimmed.propose([DraftRequest(0, later, 4, 64, blocks=[0, 1, 2])])[0]
    assert len(head.ids) == 21
    row = Scratch(whole, host).row(later)[head.ids]
    assert int(tree.tokens[0]) == head.ids[row.argmax()]
    if backend.name == "native":
        Scratch(trimmed, host).check(DraftRequest(0, later, 4, 64, blocks=[0, 1, 2]), tree, 1)


def test_what_a_head_learns_is_bounded() -> None:
    _, tensors = tiny_model("llama", seed=1, vocab_size=MOST_LEARNT + 300)
    head = TrimmedHead(tensors["head"], np.arange(20, dtype=np.int32), None)
    everything = np.arange(MOST_LEARNT + 300, dtype=np.int32)
    assert head.learn(everything, at_once=True)
    assert head.learn(everything[-200:], at_once=True)
    assert not head.learn(everything[-200:], at_once=True)
    assert len(head.ids) == 20 + MOST_LEARNT == len(set(head.ids.tolist())) == head.size
    assert set(everything[-200:].tolist()) <= set(head.ids.tolist())
    check_rows(head, tensors["head"])


def check_rows(head: TrimmedHead, whole: Tensor) -> None:
    """The matrix, and what is put into it by learning, are the rows of the whole head."""
    expected = whole.dequantize()[head.ids]
    matrix = head.matrix().dequantize()
    assert matrix.shape[0] == head.size
    assert np.array_equal(matrix[: len(expected)], expected) and not matrix[len(expected) :].any()
    first, rows = head.learnt_rows()
    assert first % 16 == 0 and np.array_equal(rows.dequantize(), expected[first:])


def test_a_head_widens_when_answers_have_other_tokens() -> None:
    _, tensors = tiny_model("llama", seed=1, vocab_size=100)
    head = TrimmedHead(tensors["head"], np.array([*range(20), 99], np.int32), None, most=90)
    assert head.learn(np.array([50, 51, 52, 53, 54, 55], np.int32), at_once=True) and len(head.ids) == 27
    for _ in range(50):  # a few do not matter
        assert not head.widen(np.array([1] * 31 + [60], np.int32))
    sizes = []
    for start in (61, 70, 86):
        assert head.widen(np.arange(start, start + 9, dtype=np.int32))
        sizes.append(len(head.ids))
    assert sizes == [43, 87, 91] and head.ids.tolist() == [*range(90), 99]
    assert not head.widen(np.arange(90, 99, dtype=np.int32))
    assert head.learn(np.array([95], np.int32), at_once=True) and 95 in head.ids
    check_rows(head, tensors["head"])


def test_which_tokens_a_head_keeps(tmp_path: Path) -> None:
    tokenizer: Any = FewTokens()
    assert read_vocab("all") is None and read_vocab("16k") == read_vocab("auto") == 16000
    assert kept_ids(None, tokenizer, VOCAB) is None and kept_ids(500, tokenizer, VOCAB) is None
    ids = kept_ids(100, tokenizer, VOCAB)
    assert ids is not None and ids.tolist() == [*range(100), 126, 127]
    listed = tmp_path / "ids.json"
    listed.write_text("[5, 7,\n 9]")
    ids = kept_ids(read_vocab(str(listed)), tokenizer, VOCAB)
    assert ids is not None and ids.tolist() == [5, 7, 9, 126, 127]
    with pytest.raises(InputError, match=r"0\.\.127"):
        kept_ids([4, 500], tokenizer, VOCAB)


def test_contexts_vocabularies_and_rows_that_do_not_fit() -> None:
    host = make_host(NativeBackend(threads=1), vocab=200)
    drafter = make_drafter(host, context_length=40)
    rng = random.Random(1)
    tokens = [rng.randrange(VOCAB) for _ in range(38)]
    blocks = [0, 1, 2]
    assert len(drafter.propose([DraftRequest(0, tokens, 8, 64, blocks=blocks)])[0]) == 3  # positions 37 to 39
    assert len(drafter.propose([DraftRequest(0, [*tokens, 1, 2, 3], 8, 64, blocks=blocks)])[0]) == 0
    assert drafter.backlog(DraftRequest(0, [*tokens, 1, 2, 3], 8, 64, blocks=blocks)) == 0
    assert len(drafter.propose([DraftRequest(1, [1, 199], 8, 64, blocks=blocks)])[0]) == 0  # no token of the model
    larger = make_drafter(make_host(NativeBackend(threads=1), vocab=100))
    for seed in range(8):
        tree = larger.propose([DraftRequest(seed, [seed, 3], 8, 64, blocks=[seed])])[0]
        tree.check(100)
        assert len(tree) == 8


def test_broken_rows_are_told_and_nothing_is_believed_afterwards() -> None:
    host = make_host(NativeBackend(threads=1))
    drafter = make_drafter(host)
    request = DraftRequest(0, [1, 2, 3], 4, 64, blocks=[0])
    good = drafter.propose([request])[0].tokens.tolist()
    executable = drafter.model.executable
    tensors = tiny_model("qwen2", seed=12)[1]
    weights = dict(host.backend.load(tensors))
    weights["norm"] = np.full(64, np.nan, np.float32)
    drafter.model.executable = host.backend.prepare(drafter.model.program, weights)
    with pytest.raises(PilotfishError, match="not finite"):
        drafter.propose([request])

    class Failing:
        def forward(self, *arguments: Any) -> Any:
            raise RuntimeError("no memory")

    drafter.model.executable = Failing()
    with pytest.raises(RuntimeError):
        drafter.propose([request])
    drafter.model.executable = executable
    assert drafter.backlog(request) == 2
    assert drafter.propose([request])[0].tokens.tolist() == good
    assert isinstance(drafter, Measurable) and drafter.kv is drafter.model.kv  # whoever measures may write to it
    assert drafter.backlog(request) == 2


def test_rows_are_laid_as_tree_batches_are() -> None:
    rng = np.random.default_rng(8)
    for _ in range(20):
        tree = random_tree(rng, int(rng.integers(1, 9)), VOCAB)
        end, blocks = 21, [4, 2, 9]
        whole = TreeBatch.build([Rows([1], end - 1, blocks, tree), Rows([5, 6], 3, [1])])
        paths: list[tuple[int, ...]] = []
        for node in range(len(tree)):
            path = tree.path(node)
            paths.append(() if path[-1] == len(path) - 1 else tuple(end + at for at in path))
        depths = (end - 1 + tree.depths()).tolist()
        rows = PassRows(
            [1, *tree.tokens.tolist()],
            end - 1,
            np.array(blocks, np.int32),
            len(tree) + 1,
            [end - 1, *depths],
            [(), *paths],
        )
        laid = lay([rows, PassRows([5, 6], 3, np.array([1], np.int32), 1)])
        for name, value in vars(whole).items():
            assert np.array_equal(getattr(laid, name), value), name


def test_from_files(tmp_path: Path) -> None:
    """`make` reads the option's words, checks the tokenizers, and shares what is loaded."""
    metadata, tensors = tiny_gguf("llama")
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors))
    with pytest.raises(InputError, match="does not exist"):
        DraftModelDrafter.make(make_host(NativeBackend(threads=1)), str(tmp_path / "none.gguf"))
    with pytest.raises(InputError, match="needs a loaded target"):
        DraftModelDrafter.make(None, str(path))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("acceptance", ["match", "block"])
def test_a_model_that_drafts_for_itself_is_always_right(smollm2: LLM, temperature: float, acceptance: str) -> None:
    """In the engine: every draft stands, also where it is drawn, and by `match` the text is the plain one."""
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, acceptance=acceptance)
    prompts = ["Tell me about the sea.", "List three colours."]
    plain = smollm2.generate(prompts, params, chat=True, speculation="off")
    drafted = smollm2.generate(prompts, params, chat=True, speculation="draft:demo,k=4,vocab=all")
    for expected, found in zip(plain, drafted, strict=True):
        assert found.speculation["accepted"] == found.speculation["drafted"] > 8
        assert found.tokens == expected.tokens or (acceptance == "block" and temperature > 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("draft", "draft needs its model"),
        ("draft:m.gguf,vocab=12", "at least 256"),
        ("draft:m.gguf,vocab=nowhere", "must be auto, all, a number"),
        ("draft:m.gguf,weights=int3", "int3"),
        ("draft:m.gguf,branches=5", "1..4"),
    ],
)
def test_words_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_speculation(text)


def test_words() -> None:
    part = parse_speculation("draft:m.gguf,k=5,vocab=16k,weights=int4").parts[0]
    assert part.k == 5 and part.options == {"model": "m.gguf", "vocab": "16k", "weights": "int4", "branches": 1}
    assert parse_speculation("draft:m.gguf").parts[0].options == {"model": "m.gguf", "vocab": "auto", "branches": 1}


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_rows_of_a_loaded_matrix_are_replaced(kind: str) -> None:
    rng = np.random.RandomState(1)
    whole, other = (random_tensor(rng, (40, 64), kind, spread=1.0) for _ in range(2))
    backend = NativeBackend(threads=1)
    weight: Any = backend.load({"head": whole})["head"]
    backend.replace_rows(weight, 16, other.take_rows(np.arange(20)))
    expected = np.concatenate([whole.dequantize()[:16], other.dequantize()[:20]])
    assert all(np.array_equal(weight.unpack_row(row), expected[row]) for row in range(36))
    for first, rows in ((8, other), (16, other), (-16, other), (0, random_tensor(rng, (8, 32), kind, 1.0))):
        with pytest.raises(ValueError, match="the rows"):
            backend.replace_rows(weight, first, rows)
    with pytest.raises(ValueError, match="another format"):
        backend.replace_rows(weight, 0, random_tensor(rng, (8, 64), "Q5_0", 1.0))
