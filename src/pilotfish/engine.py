"""The step loop: plan, draft, verify, commit. The only file that sees both the ledger and the compute."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pilotfish.control.budget import BudgetController
from pilotfish.drafters.base import ADAPTIVE_DRAFT_TOKENS, MAX_DRAFT_TOKENS, Drafter, DraftRequest
from pilotfish.errors import InputError, RequestError
from pilotfish.history import History
from pilotfish.kv.pool import BlockPool
from pilotfish.metrics import now_ms
from pilotfish.node_rows import NodeRows, cut_illegal, token_logprob
from pilotfish.output import OutputText, Texts
from pilotfish.params import SamplingParams
from pilotfish.program import BLOCK_SIZE, KV, Executable, Program, Result
from pilotfish.request import FinishReason, Request
from pilotfish.sampling import Chance, Logits
from pilotfish.scheduler import Scheduled, Scheduler, StepPlan
from pilotfish.tree import DraftTree, Rows, TreeBatch, Verdict
from pilotfish.verify import RULES, Rule

LOGPROB_CHUNK = 64  # prompt tokens whose logits are kept at a time

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
    history: History | None  # None: nothing changes the logits
    forced: list[int] = field(default_factory=list)  # what the grammar forces in the step that is planned

    @property
    def needs_logits(self) -> bool:
        params = self.request.params
        return params.temperature > 0 or params.logprobs is not None or self.history is not None


class Engine:
    """Runs many requests in one batch. Not thread-safe: one thread steps it.

    `draft_budget` fixes how many tokens are drafted in a step; without it the controller chooses. `texts` is needed for
    requests with stop strings, bad words or structured output, and for updates with text. `watch` is called with each
    request and the target's rows [vocab] behind its new tokens, as the model gave them, before they are forgotten.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        draft_budget: int | None = None,
        *,
        max_num_seqs: int = 8,
        token_budget: int = 512,
        texts: Texts | None = None,
        watch: Callable[[Request, Sequence[Logits]], None] | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.budgets = BudgetController(ADAPTIVE_DRAFT_TOKENS, draft_budget)
        self.drafter_failures = 0
        self._parked = drafter is None
        self.scheduler = Scheduler(BlockPool(target.num_blocks), BLOCK_SIZE, token_budget, max_num_seqs)
        self._texts = texts
        self._watch = watch
        self._active: dict[int, _Active] = {}
        self._next_id = 0

    def add(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        """Queue a prompt: a request for each of its `params.n` samples, which share the prompt's KV.

        Raises InputError when it can not be served.
        """
        limit = self._limit(prompt, params)
        history = self._history(prompt, params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        requests: list[Request] = []
        for index in range(params.n):
            if index == 1:  # one sample tells of the prompt
                params = replace(params, prompt_logprobs=None)
            request = Request(self._next_id, prompt, params, (seed + index) % 2**64)
            # Logits of whole chunks of the prompt take memory, so these are short.
            chunk = None if params.prompt_logprobs is None else LOGPROB_CHUNK
            self.scheduler.add(request.id, len(prompt), limit, chunk, requests[0].id if requests else None)
            texts = self._texts
            text = OutputText(texts.new_detokenizer(), params.stop, params.min_tokens) if texts else None
            self._active[request.id] = _Active(request, text, history.copy() if history and requests else history)
            self._next_id += 1
            requests.append(request)
        return requests

    def _limit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """How many tokens the request may have in the end, if all it names exists."""
        context, vocab = self.target.program.context_length, self.target.program.vocab_size
        if len(prompt) >= context:
            raise InputError(
                f"the prompt has {len(prompt)} tokens; the context of {context} must leave room for one more"
            )
        named = {
            "the prompt": prompt,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "banned_token_ids": params.banned_token_ids,
            "stop_token_ids": params.stop_token_ids,
        }
        for name, ids in named.items():
            for token in ids:
                if not 0 <= token < vocab:
                    raise InputError(f"{name} has token id {token}; the vocabulary has ids 0..{vocab - 1}")
        if self._texts is None and (params.stop or params.bad_words or params.structured):
            raise InputError("stop strings, bad words and structured output need a tokenizer")
        return context if params.max_tokens is None else min(context, len(prompt) + params.max_tokens)

    def _history(self, prompt: Sequence[int], params: SamplingParams) -> History | None:
        if not params.adjusts:
            return None
        bad_words: list[Sequence[int]] = []
        grammar = None
        if self._texts is not None:
            bad_words = [ids for word in params.bad_words for ids in self._texts.spellings(word)]
            grammar = None if params.structured is None else self._texts.grammar(params.structured)
        return History(params, prompt, self.target.program.vocab_size, self._end_ids(params), bad_words, grammar)

    def _end_ids(self, params: SamplingParams) -> set[int]:
        return {*params.stop_token_ids, *(() if params.ignore_eos else self.target.eos_ids)}

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
        updates = self._judge(plan, trees, batch, result)
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
        if self._parked:
            return 0
        active = self._active[id]
        # What a grammar forces is right or nearly so, whatever became of other drafts.
        active.forced = active.history.forced() if active.history is not None else []
        budget = self.budgets.budget(id)
        if not active.forced:
            return budget
        return min(len(active.forced), MAX_DRAFT_TOKENS if self.budgets.fixed is None else budget)

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
                    DraftRequest(item.id, active.request.tokens, item.draft_budget, item.draft_depth, active.forced)
                    for item, active in ((item, self._active[item.id]) for item in items)
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
        for index, item in zip(asked, items, strict=True):
            history = self._active[item.id].history
            if history is not None:
                rule = self._active[item.id].request.params.acceptance
                trees[index] = cut_illegal(trees[index], history, exact_law=rule != "match")
        return trees

    def _batch(self, plan: StepPlan, trees: Sequence[DraftTree]) -> TreeBatch:
        return TreeBatch.build(
            [
                Rows(
                    tokens=self._active[item.id].request.tokens[item.start : item.start + item.count],
                    start=item.start,
                    blocks=self.scheduler.entry(item.id).blocks,
                    tree=tree,
                    logits=item.last or self._wants_prompt(item),
                    all_logits=self._wants_prompt(item),
                )
                for item, tree in zip(plan.scheduled, trees, strict=True)
            ]
        )

    def _wants_prompt(self, item: Scheduled) -> bool:
        """Whether these rows bring log-probabilities of prompt tokens that are due; after a preemption none are."""
        request = self._active[item.id].request
        known = len(request.prompt_logprobs)
        return request.params.prompt_logprobs is not None and item.start <= known < len(request.prompt) - 1

    def _needs_logits(self, plan: StepPlan) -> bool:
        return any(
            (item.last and (self._active[item.id].needs_logits or self._watch is not None)) or self._wants_prompt(item)
            for item in plan.scheduled
        )

    def _judge(self, plan: StepPlan, trees: Sequence[DraftTree], batch: TreeBatch, result: Result) -> list[Update]:
        """Decide what stands of each request's drafts, and take it in."""
        updates = []
        for index, (item, tree) in enumerate(zip(plan.scheduled, trees, strict=True)):
            active = self._active[item.id]
            request, end = active.request, item.start + item.count
            first, stop = int(batch.logit_starts[index]), int(batch.logit_starts[index + 1])
            if self._wants_prompt(item):
                self._take_prompt_logprobs(item, result, first)
            if not item.last:
                self.scheduler.commit(item.id, end, 0)
                updates.append(Update(request, (), "", False))
                continue
            root = stop - len(tree) - 1
            rows = NodeRows(result, root, tree, request.params, request.seed, len(request.tokens), active.history)
            try:
                verdict = self._rule(request)(tree, rows, Chance(request.seed, len(request.tokens)))
                updates.append(self._commit(item, tree, rows, verdict))
            except RequestError as error:
                request.finish_reason, request.error = "error", str(error)
                updates.append(Update(request, (), active.text.finish() if active.text else "", True))
        return updates

    def _rule(self, request: Request) -> Rule:
        # Without chance all rules are one, and this one needs no distributions.
        return RULES["match" if request.params.temperature == 0 else request.params.acceptance]

    def _take_prompt_logprobs(self, item: Scheduled, result: Result, first: int) -> None:
        """The row of each prompt token says how likely the next was; those that are known already stay."""
        request = self._active[item.id].request
        top, known = request.params.prompt_logprobs, len(request.prompt_logprobs)
        assert result.logits is not None and top is not None
        for position in range(known, min(item.start + item.count, len(request.prompt) - 1)):
            row = result.logits[first + position - item.start]
            request.prompt_logprobs.append(token_logprob(row, request.prompt[position + 1], top))

    def _commit(self, item: Scheduled, tree: DraftTree, rows: NodeRows, verdict: Verdict) -> Update:
        end = item.start + item.count
        self._compact(item.id, end, verdict.path)
        update = self._append(item.id, verdict.tokens)
        request, taken = update.request, len(update.tokens)
        # A request that ended inside the accepted drafts keeps only those before its end.
        accepted = min(len(verdict.path), taken - 1)
        self.scheduler.commit(item.id, end + accepted, taken)
        nodes = (-1, *verdict.path)[:taken]
        if request.params.logprobs is not None:
            request.logprobs += [rows.logprobs(node, token) for node, token in zip(nodes, update.tokens, strict=True)]
        if self._watch is not None:
            self._watch(request, [rows.logits(node) for node in nodes])
        request.counts.add(tree.drafter, len(tree), int(tree.depths().max(initial=0)), accepted)
        if not self._active[item.id].forced:
            self.budgets.observe(item.id, len(tree), accepted)
        self._active[item.id].forced = []
        return update

    def _compact(self, id: int, end: int, path: Sequence[int]) -> None:
        """Bring the KV of the accepted path into the slots of its positions; a chain lies there already."""
        moves = [(end + node, end + depth) for depth, node in enumerate(path) if node != depth]
        if moves:
            blocks = self.scheduler.entry(id).blocks
            self.target.kv.move(blocks, [src for src, _ in moves], [dst for _, dst in moves])

    def _append(self, id: int, tokens: Sequence[int]) -> Update:
        """Add emitted tokens one by one, as plain decoding would, until the request ends."""
        active = self._active[id]
        request, history = active.request, active.history
        end_ids = self._end_ids(request.params)
        limit = self.scheduler.entry(id).limit
        shown: list[str] = []
        taken = 0
        for token in tokens:
            taken += 1
            request.tokens.append(token)
            reason: FinishReason | None = None
            if history is not None:
                try:
                    history.walk(tokens[:taken])
                except RequestError as error:
                    reason, request.error = "error", str(error)
            if token in end_ids:
                reason = reason or "stop"
            elif active.text is not None:
                shown.append(active.text.push(token))
                if active.text.stopped:
                    reason = reason or "stop"
            if history is not None and history.ended:
                reason = reason or "stop"  # a structured output that is complete needs no end token
            if len(request.tokens) >= limit:
                reason = reason or "length"
            if reason is not None:
                request.finish_reason = reason
                if active.text is not None:
                    shown.append(active.text.finish())
                break
        if history is not None:
            history.commit()
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
