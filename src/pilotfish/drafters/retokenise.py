"""Drafts with a model of another tokenizer, through the text that both spell.

The request's text is tokenised for the draft model, which goes on greedily; the bytes it adds are tokenised for the
target again, as a chain. Verification sees tokens of the target only, so nothing can be lost; where the two tokenizers
cut a text apart differently, a draft is rejected. Positions differ, so the draft model has blocks of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from pilotfish.drafters.base import DraftRequest, Host, Price
from pilotfish.drafters.draft_model import DraftModel
from pilotfish.drafters.passes import PassRows, lay, shares
from pilotfish.errors import PilotfishError
from pilotfish.loaders import LoadedModel
from pilotfish.loaders.tokenizer import Tokenizer
from pilotfish.metrics import now_ms
from pilotfish.params import SamplingParams
from pilotfish.program import BLOCK_SIZE, KV, Executable, Floats, Program
from pilotfish.tree import DraftTree, TreeBatch

WINDOW_BYTES = 64  # at the end of a text that may be cut into other tokens as it goes on
WINDOW_TOKENS = 12  # of the target's before a draft, which say how the draft is cut
_GREEDY = SamplingParams(temperature=0.0)


def valid_start(text: bytes) -> bytes:
    """The bytes up to the first that are no UTF-8, or that begin a character which is not all there."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def whole_characters(text: bytes | bytearray) -> int:
    """How many of the bytes do not belong to a last character that lacks some."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte & 0xC0 == 0x80:
            continue
        size = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(text) - back if size > back else len(text)
    return len(text)


@dataclass
class GrowingText:
    """A text that grows, in the tokens of one tokenizer: of those near its end some may change."""

    tokenizer: Tokenizer
    text: bytearray = field(default_factory=bytearray)
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # where in the text each token begins
    spelled: bool = True  # the tokens spell the text byte for byte, so it may be cut between them

    def extend(self, more: bytes) -> None:
        """Only the end of the text is tokenised again, unless the tokenizer changes a text that is cut there."""
        self.text += more
        kept = max(0, bisect_right(self.starts, (self.starts[-1] if self.starts else 0) - WINDOW_BYTES) - 1)
        while kept and self.text[self.starts[kept]] & 0xC0 == 0x80:  # inside a character
            kept -= 1
        if not (kept and self.spelled and self._tokenise(kept)):
            self._tokenise(0)

    def _tokenise(self, kept: int) -> bool:
        """Tokens from number `kept` on. False: they do not spell the text from there on."""
        first = self.starts[kept] if kept else 0
        rest = bytes(self.text[first:])
        ids = self.tokenizer.encode(rest.decode("utf-8", "replace"), special=True)
        ends = list(accumulate(len(self.tokenizer.token_bytes(token)) for token in ids))
        extra = (ends[-1] if ends else 0) - len(rest)  # a token that begins every text, a space before it
        same = b"".join(self.tokenizer.token_bytes(token) for token in ids).endswith(rest)
        if kept:
            own = next((index for index, end in enumerate(ends) if end > extra), len(ids))
            if not same or (ends[own - 1] if own else 0) != extra:
                return False
            ids = ids[own:]
            ends = ends[own:]
        else:
            self.spelled = same
        self.tokens[kept:] = ids
        self.starts[kept:] = [first + max(0, end - extra) for end in [extra, *ends][: len(ids)]]
        return True


@dataclass
class _Request:
    """A request in the draft model's tokens."""

    text: GrowingText
    seen: int = 0  # the target's tokens that are in the text
    computed: list[int] = field(default_factory=list)  # tokens whose KV lies in `blocks`
    blocks: list[int] = field(default_factory=list)

    @property
    def agreeing(self) -> int:
        """How many tokens need not be computed; the last one always is."""
        most = min(len(self.computed), len(self.text.tokens) - 1)
        low, high = 0, most
        if self.computed[:most] == self.text.tokens[:most]:
            return most
        while low < high:  # both lists agree up to some place
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.computed[:middle] == self.text.tokens[:middle] else (low, middle - 1)
        return low


@dataclass
class _Draft:
    """What the draft model said of one request in this proposal."""

    index: int
    request: DraftRequest
    state: _Request
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    survival: float = 1.0


