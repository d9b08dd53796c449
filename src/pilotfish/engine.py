"""The step loop: plan, draft, verify, commit. The only file that sees both the ledger and the compute."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pilotfish.backends.native import choose
from pilotfish.control.budget import BudgetController
from pilotfish.drafters.base import ADAPTIVE_DRAFT_TOKENS, Drafter, DraftRequest
from pilotfish.errors import InputError, PilotfishError
from pilotfish.kv.pool import BlockPool
from pilotfish.metrics import now_ms
from pilotfish.output import Detokenizer, OutputText
from pilotfish.program import BLOCK_SIZE, KV, Executable, Program, Result
from pilotfish.request import FinishReason, Request, SamplingParams
from pilotfish.scheduler import Scheduled, Scheduler, StepPlan
from pilotfish.tree import DraftTree, Rows, TreeBatch, Verdict
from pilotfish.verify import verify

logger = logging.getLogger("pilotfish")


@dataclass(frozen=True)
class Target:
    """The model whose output counts, ready to run, and what the engine must know about it."""

    program: Program
    executable: Executable
    kv: KV
    num_blocks: int
    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Update:
    """What a step brought to one request."""

    request: Request
    tokens: tuple[int, ...]
    text: str  # "" without a detokenizer
    finished: bool


@dataclass
class _Active:
    request: Request
    text: OutputText | None


class Engine:
    """Runs many requests in one batch. Not thread-safe: one thread steps it.

    `draft_budget` fixes how many tokens are drafted in a step; without it the controller chooses.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        draft_budget: int | None = None,
        *,
        max_num_seqs: int = 8,
        token_budget: int = 512,
        new_detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.budgets = BudgetController(ADAPTIVE_DRAFT_TOKENS, draft_budget)
        self.drafter_failures = 0
        self._parked = drafter is None
        self.scheduler = Scheduler(BlockPool(target.num_blocks), BLOCK_SIZE, token_budget, max_num_seqs)
        self._new_detokenizer = new_detokenizer
        self._active: dict[int, _Active] = {}
        self._next_id = 0

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request. Raises InputError when it can not be served."""
        context, vocab = self.target.program.context_length, self.target.program.vocab_size
        if len(prompt) >= context:
            raise InputError(
                f"the prompt has {len(prompt)} tokens; the context of {context} must leave room for one more"
            )
        for token in prompt:
            if not 0 <= token < vocab:
                raise InputError(f"the prompt has token id {token}; the vocabulary has ids 0..{vocab - 1}")
        if params.stop and self._new_detokenizer is None:
            raise InputError("stop strings need a tokenizer; without one give stop_token_ids")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(self._next_id, prompt, params, seed)
        limit = context if params.max_tokens is None else min(context, len(prompt) + params.max_tokens)
        self.scheduler.add(request.id, len(prompt), limit)
        text = OutputText(self._new_detokenizer(), params.stop) if self._new_detokenizer else None
        self._active[request.id] = _Active(request, text)
        self._next_id += 1
        return request

    def cancel(self, request: Request) -> None:
        """Drop a request that is not finished; its blocks are free at once."""
        if request.id in self._active:
            self._end(request.id)

    @property
    def busy(self) -> bool:
        return bool(self._active)

    def run(self) -> Iterator[Update]:
        """Step until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Update]:
        """One pass through the target's weights."""
        started = now_ms()
        plan = self.scheduler.schedule(self._budget)
        planned = now_ms()
        trees = self._propose(plan)
        draft_ms = now_ms() - planned
        batch = self._batch(plan, trees)
        computed = now_ms()
        result = self.target.executable.forward(batch, self.target.kv, self._needs_logits(plan))
        forward_ms = now_ms() - computed
        verdicts = self._verify(plan, trees, batch, result)
        updates = self._commit(plan, trees, verdicts)
        step_ms = now_ms() - started
        for update in updates:
            update.request.timings.add(len(update.tokens), step_ms, draft_ms, forward_ms)
            if update.finished:
                self._end(update.request.id)
        return updates

    def check(self) -> None:
        """Prove that ledger and requests agree; raises AssertionError when they do not."""
        self.scheduler.check()
        assert len(self.scheduler) == len(self._active)
        for id, active in self._active.items():
            assert self.scheduler.entry(id).length == len(active.request.tokens)

    def _budget(self, id: int) -> int:
        return 0 if self._parked else self.budgets.budget(id)

    def _propose(self, plan: StepPlan) -> list[DraftTree]:
        """A tree for every scheduled request. A drafter can fail, a request can not: a failure parks the drafter."""
        trees = [DraftTree.empty() for _ in plan.scheduled]
        asked = [index for index, item in enumerate(plan.scheduled) if item.draft_budget]
        if self.drafter is None or not asked:
            return trees
        items = [plan.scheduled[index] for index in asked]
        try:
            proposed = self.drafter.propose(
                [
                    DraftRequest(item.id, self._active[item.id].request.tokens, item.draft_budget, item.draft_depth)
                    for item in items
                ]
            )
            for index, item, tree in zip(asked, items, proposed, strict=True):
                tree.check(self.target.program.vocab_size)
                if len(tree) > item.draft_budget or (len(tree) and tree.depths().max() > item.draft_depth):
                    raise ValueError(f"a tree of {len(tree)} nodes exceeds its budget of {item.draft_budget}")
                trees[index] = tree
        except Exception as error:
            self.drafter_failures += 1
            self._parked = True
            logger.warning("drafter %s failed and is parked: %s: %s", self.drafter.name, type(error).__name__, error)
            return [DraftTree.empty() for _ in plan.scheduled]
        return trees

    def _batch(self, plan: StepPlan, trees: Sequence[DraftTree]) -> TreeBatch:
        return TreeBatch.build(
            [
                Rows(
                    tokens=self._active[item.id].request.tokens[item.start : item.start + item.count],
                    start=item.start,
                    blocks=self.scheduler.entry(item.id).blocks,
                    tree=tree,
                    logits=item.last,
                )
                for item, tree in zip(plan.scheduled, trees, strict=True)
            ]
        )

    def _needs_logits(self, plan: StepPlan) -> bool:
        return any(item.last and self._active[item.id].request.params.temperature > 0 for item in plan.scheduled)

    def _verify(
        self, plan: StepPlan, trees: Sequence[DraftTree], batch: TreeBatch, result: Result
    ) -> list[Verdict | None]:
        """A verdict for every request whose last token was computed, None for a prefill chunk before it."""
        verdicts: list[Verdict | None] = []
        for index, (item, tree) in enumerate(zip(plan.scheduled, trees, strict=True)):
            if not item.last:
                verdicts.append(None)
                continue
            root = int(batch.logit_starts[index])
            verdicts.append(verify(tree, self._picker(item, tree, root, result)))
        return verdicts

    def _picker(self, item: Scheduled, tree: DraftTree, root: int, result: Result) -> Callable[[int], int]:
        request = self._active[item.id].request
        if request.params.temperature == 0:
            return lambda node: _finite(int(result.argmax[root + 1 + node]))
        logits = result.logits
        assert logits is not None
        depths = tree.depths()
        first = len(request.tokens)  # the position of the token that the root row chooses

        def pick(node: int) -> int:
            position = first if node < 0 else first + int(depths[node])
            return choose(logits[root + 1 + node], request.params, request.seed, position)

        return pick

    def _commit(self, plan: StepPlan, trees: Sequence[DraftTree], verdicts: Sequence[Verdict | None]) -> list[Update]:
        updates = []
        for item, tree, verdict in zip(plan.scheduled, trees, verdicts, strict=True):
            end = item.start + item.count
            if verdict is None:
                self.scheduler.commit(item.id, end, 0)
                updates.append(Update(self._active[item.id].request, (), "", False))
                continue
            self._compact(item.id, end, verdict.path)
            update = self._append(item.id, verdict.tokens)
            # A request that ended inside the accepted drafts keeps only those before its end.
            accepted = min(len(verdict.path), len(update.tokens) - 1)
            self.scheduler.commit(item.id, end + accepted, len(update.tokens))
            update.request.counts.add(tree.drafter, len(tree), accepted)
            self.budgets.observe(item.id, len(tree), accepted)
            updates.append(update)
        return updates

    def _compact(self, id: int, end: int, path: Sequence[int]) -> None:
        """Bring the KV of the accepted path into the slots of its positions; a chain lies there already."""
        moves = [(end + node, end + depth) for depth, node in enumerate(path) if node != depth]
        if moves:
            blocks = self.scheduler.entry(id).blocks
            self.target.kv.move(blocks, [src for src, _ in moves], [dst for _, dst in moves])

    def _append(self, id: int, tokens: Sequence[int]) -> Update:
        """Add emitted tokens one by one, as plain decoding would, until the request ends."""
        active = self._active[id]
        request, params = active.request, active.request.params
        limit = self.scheduler.entry(id).limit
        shown: list[str] = []
        taken = 0
        for token in tokens:
            taken += 1
            request.tokens.append(token)
            reason: FinishReason | None = None
            if token in params.stop_token_ids or (token in self.target.eos_ids and not params.ignore_eos):
                reason = "stop"
            elif active.text is not None:
                shown.append(active.text.push(token))
                if active.text.stopped:
                    reason = "stop"
            if reason is None and len(request.tokens) >= limit:
                reason = "length"
            if reason is not None:
                request.finish_reason = reason
                if active.text is not None:
                    shown.append(active.text.finish())
                break
        return Update(request, tuple(tokens[:taken]), "".join(shown), request.finish_reason is not None)

    def _end(self, id: int) -> None:
        self.scheduler.finish(id)
        del self._active[id]
        self.budgets.end(id)
        if self.drafter is not None:
            try:
                self.drafter.end(id)
            except Exception as error:
                logger.warning("drafter %s could not end request %d: %s", self.drafter.name, id, error)


def _finite(token: int) -> int:
    if token < 0:
        raise PilotfishError("the target gave a logit that is not finite; its weights may be damaged")
    return token
