"""Self-speculation: the target with fewer layers drafts for itself, with the same weights and in the target's own KV.

`exit=E` runs the first E layers (LayerSkip, Elhoushi et al. 2024), `skip=LIST` leaves layers out (Zhang et al. 2023,
"Draft & Verify"), `auto` searches which (layer_search.py). It takes no memory but the buffers of a pass.

Why writing into the target's KV is harmless. A draft pass computes the row of the last committed token, whose slot is
len(tokens) - 1, and then rows of drafts in the slots behind it. None of these slots holds anything: what is committed
has KV up to slot len(tokens) - 2, only full blocks of such KV are cached or shared, and the slots belong to the request
alone. The pass of the target in the same step computes the last committed token's row again, and rows of the drafts it
verifies, from those slots on and in every layer, before anything reads them; drafts that were cut leave KV in slots
that later steps write before they read. Earlier slots, which draft passes only read, hold the target's true KV of all
layers. So there is no KV to catch up with either, however long the drafter was parked, *provided that the committed
tokens before the last have KV when it drafts*: prefix copies are done before, and in a step that still computes a
prompt the drafts are guesses at best.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from pilotfish.backends.native import choose, log_probabilities
from pilotfish.drafters.base import DraftRequest, Host, Price
from pilotfish.drafters.layer_match import PROMPTS, TargetText
from pilotfish.drafters.layer_search import Found, kept, search
from pilotfish.drafters.speculation import Option, TextOption
from pilotfish.errors import InputError, PilotfishError
from pilotfish.loaders.demo import cache_folder
from pilotfish.loaders.kept import shown
from pilotfish.metrics import now_ms
from pilotfish.models.decoder import expected_shapes
from pilotfish.models.split import SplitExecutable, States, view
from pilotfish.program import BLOCK_SIZE, Floats, Result
from pilotfish.sampling import probabilities
from pilotfish.tree import DraftTree, Probs, Rows, TreeBatch

MOST_LAYERS = 1024  # of what an option may name
FIRST_CONFIDENCE = 0.8  # of a request whose drafts have not been seen
MEMORY = 0.8  # of the mean of a request's confidences: the weight of what came before
LEAST_KNOWN = 0.5  # of a batch's rows: below that the target's pass is not split

logger = logging.getLogger("pilotfish")

_DRAWS = 0x6C617965  # keeps the draws apart from other streams of the same seed


def parse_layers(text: str) -> tuple[int, ...]:
    """`8-15/20`: numbers and ranges with / between them -> the layers, ascending. Raises InputError."""
    layers: set[int] = set()
    for part in text.split("/"):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and int(end) < MOST_LAYERS for end in ends):
            raise InputError("must be layers and ranges of layers with / between them, as in 8-15/20")
        found = range(int(ends[0]), int(ends[1]) + 1)
        if not found:
            raise InputError(f"has the range {part}, which ends before it begins")
        if layers.intersection(found):
            raise InputError(f"names layers of {part} twice")
        layers.update(found)
    return tuple(sorted(layers))


def _check_search(text: str) -> None:
    if text != "auto":
        raise InputError("must be auto; layers are given as exit=E or skip=LIST")


@dataclass
class _Chain:
    """The drafts of one request while they are made."""

    request: DraftRequest
    pending: list[int]  # tokens whose rows the next pass computes
    room: int  # drafts that may still be added
    confidence: float  # what to expect of the next
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    laws: list[Probs | None] = field(default_factory=list)
    survival: float = 1.0

    @property
    def start(self) -> int:
        """The slot of the first pending token."""
        request = self.request
        return len(request.tokens) + len(request.drafted) + len(self.tokens) - len(self.pending)

    @property
    def depth(self) -> int:
        """Of the next draft in the request's tree."""
        return len(self.request.drafted) + len(self.tokens) + 1

    def tree(self, name: str) -> DraftTree:
        drawn = any(law is not None for law in self.laws)
        tree = DraftTree.chain(self.tokens, name, self.confidences)
        return DraftTree(tree.tokens, tree.parents, name, tuple(self.laws), tree.confidences) if drawn else tree


@dataclass
class _Early:
    """What draft passes left of a request: rows of the last committed token and of the drafts behind it."""

    length: int  # committed tokens
    drafts: list[int] = field(default_factory=list)
    hidden: list[Floats] = field(default_factory=list)  # [hidden] of each row: the token's, then the drafts'