@dataclass(frozen=True)
class TextModel:
    """A draft model and the tokenizer that it needs; `note` says why."""

    model: DraftModel
    tokenizer: Tokenizer
    note: str

    @staticmethod
    def load(
        loaded: LoadedModel, tokenizer: Tokenizer, host: Host, weights: str | None, vocab: str, differing: int
    ) -> TextModel:
        """`differing` is a token that the target spells otherwise."""
        model = DraftModel.load(loaded, tokenizer, host, weights, vocab, loaded.config.vocab_size)
        target, draft = (t.token_bytes(differing).decode("utf-8", "replace") for t in (host.tokenizer, tokenizer))
        note = f"{model.name} has another tokenizer than the target (token {differing} is {draft!r}, not {target!r})"
        return TextModel(model, tokenizer, f"{note}: drafts go through text")


class RetokenisingDrafter:
    """Greedy chains at every temperature. Its KV has as many blocks as the target's; when they are taken, a request
    that needs more has no drafts. Drafts that stand behind the tokens already are not gone on with."""

    def __init__(self, model: TextModel, target: Tokenizer, num_blocks: int, name: str = "draft") -> None:
        self.name = name
        self.model = model.model
        self.note = model.note
        self.passes: list[tuple[TreeBatch, float]] = []
        self._draft = model.tokenizer
        self._target = target
        self._free = list(range(num_blocks - 1, -1, -1))
        self._requests: dict[int, _Request] = {}

    @property
    def program(self) -> Program:
        """What its passes compute, for whoever measures them."""
        return self.model.program

    @property
    def executable(self) -> Executable:
        return self.model.executable

    @property
    def kv(self) -> KV:
        """For someone who may write to it: nothing of it is believed afterwards."""
        self._forget()
        return self.model.kv

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        """Chains. Raises PilotfishError when the model's rows are broken."""
        asked = [
            _Draft(index, request, state)
            for index, request in enumerate(requests)
            if not request.drafted and (state := self._state(request)) is not None
        ]
        drafting: list[_Draft] = []
        parts: list[PassRows] = []
        starts = [draft.state.agreeing for draft in asked]
        rests = [len(draft.state.text.tokens) - start for draft, start in zip(asked, starts, strict=True)]
        for draft, start, share in zip(asked, starts, shares(rests), strict=True):
            state, tokens = draft.state, draft.state.text.tokens
            if not share or not self._make_room(state, len(tokens) + draft.request.budget):
                continue
            stop = start + share
            ready = stop == len(tokens)
            del state.computed[start:]
            state.computed += tokens[start:stop]
            parts.append(PassRows(tokens[start:stop], start, np.array(state.blocks, np.int32), int(ready)))
            if ready:
                drafting.append(draft)
        trees = [DraftTree.empty() for _ in requests]
        if parts:
            rows = self._forward(parts)
            alive = self._choose(drafting, rows, price)
            while alive and (
                price is None or price.pays([self._next(draft, price) for draft in alive], _rows(drafting))
            ):
                rows = self._forward([self._next_row(draft) for draft in alive])
                alive = self._choose(alive, rows, price)
            for draft in drafting:
                trees[draft.index] = self._in_target_tokens(draft)
        return trees

    def backlog(self, request: DraftRequest) -> int:
        """Rows beyond the last token's that the request's next proposal has to compute first."""
        state = self._state(request)
        return 0 if state is None else len(state.text.tokens) - 1 - state.agreeing

    def end(self, id: int) -> None:
        """The request is over; its blocks are free."""
        if (state := self._requests.pop(id, None)) is not None:
            self._free += state.blocks

    def _state(self, request: DraftRequest) -> _Request | None:
        """None: there is no draft for a text that ends inside a character, is empty or too long."""
        state = self._requests.setdefault(request.id, _Request(GrowingText(self._draft)))
        if state.seen < len(request.tokens):
            new = b"".join(self._target.token_bytes(token) for token in request.tokens[state.seen :])
            state.text.extend(new)
            first = state.seen == 0
            state.seen = len(request.tokens)
            if state.text.tokens:
                self.model.learn(np.array(state.text.tokens[state.agreeing :], np.int32), first)
        text = state.text
        usable = text.tokens and whole_characters(text.text[-4:]) == len(text.text[-4:])
        return state if usable and len(text.tokens) + request.budget <= self.model.program.context_length else None

    def _make_room(self, state: _Request, slots: int) -> bool:
        missing = max(0, -(-slots // BLOCK_SIZE) - len(state.blocks))
        if missing > len(self._free):
            return False
        for _ in range(missing):
            state.blocks.append(self._free.pop())
        return True

    def _next_row(self, draft: _Draft) -> PassRows:
        state = draft.state
        start = len(state.computed)
        state.computed.append(draft.tokens[-1])
        return PassRows(draft.tokens[-1:], start, np.array(state.blocks, np.int32), 1)

    def _choose(self, drafts: Sequence[_Draft], rows: Floats, price: Price | None) -> list[_Draft]:
        """Take a token for each; those that may go on."""
        floor = -1.0 if price is None else price.least(_rows(drafts))
        alive = []
        for draft, row in zip(drafts, rows, strict=True):
            request = draft.request
            greedy = DraftRequest(request.id, request.tokens, request.budget, request.max_depth, params=_GREEDY)
            choice = self.model.reader.choices(greedy, row, 0, 1)[0]
            if choice.token in self._draft.special_ids or choice.token in self._draft.eos_ids:
                continue  # its name is no text
            depth = len(draft.tokens) + 1
            chance = choice.confidence if price is None else price.chance(request.id, depth, choice.confidence)
            draft.tokens.append(choice.token)
            draft.confidences.append(choice.confidence)
            draft.survival *= chance
            # One more than the budget: the last token of the target's may have to be dropped.
            if depth <= min(request.budget, request.max_depth) and draft.survival > floor:
                alive.append(draft)
        return alive

    def _next(self, draft: _Draft, price: Price) -> float:
        """The survival that the next token is expected to have."""
        return draft.survival * price.chance(draft.request.id, len(draft.tokens) + 1, draft.confidences[-1])

    def _forget(self) -> None:
        for state in self._requests.values():
            state.computed.clear()

    def _forward(self, parts: Sequence[PassRows]) -> Floats:
        started = now_ms()
        batch = lay(parts)
        try:
            result = self.model.executable.forward(batch, self.model.kv, True)
        except BaseException:  # it may have written anything
            self._forget()
            raise
        self.passes.append((batch, now_ms() - started))
        assert result.logits is not None
        if (result.argmax < 0).any():
            raise PilotfishError(f"the highest logit of the draft model {self.model.name} is not finite")
        return result.logits

    def _in_target_tokens(self, draft: _Draft) -> DraftTree:
        """The chain of the target's tokens that the drafted bytes spell."""
        request = draft.request
        spelled = [self._draft.token_bytes(token) for token in draft.tokens]
        new = valid_start(b"".join(spelled))
        if not new:
            return DraftTree.empty()
        window = list(request.tokens[-WINDOW_TOKENS:])
        control = [at for at, token in enumerate(window) if token in self._target.special_ids]
        window = window[control[-1] + 1 if control else 0 :]
        before = b"".join(self._target.token_bytes(token) for token in window)
        ids = self._encode(before + new)
        # If not, the window begins inside what the tokenizer would take together.
        ids = ids[len(window) :] if ids[: len(window)] == window else self._encode(new)
        confidences = self._confidences(ids, spelled, draft.confidences)
        # The text may go on inside the last token, unless the draft model, too, took it for one.
        if ids and self._target.token_bytes(ids[-1]) != spelled[-1]:
            ids.pop()
        most = min(request.budget, request.max_depth)
        ids = ids[:most]
        return DraftTree.chain(ids, self.name, confidences[: len(ids)])

    def _encode(self, text: bytes) -> list[int]:
        return self._target.encode(text.decode("utf-8", "replace"), special=False)

    def _confidences(self, ids: Sequence[int], spelled: Sequence[bytes], given: Sequence[float]) -> list[float]:
        """For each of the target's tokens those of the draft's that begin in it, multiplied."""
        starts = [0, *accumulate(len(piece) for piece in spelled)]
        confidences, at = [], 0
        for token in ids:
            end = at + len(self._target.token_bytes(token))
            inside = [value for start, value in zip(starts, given, strict=False) if at <= start < end]
            confidences.append(float(np.prod(inside)))
            at = end
        return confidences


def _rows(drafts: Sequence[_Draft]) -> int:
    return sum(len(draft.tokens) for draft in drafts)
