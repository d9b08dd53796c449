"""What a drafter is, what it is asked, and what it may be built from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pilotfish.config import ModelConfig
from pilotfish.params import SamplingParams
from pilotfish.program import KV, Backend, Executable, Program, Result
from pilotfish.tree import DraftTree, Ints, TreeBatch

MAX_DRAFT_TOKENS = 64
ADAPTIVE_DRAFT_TOKENS = 16  # the most that is drafted where the user fixes no k


@dataclass(frozen=True)
class Price:
    """What a draft has to bring so that it pays: the controller's view of the step, for drafters that take time.

    Time is worth `tokens_per_ms` there. `chance(id, depth, confidence)` is what a drafter's confidence in a node at
    that depth (from 1) of that request's tree has meant so far: the chance that the node stands if its parent does.
    """

    tokens_per_ms: float
    pass_ms: float  # one more pass of the drafter
    row_ms: Callable[[int], float]  # what the target's pass takes for one more row, beside so many rows of drafts
    chance: Callable[[int, int, float], float]

    def least(self, rows: int) -> float:
        """The chance to be emitted that a node needs to pay for its row, beside `rows` others."""
        return self.tokens_per_ms * self.row_ms(rows)

    def pays(self, survivals: Sequence[float], rows: int) -> bool:
        """Whether one more pass that gives nodes with these chances to be emitted, over all requests, is worth it.

        What was drafted already is never to be left out for its chance: the controller does that, when it knows all.
        """
        spent = self.tokens_per_ms * self.pass_ms + sum(self.least(rows + more) for more in range(len(survivals)))
        return sum(survivals) > spent


@dataclass(frozen=True)
class DraftRequest:
    """A request that may be drafted for in this step.

    `blocks` is its block table: the last committed token has slot len(tokens) - 1, and there is room for `budget` slots
    behind it, which are the drafter's to use in a KV of its own. Where the rule of verification keeps the target's law
    (`draws`) and the drafter draws its tokens, verify.py says what it has to heed; else tokens are best chosen with
    the noise that the target chooses with: `seed`, and the position of the token.
    """

    id: int
    tokens: Sequence[int]  # committed: prompt and output so far
    budget: int  # most nodes of the tree, at least 1
    max_depth: int  # deeper drafts could not be emitted, at least 1
    forced: Sequence[int] = ()  # what the request's structured output leaves no choice about
    prompt: int = 0  # how many of the tokens are the prompt
    computed: int | None = None  # tokens whose KV the target has; None: all but the last
    drafted: Sequence[int] = ()  # drafts that stand behind the tokens already: what follows them is asked for
    blocks: Sequence[int] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0

    @property
    def draws(self) -> bool:
        return self.params.temperature > 0 and self.params.acceptance != "match"


class Drafter(Protocol):
    """Proposes draft trees. It may fail or talk nonsense: that costs speed only."""

    name: str

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        """One tree for each request, empty where there is nothing to say.

        Without a `price` the budget is to be used up. A lookup, which takes no passes, may ignore the price.
        """

    def end(self, id: int) -> None:
        """The request is over; forget what was kept for it."""


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter whose proposals take passes through weights. It is asked only when that may pay."""

    passes: list[tuple[TreeBatch, float]]  # what the last proposal computed, and the ms it took; the asker empties it

    def backlog(self, request: DraftRequest) -> int:
        """Rows to compute for the request before the last token's: it was parked, or the prompt is new."""


@runtime_checkable
class Measurable(Protocol):
    """A drafter with passes of a program whose cost can be measured before any request runs."""

    name: str
    program: Program
    executable: Executable
    kv: KV


@runtime_checkable
class TargetPass(Protocol):
    """A drafter whose passes are a part of the target's own, which then need not be computed again."""

    def target_pass(
        self, batch: TreeBatch, logits: bool, ids: Sequence[int], trees: Sequence[DraftTree]
    ) -> Result | None:
        """What the target's pass over the batch gives, bit for bit, or None: there is nothing to go on with.

        `ids` and `trees` are those of the batch's requests, whose drafts were asked for in this step.
        """


@runtime_checkable
class Observer(Protocol):
    """A drafter that learns from the target's rows."""

    def observe(self, id: int, tree: DraftTree, choices: Ints) -> None:
        """`choices` [1 + nodes]: the likeliest token after the last committed token, and after each node of its tree.

        It is told for each request of its own after every step, `tree` being what was verified, whoever drafted it.
        """


@dataclass(frozen=True)
class Host:
    """What a drafter may be built from: the loaded target, and a place for what is dear to make."""

    config: ModelConfig
    program: Program
    executable: Executable
    weights: Mapping[str, object]  # the target's, as the backend holds them
    kv: KV  # the target's
    num_blocks: int
    backend: Backend
    tokenizer: Any  # loaders.tokenizer.Tokenizer, which only drafters of other tokenizers look into
    max_num_seqs: int
    kept: dict[Hashable, Any] = field(default_factory=dict)  # lives as long as the target: models, search results


@dataclass(frozen=True)
class Footprint:
    """The memory that a drafter takes beside the target's."""

    name: str
    weight_bytes: int
    kv_bytes_per_block: int


# name -> where its class is. A class has OPTIONS (speculation.py), is made by `make(host, **options)`, and where it
# takes memory of its own says so by `footprint(config, tokenizer, **options) -> Footprint`.
DRAFTERS: Mapping[str, str] = {
    "ngram": "pilotfish.drafters.ngram:NgramDrafter",
    "suffix": "pilotfish.drafters.suffix:SuffixDrafter",
    "lookahead": "pilotfish.drafters.lookahead:LookaheadDrafter",
    "grammar": "pilotfish.drafters.grammar:GrammarDrafter",
    "draft": "pilotfish.drafters.draft:DraftModelDrafter",
    "layer-skip": "pilotfish.drafters.layer_skip:LayerSkipDrafter",
}