class LayerSkipDrafter:
    """Chains from the target with some of its layers. All requests are drafted for in one batch for each pass."""

    name = "layer-skip"
    ONLY_AT_START = True  # a search takes seconds, and every choice of layers memory
    ARGUMENT = "search"
    OPTIONS: ClassVar[Mapping[str, Option | TextOption]] = {
        "exit": Option(None, 1, MOST_LAYERS, "layers that run, the first ones"),
        "skip": TextOption(None, "layers that are left out, as in 8-15/20, counted from 0", parse_layers),
        "search": TextOption(None, "auto: search which layers to leave out", _check_search),
    }

    def __init__(self, host: Host, layers: Sequence[int]) -> None:
        """Drafts with these layers, ascending. Raises InputError when they do not fit the model."""
        self.layers = tuple(layers)
        self.passes: list[tuple[TreeBatch, float]] = []
        self._host = host
        early = self.layers == tuple(range(len(self.layers)))
        taps = (len(self.layers),) if early else ()
        program = view(host.config, host.program, self.layers, taps)
        self._executable = host.backend.prepare(program, host.weights)
        self._split: SplitExecutable | None = None
        if early:
            at = len(self.layers)
            self._split = SplitExecutable(host.config, host.program, at, host.backend, host.weights)
        self._early: dict[int, _Early] = {}
        self._confidence: dict[int, float] = {}  # mean of each request's, the latest count most

    @classmethod
    def make(
        cls, host: Host | None, exit: int | None = None, skip: str | None = None, search: str | None = None
    ) -> LayerSkipDrafter:
        """Raises InputError when more than one of the options is given, or layers that the model does not have."""
        if host is None:
            raise InputError("layer-skip: there is no model to skip layers of")
        if sum(option is not None for option in (exit, skip, search)) > 1:
            raise InputError("layer-skip: give one of exit=E, skip=LIST and auto")
        count = host.config.num_layers
        if count < 2:
            raise InputError("layer-skip: the model has 1 layer, so none can be skipped")
        if exit is not None:
            if exit >= count:
                raise InputError(f"layer-skip: exit={exit} must lie in 1..{count - 1}; the model has {count} layers")
            return cls(host, range(exit))
        skipped = parse_layers(skip) if skip is not None else searched(host).skipped
        if skipped[-1] >= count:
            raise InputError(f"layer-skip: skip={skip} must name layers in 0..{count - 1}; the model has {count}")
        if len(skipped) == count:
            raise InputError(f"layer-skip: skip={skip} leaves none of the model's {count} layers")
        return cls(host, [layer for layer in range(count) if layer not in skipped])

    def backlog(self, request: DraftRequest) -> int:
        """0: the KV is the target's."""
        return 0

    def end(self, id: int) -> None:
        self._early.pop(id, None)
        self._confidence.pop(id, None)

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        chains = [self._chain(request) for request in requests]
        for request in requests:
            self._early.pop(request.id, None)
        going = [chain for chain in chains if chain.room > 0]
        while going:
            for chain, logits in zip(going, self._pass(going), strict=True):
                self._take(chain, logits, price)
            going = [chain for chain in going if chain.room > 0]
            if price is not None:
                going = _paying(going, price)
        return [chain.tree(self.name) for chain in chains]

    def target_pass(
        self, batch: TreeBatch, logits: bool, ids: Sequence[int], trees: Sequence[DraftTree]
    ) -> Result | None:
        """The target's pass over the batch, which goes on where this drafter's passes of this step have ended.

        Bit for bit what the whole program gives. `ids` and `trees` are those of the batch's requests; their drafts
        were asked for in this step, after prefix copies. None: there is not enough to go on with, or the drafter does
        not run the first layers of the target.
        """
        if self._split is None:
            return None
        rows: list[int] = []
        hidden: list[Floats] = []
        for index, (id, tree) in enumerate(zip(ids, trees, strict=True)):
            early = self._early.pop(id, None)
            first = int(batch.row_starts[index])
            # A tree says that the request was drafted for in this step. Where the last committed token's row comes
            # first, all tokens before it had KV when it was drafted for.
            if early is None or not len(tree) or int(batch.slots[first]) != early.length - 1:
                continue
            known = 1 + _common(tree, early.drafts[: len(early.hidden) - 1])
            rows += range(first, first + known)
            hidden += early.hidden[:known]
        if len(rows) < LEAST_KNOWN * batch.num_rows or not rows:
            return None
        states = States(np.array(rows, np.int32), np.stack(hidden))
        return self._split.forward(batch, self._host.kv, logits, states)

    def _chain(self, request: DraftRequest) -> _Chain:
        computed = len(request.tokens) - 1 if request.computed is None else request.computed
        if computed < len(request.tokens) - 1:  # prompt tokens are still without KV in this step
            return _Chain(request, [], 0, FIRST_CONFIDENCE)
        slots = min(len(request.blocks) * BLOCK_SIZE, self._host.program.context_length)
        # The last draft's own row is not computed, so it needs no slot.
        room = min(request.budget, request.max_depth, slots - len(request.tokens) - len(request.drafted) + 1)
        pending = [request.tokens[-1], *request.drafted]
        return _Chain(request, pending, room, self._confidence.get(request.id, FIRST_CONFIDENCE))

    def _pass(self, chains: Sequence[_Chain]) -> Floats:
        """One pass over the pending tokens of all chains; the logits [chains, vocab] behind their last ones."""
        batch = TreeBatch.build([Rows(chain.pending, chain.start, chain.request.blocks) for chain in chains])
        started = now_ms()
        result = self._executable.forward(batch, self._host.kv, True)
        self.passes.append((batch, now_ms() - started))
        assert result.logits is not None
        if self._split is not None:
            for chain, first, end in zip(chains, batch.row_starts[:-1], batch.row_starts[1:], strict=True):
                request = chain.request
                early = self._early.setdefault(request.id, _Early(len(request.tokens)))
                early.drafts = [*request.drafted, *chain.tokens]
                early.hidden += list(result.taps[0][first:end])
        return result.logits

    def _take(self, chain: _Chain, logits: Floats, price: Price | None) -> None:
        """Add the token that follows."""
        request = chain.request
        try:
            token, confidence, law = _choose(request, logits, len(chain.tokens))
        except PilotfishError:  # no finite logits: there is nothing to say
            chain.room = 0
            return
        mean = MEMORY * self._confidence.get(request.id, FIRST_CONFIDENCE) + (1 - MEMORY) * confidence
        self._confidence[request.id] = chain.confidence = mean
        if price is not None:
            chain.survival *= price.chance(request.id, chain.depth, confidence)
        chain.tokens.append(token)
        chain.confidences.append(confidence)
        chain.laws.append(law)
        chain.pending = [token]
        chain.room -= 1


