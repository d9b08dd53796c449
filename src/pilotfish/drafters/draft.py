"""Drafts with a second model of the same vocabulary (speculative decoding: Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from pilotfish.config import ModelConfig
from pilotfish.drafters.base import Drafter, DraftRequest, Footprint, Host, Price
from pilotfish.drafters.contents import Keys, PrefixKeys, next_key
from pilotfish.drafters.draft_model import (
    DraftModel,
    differing_token,
    kv_shape,
    model_path,
    open_model,
    read_vocab,
    weight_bytes,
)
from pilotfish.drafters.passes import ROOT, Growth, PassRows, grow, lay, shares
from pilotfish.drafters.retokenise import RetokenisingDrafter, TextModel
from pilotfish.drafters.speculation import AnyOption, Option, TextOption
from pilotfish.errors import InputError, PilotfishError
from pilotfish.loaders.loaded import check_weights
from pilotfish.loaders.tokenizer import Tokenizer
from pilotfish.metrics import now_ms
from pilotfish.program import BLOCK_SIZE, KV, Executable, Floats, Program
from pilotfish.tree import DraftTree, Ints, TreeBatch

FIRST_GUESS = 0.75  # of a confidence, before there was one
FORGETTING = 0.2


def _check_weights(text: str) -> None:
    try:
        check_weights(text)
    except InputError as error:
        raise InputError(f"is wrong: {error}") from None


@dataclass
class _Known:
    """What is kept of a request between proposals."""

    keys: PrefixKeys = field(default_factory=PrefixKeys)
    seen: int = 0  # tokens looked at
    foreign: bool = False  # has a token that the model has not
    typical: float = FIRST_GUESS
    growth: Growth | None = None  # its last tree, if nodes of it lie beside their positions
    blocks: list[int] = field(default_factory=list)
    table: Ints = field(default_factory=lambda: np.zeros(0, np.int32))

    def look_up(self, blocks: Sequence[int]) -> Ints:
        """The block table as an array; a table of thousands is only compared."""
        if self.blocks != blocks:
            self.blocks = list(blocks)
            self.table = np.array(self.blocks, np.int32)
        return self.table


@dataclass(frozen=True)
class _Place:
    """Where a request stands in this proposal."""

    index: int
    request: DraftRequest
    known: _Known
    tokens: Sequence[int]  # committed, and the drafts that stand behind them
    keys: Keys  # of these
    blocks: Ints
    computed: int  # at most all but the last


SIBLINGS = 2  # children of a node where the controller chooses among them: a few rows more cost next to nothing


class DraftModelDrafter:
    """All requests in one batch per pass; `branches` = 1 drafts chains, more the most promising branches as well.

    A new prompt, or one whose KV was lost, is computed beside the drafting of others, a bounded number of rows in a
    proposal; until it is there the request has no drafts. A request whose rule draws gets a chain: in a tree, what was
    drawn below a node would have a say in which of its siblings are kept (verify.py).
    """

    ARGUMENT: ClassVar = "model"
    ONLY_AT_START: ClassVar = True  # a client must not have files read
    OPTIONS: ClassVar[dict[str, AnyOption]] = {
        "model": TextOption(None, "a .gguf file, a Hugging Face directory or demo", needed=True),
        "vocab": TextOption("auto", "tokens its head knows: auto, all, 16k or so, or a file of ids", read_vocab),
        "weights": TextOption(None, "rounded on load to bf16, int8 or int4", _check_weights),
        "branches": Option(1, 1, 4, "most nodes of a request that are computed in one pass"),
    }

    def __init__(
        self, model: DraftModel, branches: int = 1, ends: frozenset[int] = frozenset(), name: str = "draft"
    ) -> None:
        """`ends` are the tokens that end the target's output."""
        self.name = name
        self.model = model
        self.passes: list[tuple[TreeBatch, float]] = []
        self._branches = branches
        self._ends = ends
        self._known: dict[int, _Known] = {}

    @classmethod
    def make(
        cls,
        host: Host | None,
        model: str,
        vocab: str = "auto",
        weights: str | None = None,
        branches: int = 1,
    ) -> Drafter:
        """The drafter, or where the tokenizers differ the one that goes through text. Raises InputError."""
        if host is None:
            raise InputError("a draft model needs a loaded target")
        path = model_path(model)
        key = "draft", str(path), weights, vocab, host.num_blocks
        if key not in host.kept:
            loaded, tokenizer = open_model(path)
            differing = differing_token(host.tokenizer, tokenizer)
            if differing is None:
                host.kept[key] = DraftModel.load(loaded, tokenizer, host, weights, vocab, host.program.vocab_size)
            else:
                host.kept[key] = TextModel.load(loaded, tokenizer, host, weights, vocab, differing)
            open_model.cache_clear()  # the vocabulary's strings leave memory
        kept = host.kept[key]
        # What is learnt of a drafter is kept under its name: others take other times and are right at other times.
        options = {"weights": weights, "vocab": None if vocab == "auto" else vocab, "branches": branches}
        given = [f"{option}={value}" for option, value in options.items() if value not in (None, 1)]
        name = ",".join((f"draft:{path.stem}", *given))
        if isinstance(kept, TextModel):
            return RetokenisingDrafter(kept, host.tokenizer, host.num_blocks, name)
        return cls(kept, branches, host.tokenizer.eos_ids, name)

    @classmethod
    def footprint(
        cls,
        config: ModelConfig,
        tokenizer: Tokenizer,
        model: str,
        vocab: str = "auto",
        weights: str | None = None,
        branches: int = 1,
    ) -> Footprint:
        """The memory it takes beside the target of that configuration and tokenizer. Raises InputError."""
        loaded, own = open_model(model_path(model))
        name = loaded.config.name or "the draft model"
        other = differing_token(tokenizer, own) is not None  # then its blocks are its own, but as many
        size = loaded.config.vocab_size if other else config.vocab_size
        taken = weight_bytes(loaded, own, weights, vocab, size)
        return Footprint(name, taken, kv_shape(loaded.config).bytes_per_block)

    @property
    def program(self) -> Program:
        """What its passes compute, for whoever measures them."""
        return self.model.program

    @property
    def executable(self) -> Executable:
        return self.model.executable

    @property
    def kv(self) -> KV:
        return self.model.lend_kv()

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        """Chains or trees. Raises PilotfishError when the model's rows are broken."""
        trees = [DraftTree.empty() for _ in requests]
        places = [place for index, request in enumerate(requests) if (place := self._place(index, request))]
        parts, growing = self._begin(places, 1 if price is None else SIBLINGS)
        if not parts:
            return trees
        for (_, growth), row in zip(growing, self._forward(parts), strict=True):
            self._add(growth, ROOT, row, price)

        def compute(asked: list[tuple[Growth, list[int]]]) -> None:
            parts = [
                (growth.rows(nodes), np.array([growth.nodes[node].key for node in nodes], np.uint64))
                for growth, nodes in asked
            ]
            rows = iter(self._forward(parts))
            for growth, nodes in asked:
                for node in nodes:
                    self._add(growth, node, next(rows), price)

        grow([growth for _, growth in growing], compute, price)
        for place, growth in growing:
            trees[place.index] = growth.tree(self.name)
            self._remember(place.known, growth)
        return trees

    def backlog(self, request: DraftRequest) -> int:
        """Rows beyond the last token's that the request's next proposal has to compute first."""
        place = self._place(0, request)
        return 0 if place is None else len(place.tokens) - 1 - place.computed

    def end(self, id: int) -> None:
        """The request is over; the KV of its tokens may serve others."""
        self._known.pop(id, None)

    def _begin(
        self, places: Sequence[_Place], siblings: int
    ) -> tuple[list[tuple[PassRows, Keys]], list[tuple[_Place, Growth]]]:
        """The rows of the first pass: what has no KV yet, and of those whose last token is among it the roots."""
        growing: list[tuple[_Place, Growth]] = []
        parts: list[tuple[PassRows, Keys]] = []
        for place, share in zip(places, shares([len(place.tokens) - place.computed for place in places]), strict=True):
            if not share:
                continue
            stop = place.computed + share
            ready = stop == len(place.tokens)
            rows = PassRows(place.tokens[place.computed : stop], place.computed, place.blocks, int(ready))
            parts.append((rows, place.keys[place.computed : stop]))
            if ready:
                growing.append((place, self._growth(place, siblings)))
        return parts, growing

    def _place(self, index: int, request: DraftRequest) -> _Place | None:
        """None: the model can not draft for the request."""
        model, known = self.model, self._known.setdefault(request.id, _Known())
        tokens: Sequence[int] = request.tokens
        self._look_at(known, request)
        blocks = known.look_up(request.blocks)
        length = len(tokens) + len(request.drafted)
        if known.foreign or length > min(model.program.context_length, len(blocks) * BLOCK_SIZE):
            return None
        keys = known.keys.of(tokens)
        if known.growth is not None:
            self._settle(known.growth, blocks, keys, known.blocks)
            known.growth = None
        if request.drafted:
            if max(request.drafted) >= model.program.vocab_size:
                return None
            tokens = [*tokens, *request.drafted]
            keys = np.append(keys, _further_keys(int(keys[-1]), request.drafted))
        computed = min(model.contents.computed(blocks, keys), length - 1)
        return _Place(index, request, known, tokens, keys, blocks, computed)

    def _look_at(self, known: _Known, request: DraftRequest) -> None:
        if known.seen == len(request.tokens):
            return
        new = np.array(request.tokens[known.seen :], np.int32)
        if new.max() >= self.model.program.vocab_size:
            known.foreign = True
        else:
            self.model.learn(new, prompt=known.seen == 0)
        known.seen = len(request.tokens)

    def _growth(self, place: _Place, siblings: int) -> Growth:
        length, request = len(place.tokens), place.request
        return Growth(
            request,
            place.blocks,
            length,
            int(place.keys[-1]),
            most_slots=min(request.budget, len(place.blocks) * BLOCK_SIZE - length),
            most_depth=min(request.max_depth, self.model.program.context_length - length + 1),
            branches=1 if request.draws else self._branches,
            children=1 if request.draws else max(siblings, self._branches),
            typical=place.known.typical,
            ends=frozenset(request.params.stop_token_ids) | (frozenset() if request.params.ignore_eos else self._ends),
        )

    def _add(self, growth: Growth, node: int, row: Floats, price: Price | None) -> None:
        depth = 0 if node < 0 else growth.nodes[node].depth
        position = growth.length + depth
        growth.add(node, self.model.reader.choices(growth.request, row, position, growth.children), price)

    def _forward(self, parts: Sequence[tuple[PassRows, Keys]]) -> Floats:
        """One pass; the wanted rows [wanted, logits]. `parts` are the rows of requests and the keys of their slots."""
        started = now_ms()
        batch = lay([rows for rows, _ in parts])
        model = self.model
        try:
            result = model.executable.forward(batch, model.kv, True)
        except BaseException:  # it may have written anything
            model.contents.clear()
            raise
        for rows, keys in parts:
            model.contents.write(rows.blocks, rows.start, keys)
        self.passes.append((batch, now_ms() - started))
        assert result.logits is not None
        if (result.argmax < 0).any():
            raise PilotfishError(f"the highest logit of the draft model {model.name} is not finite")
        return result.logits

    def _remember(self, known: _Known, growth: Growth) -> None:
        firsts = {node.parent: node.confidence for node in reversed(growth.nodes)}  # of siblings the likeliest
        if firsts:
            known.typical += FORGETTING * (sum(firsts.values()) / len(firsts) - known.typical)
        if any(node.path for node in growth.nodes):
            known.growth = growth

    def _settle(self, growth: Growth, blocks: Ints, keys: Keys, table: Sequence[int]) -> None:
        """Bring the KV of drafts that stood into the slots of their positions; a chain lies there already."""
        contents = self.model.contents
        at = growth.length
        if contents.computed(blocks, keys[:at]) < at:
            return
        nodes = {node.key: node for node in growth.nodes if node.slot is not None}
        moves: list[tuple[int, int]] = []
        while at < len(keys) and (node := nodes.get(int(keys[at]))) is not None:
            assert node.slot is not None
            if node.slot // BLOCK_SIZE >= len(blocks) or not contents.holds(blocks, node.slot, node.key):
                break
            if node.slot != at:
                moves.append((node.slot, at))
            at += 1
        if moves:
            self.model.kv.move(table, [source for source, _ in moves], [target for _, target in moves])
            for _, target in moves:
                contents.write(blocks, target, keys[target : target + 1])


def _further_keys(key: int, tokens: Sequence[int]) -> Keys:
    keys = []
    for token in tokens:
        key = next_key(key, token)
        keys.append(key)
    return np.array(keys, np.uint64)
