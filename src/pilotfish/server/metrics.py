"""Prometheus metrics under vLLM's names, after the prefix `pilotfish:`. Each server has a registry of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pilotfish.metrics import EngineStats, StepReport
from pilotfish.request import Request

if TYPE_CHECKING:
    from pilotfish.server.engine_thread import Generation

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_MILLISECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0)


@dataclass
class _Seen:
    """What was counted of a request so far."""

    tokens: int = 0
    last: float = 0.0
    drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)


class Metrics:
    """All but `render` is called on the engine's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seen: dict[int, _Seen] = {}
        self._stats = EngineStats(0, 0, 0.0, 0, 0, 0, 0, {})

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"pilotfish:{name}", help, labels, registry=self.registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"pilotfish:{name}", help, registry=self.registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"pilotfish:{name}", help, buckets=buckets, registry=self.registry)

        self._drafts = counter("spec_decode_num_drafts", "Draft trees verified")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at each draft position", "position"
        )
        self._drafter_drafted = counter("drafter_draft_tokens", "Draft tokens verified of each drafter", "drafter")
        self._drafter_accepted = counter("drafter_accepted_tokens", "Draft tokens accepted of each drafter", "drafter")
        self._drafter_failures = counter("drafter_failures", "Times that a drafter failed and was parked")
        self._decisions = counter("speculation_decisions", "Decisions of the controller about drafters", "decision")
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token", _SECONDS)
        self._between = histogram(
            "inter_token_latency_seconds",
            "Time per token after the first; the tokens of one step share its time evenly",
            _TOKEN_SECONDS,
        )
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token", _SECONDS)
        self._draft_ms = histogram("draft_milliseconds", "Time of a step in the drafters", _MILLISECONDS)
        self._verify_ms = histogram("verify_milliseconds", "Time of a step in the target's pass", _MILLISECONDS)
        self._running = gauge("num_requests_running", "Requests in the batch")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for a place in the batch")
        self._kv = gauge("kv_cache_usage_perc", "Share of the KV cache that running requests hold; 1 is all")
        self._queried = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._preemptions = counter("num_preemptions", "Requests that gave up their blocks and came back")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that gave a first token")
        self._generated = counter("generation_tokens", "Tokens generated")
        self._success = counter("request_success", "Requests that ended, by how", "finished_reason")

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)

    def tokens(self, request: Request, count: int, arrived: float) -> None:
        """A step brought `count` tokens of a request that arrived at `arrived` (time.perf_counter)."""
        now = time.perf_counter()
        if count:
            seen = self._seen.setdefault(request.id, _Seen())
            if seen.tokens == 0:
                self._first.observe(now - arrived)
                self._prompt_tokens.inc(len(request.prompt))
            else:
                for _ in range(count):
                    self._between.observe((now - seen.last) / count)
            seen.tokens += count
            seen.last = now
            self._generated.inc(count)
            self._speculation(request, seen)
        if request.finish_reason is not None:
            self._seen.pop(request.id, None)
            self._whole.observe(now - arrived)

    def _speculation(self, request: Request, seen: _Seen) -> None:
        counts = request.counts
        drafts = counts.drafted_at[0] if counts.drafted_at else 0
        if drafts == seen.drafts:
            return
        self._drafts.inc(drafts - seen.drafts)
        seen.drafts = drafts
        seen.accepted_at.extend([0] * (len(counts.accepted_at) - len(seen.accepted_at)))
        for position, accepted in enumerate(counts.accepted_at):
            if accepted > seen.accepted_at[position]:
                self._accepted_at.labels(str(position)).inc(accepted - seen.accepted_at[position])
                seen.accepted_at[position] = accepted
        for name, drafter in counts.by_drafter.items():
            before = seen.by_drafter.get(name, (0, 0))
            drafted, accepted = drafter.drafted - before[0], drafter.accepted - before[1]
            self._draft_tokens.inc(drafted)
            self._accepted.inc(accepted)
            self._drafter_drafted.labels(name).inc(drafted)
            self._drafter_accepted.labels(name).inc(accepted)
            seen.by_drafter[name] = (drafter.drafted, drafter.accepted)

    def finished(self, reason: str, generation: Generation) -> None:
        """A sample ended by itself, or (abort, error) what is left of a generation did."""
        self._success.labels(reason).inc()
        if reason in ("abort", "error"):
            for request in (request for samples in generation.requests for request in samples):
                self._seen.pop(request.id, None)

    def step(self, report: StepReport | None) -> None:
        if report is not None:
            self._draft_ms.observe(report.draft_ms)
            self._verify_ms.observe(report.forward_ms)

    def stats(self, stats: EngineStats) -> None:
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._kv.set(stats.kv_usage)
        for counter, name in (
            (self._queried, "prefix_queried_tokens"),
            (self._hits, "prefix_hit_tokens"),
            (self._preemptions, "preemptions"),
            (self._drafter_failures, "drafter_failures"),
        ):
            now, before = getattr(stats, name), getattr(self._stats, name)
            counter.inc(now - before if now >= before else now)  # a new engine counts from 0
        for decision, count in stats.decisions.items():
            before = self._stats.decisions.get(decision, 0)
            self._decisions.labels(decision).inc(count - before if count >= before else count)
        self._stats = stats