def _paying(chains: Sequence[_Chain], price: Price) -> list[_Chain]:
    """Those for which one more pass is worth it."""
    rows = sum(len(chain.tokens) for chain in chains)
    found: list[_Chain] = []
    survivals: list[float] = []
    for chain in chains:
        survival = chain.survival * price.chance(chain.request.id, chain.depth, chain.confidence)
        if survival > price.least(rows):
            found.append(chain)
            survivals.append(survival)
    return found if price.pays(survivals, rows) else []


def _choose(request: DraftRequest, logits: Floats, made: int) -> tuple[int, float, Probs | None]:
    """The next draft after `made`, the view's probability of it, and its law if it was drawn.

    A drawn token's confidence is the probability that was to be expected, so that it does not tell of the token.
    """
    behind = len(request.drafted) + made
    position = len(request.tokens) + behind
    if request.draws:
        law = probabilities(logits, request.params)
        held = np.cumsum(law)
        # Fresh in every step, and nothing that the target draws from: verify.py says why.
        rng = np.random.default_rng((_DRAWS, request.seed, len(request.tokens), behind))
        token = int(np.searchsorted(held, rng.random() * held[-1], side="right"))
        return token, float(law @ law), law
    token = choose(logits, request.params, request.seed, position)
    normaliser, _ = log_probabilities(logits, 0)
    return token, min(1.0, float(np.exp(float(logits[token]) - normaliser))), None


def _common(tree: DraftTree, drafts: Sequence[int]) -> int:
    """How many first nodes of the tree are the chain of these drafts: their rows lie in the same slots."""
    count = 0
    for token, parent, draft in zip(tree.tokens.tolist(), tree.parents.tolist(), drafts, strict=False):
        if token != draft or parent != count - 1:
            break
        count += 1
    return count


def searched(host: Host) -> Found:
    """The layers to leave out of the host's target: known, on disk, or searched for now, which takes seconds."""
    key = ("layer-skip", "auto")
    if key not in host.kept:
        found = host.kept[key] = _on_disk(host)
        logger.info(
            "layer-skip: leaves out %s of %d layers; %.0f %% of drafts are expected to stand, and %.2f x the speed of "
            "plain decoding at best, with k=%d",
            "/".join(map(str, found.skipped)),
            host.config.num_layers,
            100 * found.match,
            found.speed_up,
            found.draft_tokens,
        )
    known: Found = host.kept[key]
    return known


def _on_disk(host: Host) -> Found:
    config = host.config
    sizes = {name: int(np.prod(shape)) for name, shape in expected_shapes(config)}
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    head = sizes["embed"]

    def search_now() -> Found:
        with shown("searching which layers to skip (once)") as progress:
            prompts = [host.tokenizer.encode(prompt, special=True) for prompt in PROMPTS]
            text = TargetText(config, host.program, host.executable, host.backend, host.weights, prompts)
            share = layer / (layer * config.num_layers + head)
            return search(text, config.num_layers, share, progress)

    described = {"config": repr(config), "name": config.name, "weights": sum(sizes.values())}
    return kept(described, config.num_layers, cache_folder() / "layer-skip", search_now)
