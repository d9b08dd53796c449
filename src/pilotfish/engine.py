"""The step loop: plan, draft, verify, commit. The only file that sees both the ledger and the compute."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pilotfish.active import Active, Update, most_tokens, new_history
from pilotfish.control.controller import Controller
from pilotfish.control.cost import Load
from pilotfish.control.latency import LatencyGuard
from pilotfish.control.offers import StepShare
from pilotfish.drafters.base import ADAPTIVE_DRAFT_TOKENS, MAX_DRAFT_TOKENS, Drafter, DraftRequest
from pilotfish.drafters.speculation import Part, Speculation
from pilotfish.drafting import Drafting
from pilotfish.errors import PilotfishError, RequestError
from pilotfish.kv.pool import BlockPool
from pilotfish.metrics import EngineStats, StepReport, now_ms
from pilotfish.node_rows import NodeRows, cut_illegal
from pilotfish.output import OutputText, Texts
from pilotfish.params import SamplingParams
from pilotfish.program import BLOCK_SIZE, KV, Executable, Program, Result
from pilotfish.request import Request
from pilotfish.sampling import Chance, Logits
from pilotfish.scheduler import Scheduled, Scheduler, StepPlan
from pilotfish.team import Ask
from pilotfish.tree import DraftTree, Ints, Rows, TreeBatch, Verdict
from pilotfish.verify import RULES, Rule

TOKEN_BUDGET = 512  # rows of a step at most
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


class Engine:
    """Runs many requests in one batch. Not thread-safe: one thread steps it.

    `speculation` is that of requests that name none of their own; `make` builds the drafters that it and they name.
    Instead of it a `drafter` may be given, with a fixed `draft_budget` or, without it, what the `controller` chooses.
    `texts` is needed for requests with stop strings, bad words or structured output, and
    for updates with text. `watch` is called with each request and the target's rows [vocab] behind its new tokens, as
    the model gave them, before they are forgotten.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        draft_budget: int | None = None,
        *,
        speculation: Speculation | None = None,
        make: Callable[[Part], Drafter] | None = None,
        controller: Controller | None = None,
        max_num_seqs: int = 8,
        token_budget: int = TOKEN_BUDGET,
        texts: Texts | None = None,
        watch: Callable[[Request, Sequence[Logits]], None] | None = None,
    ) -> None:
        self.target = target
        self.controller = controller or Controller()
        self.drafting = Drafting(self.controller, target.program.vocab_size, make)
        self.scheduler = Scheduler(BlockPool(target.num_blocks), BLOCK_SIZE, token_budget, max_num_seqs)
        self.last_step: StepReport | None = None
        self._guard = LatencyGuard()
        if speculation is None:
            self._team = self.drafting.team_of(drafter, draft_budget)
        else:
            self._team = self.drafting.team(speculation)
        self.drafting.pin(self._team)
        self._texts = texts
        self._watch = watch
        self._active: dict[int, Active] = {}
        self._next_id = 0
        self._closed = False

    def close(self) -> None:
        """Another engine takes over the target's KV; this one must not step again."""
        self._closed = True
        self.drafting.close()

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        speculation: Speculation | None = None,
        priority: int = 0,
        answers: bool | None = None,
    ) -> list[Request]:
        """Queue a prompt: a request for each of its `params.n` samples, which share the prompt's KV.

        Without `speculation` the engine's own drafter serves it. A lower `priority` goes earlier. `answers` says
        whether the output is a text of its own or goes on after the prompt, by default what `texts` says. Raises
        InputError when it can not be served.
        """
        limit = most_tokens(self.target.program, prompt, params, self._texts)
        end_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.target.eos_ids)))
        history = new_history(prompt, params, self.target.program.vocab_size, end_ids, self._texts)
        team = self._team if speculation is None else self.drafting.team(speculation)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        requests: list[Request] = []
        for index in range(params.n):
            if index == 1:  # one sample tells of the prompt
                params = replace(params, prompt_logprobs=None)
            request = Request(self._next_id, prompt, params, (seed + index) % 2**64)
            # Logits of whole chunks of the prompt take memory, so these are short; cached KV gives no logits.
            wants_prompt = params.prompt_logprobs is not None
            self.scheduler.add(
                request.id,
                request.tokens,
                limit,
                priority=priority,
                chunk=LOGPROB_CHUNK if wants_prompt else None,
                sibling=requests[0].id if requests else None,
                reuse=not wants_prompt,
            )
            target_ms = None if speculation is None else speculation.latency_target_ms
            self.drafting.begin(request.id, team)
            self.controller.begin(request.id, target_ms)
            text = None
            if self._texts is not None:
                text = OutputText(self._texts.new_detokenizer(answers), params.stop, params.min_tokens)
            own_history = history.copy() if history is not None and requests else history
            self._active[request.id] = Active(request, end_ids, text, own_history, target_ms)
            self._next_id += 1
            requests.append(request)
        return requests

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
        """One pass through the target's weights. A request that can not go on ends with an error; the others go on.

        Raises PilotfishError when the engine is closed.
        """
        if self._closed:
            raise PilotfishError("a newer engine uses the model now; one may run at a time")
        started = now_ms()
        self.drafting.step()
        plan = self.scheduler.schedule(self._budget, self._most_prefill())
        try:
            # Before anyone drafts: a drafter may write to blocks that a copy is still to be made of.
            for copy in plan.copies:
                self.target.kv.move(
                    (copy.source, copy.target), range(copy.slots), range(BLOCK_SIZE, BLOCK_SIZE + copy.slots)
                )
            trees, draft_ms = self._propose(plan)
            computing = now_ms()
            batch = self._batch(plan, trees)
            logits = self._needs_logits(plan)
            result = self.drafting.target_pass(batch, logits, [item.id for item in plan.scheduled], trees)
            if whole := result is None:
                result = self.target.executable.forward(batch, self.target.kv, logits)
            forward_ms = now_ms() - computing
        except Exception as error:  # it hit the requests of this step and no others
            logger.exception("a step failed; %d requests end with it", len(plan.scheduled))
            updates = [self._active[item.id].fail(error) for item in plan.scheduled]
        else:
            updates = self._judge(plan, trees, batch, result)
            step_ms = now_ms() - started
            self._guard.observe(batch.num_rows, step_ms)
            if whole:
                self.controller.observe_pass(Load.of(batch), forward_ms)
            self._account(plan, trees, updates, draft_ms, step_ms)
            self.last_step = StepReport(batch.num_rows, draft_ms, forward_ms, step_ms)
            for update in updates:
                update.request.timings.add(len(update.tokens), step_ms, draft_ms, forward_ms)
        for update in updates:
            if update.finished:
                self._end(update.request.id)
        return updates

    def stats(self) -> EngineStats:
        """How it stands now."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_usage=scheduler.num_held_blocks / self.target.num_blocks,
            prefix_queried_tokens=cache.queried_tokens,
            prefix_hit_tokens=cache.hit_tokens,
            preemptions=scheduler.preemptions,
            drafter_failures=self.drafting.failures,
            decisions=dict(self.controller.decisions),
        )

    def check(self) -> None:
        """Prove that ledger and requests agree; raises AssertionError when they do not."""
        self.scheduler.check()
        assert len(self.scheduler) == len(self._active)
        for id, active in self._active.items():
            assert self.scheduler.entry(id).length == len(active.request.tokens)

    def _budget(self, id: int) -> int:
        room = self.drafting.room(id, ADAPTIVE_DRAFT_TOKENS)
        active = self._active[id]
        active.forced = []
        if room and active.history is not None:
            with suppress(RequestError):  # a grammar at its limits, which the request's own row will tell
                active.forced = active.history.forced()
        if self.drafting.fixed(id) is not None:
            return min(room, len(active.forced)) if active.forced else room
        return max(room, min(len(active.forced), MAX_DRAFT_TOKENS))

    def _most_prefill(self) -> int | None:
        """What latency targets leave for prompts beside the requests that generate."""
        running = [self._active[entry.id] for entry in self.scheduler.generating()]
        return self._guard.most_prefill(
            len(running),
            [
                active.latency_target_ms * max(1.0, active.request.counts.acceptance_length)
                for active in running
                if active.latency_target_ms is not None
            ],
        )

    def _propose(self, plan: StepPlan) -> tuple[list[DraftTree], float]:
        """A tree for every scheduled request, and how long they took."""
        started = now_ms()
        trees = [DraftTree.empty() for _ in plan.scheduled]
        asked = [index for index, item in enumerate(plan.scheduled) if item.draft_budget]
        if asked:
            asks = [self._ask(plan.scheduled[index]) for index in asked]
            emitting = [item.id for item in plan.scheduled if item.last]
            for index, tree in zip(asked, self.drafting.propose(asks, _load(plan), emitting), strict=True):
                trees[index] = tree
        return trees, now_ms() - started

    def _ask(self, item: Scheduled) -> Ask:
        active = self._active[item.id]
        request, history = active.request, active.history
        asked = DraftRequest(
            item.id,
            request.tokens,
            item.draft_budget,
            item.draft_depth,
            active.forced,
            prompt=len(request.prompt),
            computed=item.start,
            blocks=self.scheduler.entry(item.id).blocks,
            params=request.params,
            seed=request.seed,
        )

        def legal(tree: DraftTree) -> DraftTree:
            if history is None:
                return tree
            try:
                return cut_illegal(tree, history, asked.draws)
            except RequestError:  # a grammar at its limits, which the request's own row will tell
                return DraftTree.empty()

        return Ask(asked, legal, len(request.tokens))

    def _batch(self, plan: StepPlan, trees: Sequence[DraftTree]) -> TreeBatch:
        rows = []
        for item, tree in zip(plan.scheduled, trees, strict=True):
            active = self._active[item.id]
            tokens = active.request.tokens[item.start : item.start + item.count]
            whole = active.wants_prompt(item.start)
            blocks = self.scheduler.entry(item.id).blocks
            rows.append(Rows(tokens, item.start, blocks, tree, all_logits=whole, logits=item.last or whole))
        return TreeBatch.build(rows)

    def _needs_logits(self, plan: StepPlan) -> bool:
        return any(
            (item.last and (active.needs_logits or self._watch is not None)) or active.wants_prompt(item.start)
            for item, active in ((item, self._active[item.id]) for item in plan.scheduled)
        )

    def _judge(self, plan: StepPlan, trees: Sequence[DraftTree], batch: TreeBatch, result: Result) -> list[Update]:
        """Decide what stands of each request's drafts, and take it in."""
        updates = []
        for index, (item, tree) in enumerate(zip(plan.scheduled, trees, strict=True)):
            first, stop = int(batch.logit_starts[index]), int(batch.logit_starts[index + 1])
            try:
                updates.append(self._judge_one(item, tree, result, first, stop))
            except Exception as error:
                if not isinstance(error, RequestError):
                    logger.exception("request %d failed", item.id)
                updates.append(self._active[item.id].fail(error))
        return updates

    def _judge_one(self, item: Scheduled, tree: DraftTree, result: Result, first: int, stop: int) -> Update:
        """`first` and `stop`: where the request's rows lie in the result."""
        active = self._active[item.id]
        request = active.request
        request.cached_tokens = self.scheduler.entry(item.id).cached
        if active.wants_prompt(item.start):
            assert result.logits is not None
            active.take_prompt_logprobs(item.start, result.logits[first : first + item.count])
        if not item.last:
            self.scheduler.commit(item.id, item.start + item.count, 0)
            return Update(request, (), "", False)
        length = len(request.tokens)
        rows = NodeRows(result, stop - len(tree) - 1, tree, request.params, request.seed, length, active.history)
        verdict = self._rule(request)(tree, rows, Chance(request.seed, length))
        choices = result.argmax[stop - len(tree) - 1 : stop] if self.drafting.observes(item.id) else None
        return self._commit(item, tree, rows, verdict, choices)

    def _rule(self, request: Request) -> Rule:
        # Without chance all rules are one, and this one needs no distributions.
        return RULES["match" if request.params.temperature == 0 else request.params.acceptance]

    def _commit(
        self, item: Scheduled, tree: DraftTree, rows: NodeRows, verdict: Verdict, choices: Ints | None
    ) -> Update:
        active, end = self._active[item.id], item.start + item.count
        self._compact(item.id, end, verdict.path)
        update = active.append(verdict.tokens, self.scheduler.entry(item.id).limit)
        request, taken = update.request, len(update.tokens)
        # A request that ended inside the accepted drafts keeps only those before its end.
        accepted = min(len(verdict.path), taken - 1)
        self.scheduler.commit(item.id, end + accepted, taken)
        nodes = (-1, *verdict.path)[:taken]
        if request.params.logprobs is not None:
            request.logprobs += [rows.logprobs(node, token) for node, token in zip(nodes, update.tokens, strict=True)]
        if self._watch is not None:
            self._watch(request, [rows.logits(node) for node in nodes])
        request.counts.add(tree, verdict.path[:accepted])
        self.drafting.observe(item.id, tree, verdict.path, accepted, choices, verdict.tokens)
        return update

    def _account(
        self, plan: StepPlan, trees: Sequence[DraftTree], updates: Sequence[Update], draft_ms: float, step_ms: float
    ) -> None:
        """Tell the controller what the step cost each request that drafts are made for, and what it brought."""
        emitting = [index for index, item in enumerate(plan.scheduled) if item.last]
        if not any(self.drafting.speculates(plan.scheduled[index].id) for index in emitting):
            return
        plain = _load(plan)
        nodes = sum(len(tree) for tree in trees)
        outputs = None if plain.outputs is None else plain.outputs + nodes
        drafted = Load(plain.rows + nodes, plain.context, plain.work + nodes * plain.context, outputs)
        plain_ms = self.controller.costs.ms(plain)
        verify_ms = self.controller.costs.ms(drafted) - plain_ms
        more_ms = self.controller.plain_ms([plan.scheduled[index].start for index in emitting])
        drafting = sum(plan.scheduled[index].draft_budget > 0 for index in emitting)
        for index in emitting:
            id, tree, count = plan.scheduled[index].id, trees[index], len(emitting)
            if self.drafting.speculates(id):
                share = StepShare(
                    draft_ms / drafting if plan.scheduled[index].draft_budget else 0.0,
                    verify_ms * len(tree) / nodes if nodes else 0.0,
                    step_ms / count,
                    plain_ms / count,
                    more_ms / count,
                )
                what = "+".join(dict.fromkeys(tree.all_drafters())) or "plain"
                self.controller.account(id, what, len(updates[index].tokens), share)

    def _compact(self, id: int, end: int, path: Sequence[int]) -> None:
        """Bring the KV of the accepted path into the slots of its positions; a chain lies there already."""
        moves = [(end + node, end + depth) for depth, node in enumerate(path) if node != depth]
        if moves:
            blocks = self.scheduler.entry(id).blocks
            self.target.kv.move(blocks, [src for src, _ in moves], [dst for _, dst in moves])

    def _end(self, id: int) -> None:
        self.scheduler.finish(id)
        request = self._active.pop(id).request
        if self.drafting.speculates(id):
            request.report = self.controller.report(id)
        self.drafting.end(id)
        self.controller.end(id)


def _load(plan: StepPlan) -> Load:
    """What the planned pass has to do without any drafts."""
    rows = sum(item.count for item in plan.scheduled)
    context = sum(item.start + item.count for item in plan.scheduled)
    work = sum(item.count * item.start + item.count * (item.count + 1) // 2 for item in plan.scheduled)
    return Load(rows, context, work, sum(item.last for item in plan.scheduled))
