"""Where the time of requests and steps went, and how an engine stands."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass


def now_ms() -> float:
    return time.perf_counter() * 1e3


@dataclass
class Timings:
    """Wall-clock milliseconds of the steps a request took part in; steps shared with others count in full for each."""

    prefill_ms: float = 0.0  # steps up to and including the one that gave the first token
    decode_ms: float = 0.0  # all later steps, of which:
    draft_ms: float = 0.0  #   proposing drafts
    verify_ms: float = 0.0  #   the target's forward passes
    first_tokens: int = 0  # tokens that the prefill step gave
    decode_tokens: int = 0  # tokens that the later steps gave

    def add(self, tokens: int, step_ms: float, draft_ms: float, forward_ms: float) -> None:
        """Account one step that gave the request `tokens` tokens."""
        if self.first_tokens == 0:
            self.prefill_ms += step_ms
            self.first_tokens = tokens
        else:
            self.decode_ms += step_ms
            self.draft_ms += draft_ms
            self.verify_ms += forward_ms
            self.decode_tokens += tokens

    @property
    def overhead_ms(self) -> float:
        """Decoding outside of drafter and target."""
        return max(0.0, self.decode_ms - self.draft_ms - self.verify_ms)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed; 0 when everything came out of the prefill step."""
        return 1e3 * self.decode_tokens / self.decode_ms if self.decode_ms else 0.0


@dataclass(frozen=True)
class StepReport:
    """Where the time of a step went, in milliseconds."""

    rows: int
    draft_ms: float
    forward_ms: float
    step_ms: float


@dataclass(frozen=True)
class EngineStats:
    """How the engine stands; counts are since its start."""

    running: int
    waiting: int
    kv_usage: float  # blocks of running requests over all
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    drafter_failures: int
    decisions: Mapping[str, int]  # of the controller, in words
