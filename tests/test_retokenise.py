"""Drafts through text, with tokenizers that cut it differently."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.backends.native import NativeBackend
from pilotfish.drafters.base import DraftRequest, Host, Price
from pilotfish.drafters.draft import DraftModelDrafter
from pilotfish.drafters.draft_model import DraftModel
from pilotfish.drafters.retokenise import GrowingText, RetokenisingDrafter, TextModel, valid_start, whole_characters
from pilotfish.errors import PilotfishError
from pilotfish.loaders.loaded import LoadedModel
from pilotfish.loaders.tokenizer import TokenizerSource
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.tree import Rows, TreeBatch
from tiny import tiny_model

LETTERS = [bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz .,\n"]
FIRST = [*LETTERS, b"th", b"he", b" a", b"ing", b"<end>", *(bytes([byte]) for byte in "\u00e9\u20ac".encode())]
OTHER = [b"<s>", b"<end>", *reversed(LETTERS), b"t", b"the", b" an", b"in", b"nd ", b"ab", b"ba", b"ca", b"zq"]


class Pieces:
    """Takes the longest piece that fits; `begins` every text with a control token where the caller wants markup."""

    def __init__(self, pieces: list[bytes], begins: int | None = None) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.special_ids = self.eos_ids = frozenset(i for i, piece in enumerate(pieces) if piece[:1] == b"<")
        self._begins = begins
        self._by_length = sorted(range(len(pieces)), key=lambda token: -len(pieces[token]))
        self.encoded_bytes = 0

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def encode(self, text: str, special: bool) -> list[int]:
        raw, at, ids = text.encode(), 0, []
        self.encoded_bytes += len(raw)
        while at < len(raw):
            fits = (t for t in self._by_length if t not in self.special_ids and raw.startswith(self.pieces[t], at))
            token = next(fits, None)
            if token is None:
                at += 1  # a tokenizer that changes the text
                continue
            ids.append(token)
            at += len(self.pieces[token])
        return [self._begins, *ids] if special and self._begins is not None else ids


def make(num_blocks: int = 40, context: int = 400) -> tuple[RetokenisingDrafter, Pieces, Pieces, Any]:
    backend = NativeBackend(threads=1)
    target, draft = Pieces(FIRST), Pieces(OTHER, begins=0)
    config, tensors = tiny_model("llama", seed=5, vocab_size=len(FIRST))
    program = decoder_program(config, context)
    host = Host(config, program, None, {}, None, num_blocks, backend, target, 4)  # type: ignore[arg-type]
    config, tensors = tiny_model("qwen2", seed=6, vocab_size=len(OTHER), context_length=context)
    loaded = LoadedModel(config, tensors, TokenizerSource(), "")
    model = DraftModel.load(loaded, draft, host, None, "all", len(OTHER))  # type: ignore[arg-type]
    drafter = RetokenisingDrafter(TextModel(model, draft, ""), target, num_blocks)  # type: ignore[arg-type]
    return drafter, target, draft, backend


def continuation(drafter: RetokenisingDrafter, draft: Pieces, text: bytes, count: int, backend: Any) -> list[int]:
    """The greedy tokens of the draft model after a text, computed from nothing."""
    tokens = draft.encode(text.decode(), special=True)
    start = len(tokens)
    while len(tokens) < start + count:
        kv = backend.new_kv(drafter.model.program.kv, 64)
        result = drafter.model.executable.forward(TreeBatch.build([Rows(tokens, 0, list(range(64)))]), kv, False)
        tokens.append(int(result.argmax[0]))
        if tokens[-1] in draft.special_ids:
            return tokens[start:-1]
    return tokens[start:]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_spell_what_the_draft_model_says(temperature: float) -> None:
    drafter, target, draft, backend = make()
    rng = random.Random(2)
    params = SamplingParams(temperature=temperature)
    requests: dict[int, list[int]] = {}
    drafts = 0
    for step in range(60):
        if len(requests) < 3:
            requests[step] = target.encode("".join(rng.choice("the ban. ") for _ in range(rng.randint(3, 120))), False)
        asked = [
            DraftRequest(id, tokens, rng.randint(1, 6), rng.choice([2, 9]), params=params)
            for id, tokens in requests.items()
            if rng.random() < 0.7
        ]
        trees = drafter.propose(asked)
        for request, tree in zip(asked, trees, strict=True):
            most = min(request.budget, request.max_depth)
            assert len(tree) <= most and tree.parents.tolist() == list(range(-1, len(tree) - 1))
            tree.check(len(FIRST))
            text = b"".join(target.token_bytes(token) for token in request.tokens)
            said = continuation(drafter, draft, text, most + 1, backend)
            whole = b"".join(draft.token_bytes(token) for token in said)
            spelled = b"".join(target.token_bytes(token) for token in tree.tokens.tolist())
            assert whole.startswith(spelled)
            if len(said) > most:
                assert len(tree) >= 1
            drafts += len(tree)
            tokens = requests[request.id]
            tokens += tree.tokens.tolist()[: rng.randint(0, len(tree))]
            tokens.append(rng.randrange(len(LETTERS)))
            if len(tokens) > 200:
                drafter.end(request.id)
                del requests[request.id]
    assert drafts > 100
    assert max(batch.num_rows for batch, _ in drafter.passes) > 20  # prompts
    assert sum(batch.num_rows <= 6 for batch, _ in drafter.passes) > 50


def test_only_the_end_of_a_text_is_tokenised_again() -> None:
    tokenizer = Pieces(OTHER, begins=0)
    rng = random.Random(3)
    text = GrowingText(tokenizer)  # type: ignore[arg-type]
    whole = ""
    text.extend(b"")
    assert text.tokens == [0]
    for _ in range(200):
        more = "".join(rng.choice("the ban. ") for _ in range(rng.randint(1, 9)))
        whole += more
        text.extend(more.encode())
        assert text.tokens == tokenizer.encode(whole, special=True)
        assert text.starts == sorted(text.starts)
    tokenizer.encoded_bytes = 0
    text.extend(b"x")
    assert tokenizer.encoded_bytes < 100 < len(whole)
    text.extend("\u00e9".encode())  # the tokenizer has no such letter: from now on nothing is cut
    text.extend(b" the")
    assert text.tokens == tokenizer.encode(whole + "x\u00e9 the", special=True)


def test_a_text_that_ends_inside_a_character_waits() -> None:
    drafter, target, _, _ = make()
    euro = [target.pieces.index(bytes([byte])) for byte in "\u20ac".encode()]
    start = target.encode("the ban ", False)
    sizes = [
        len(drafter.propose([DraftRequest(0, [*start, *euro[:count]], 4, 9)])[0]) > 0 for count in range(len(euro) + 1)
    ]
    assert sizes == [True, False, False, True]
    assert [whole_characters(text) for text in (b"", b"ab", b"a\xc3", b"a\xe2\x82", b"\xe2\x82\xac")] == [0, 2, 1, 1, 3]
    assert valid_start(b"ab\xffc") == b"ab" and valid_start(b"ab\xe2\x82") == b"ab" and valid_start(b"abc") == b"abc"


def test_blocks_and_contexts_are_bounded_and_come_back() -> None:
    drafter, target, _, _ = make(num_blocks=3, context=100)
    long = DraftRequest(0, target.encode("the ban and " * 5, False), 4, 9)
    other = DraftRequest(1, target.encode("an ant in the ba", False), 4, 9)
    assert len(drafter.propose([long])[0])
    assert not len(drafter.propose([other])[0])  # all blocks are taken
    drafter.end(0)
    assert len(drafter.propose([other])[0])
    too_long = DraftRequest(2, target.encode("xyz" * 40, False), 4, 9)
    assert not len(drafter.propose([too_long])[0]) and drafter.backlog(too_long) == 0
    drafted = DraftRequest(1, other.tokens, 4, 9, drafted=[1])
    assert not len(drafter.propose([drafted])[0])


def test_prices_broken_rows_and_backlogs() -> None:
    drafter, target, _, _ = make()
    tokens = target.encode("an ant in the ba", False)
    request = DraftRequest(0, tokens, 6, 9)
    backlog = drafter.backlog(request)
    assert backlog > 5
    dear = Price(1.0, 9.0, lambda rows: 0.0, lambda id, depth, confidence: 0.9)
    drafter.propose([request], dear)
    assert len(drafter.passes) == 1 and drafter.backlog(request) == 0
    good = drafter.propose([request], Price(0.0, 9.0, lambda rows: 0.0, lambda id, depth, confidence: 0.9))[
        0
    ].tokens.tolist()
    assert good == drafter.propose([request])[0].tokens.tolist() and len(good) > 2

    executable = drafter.model.executable

    class Broken:
        def forward(self, batch: TreeBatch, *rest: Any) -> Any:
            result = executable.forward(batch, *rest)
            result.argmax[:] = -1
            return result

    drafter.model.executable = Broken()  # type: ignore[assignment]
    with pytest.raises(PilotfishError, match="not finite"):
        drafter.propose([request])
    drafter.model.executable = executable
    assert drafter.propose([request])[0].tokens.tolist() == good


def test_another_tokenizer_is_noticed(smollm2_path: Path) -> None:
    """The demo model drafts for a target that spells differently; one with the same tokens drafts directly."""
    from pilotfish.loaders import load_model
    from pilotfish.loaders.tokenizer import Tokenizer

    loaded = load_model(smollm2_path)
    tokenizer = Tokenizer.load(loaded.tokenizer)
    config = tiny_model("llama", seed=5, vocab_size=loaded.config.vocab_size)[0]
    backend = NativeBackend(threads=1)
    program = decoder_program(config, 64)
    host = Host(config, program, None, {}, None, 6, backend, Pieces(FIRST), 2)  # type: ignore[arg-type]
    through_text = DraftModelDrafter.make(host, str(smollm2_path), vocab="1k")
    assert isinstance(through_text, RetokenisingDrafter) and "another tokenizer" in through_text.note
    first = host.tokenizer.encode("the man in the ", False)
    tree = through_text.propose([DraftRequest(0, first, 4, 9)])[0]
    assert len(tree) >= 1
    same = Host(config, program, None, {}, None, 6, backend, tokenizer, 2)  # type: ignore[arg-type]
    direct = DraftModelDrafter.make(same, str(smollm2_path), vocab="1k")
    assert isinstance(direct, DraftModelDrafter)
    text = tokenizer.encode("One, two, three, four, five. One, two, three, four,", special=False)
    tree = direct.propose([DraftRequest(0, text, 2, 9, blocks=[1, 2, 3])])[0]
    assert tokenizer.decode(tree.tokens.tolist()).startswith(" five")  # beyond the 1,000, but learnt from the prompt
    assert DraftModelDrafter.make(same, str(smollm2_path), vocab="1k").model is direct.model  # type: ignore[attr-defined]
    whole = DraftModelDrafter.footprint(loaded.config, tokenizer, str(smollm2_path), vocab="all")
    trimmed = DraftModelDrafter.footprint(loaded.config, tokenizer, str(smollm2_path), vocab="1k", weights="int4")
    stored = sum(tensor.nbytes for tensor in loaded.tensors.values())
    assert whole.weight_bytes == stored and whole.kv_bytes_per_block == direct.model.program.kv.bytes_per_block
    assert trimmed.weight_bytes > 0 and np.isclose(whole.weight_bytes, trimmed.weight_bytes, rtol=0.2)
