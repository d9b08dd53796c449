"""How many prompt tokens a step may hold so that the requests that generate beside them keep their latency.

A request may name a target for the time of each of its tokens. A pass of some rows takes about a + b rows; a and b are
learnt from real steps, recent ones counting more. The guard then bounds prompt tokens, never generating requests: a
target that even these miss can not be kept by waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MEMORY = 0.97  # weight of the past at each step
LEAST_PREFILL = 16  # tokens in a step, so that prompts go on
STALL_MS = 500.0  # that a step may take beside generating requests that name no target


class LatencyGuard:
    """Fits step times and says what they allow."""

    def __init__(self) -> None:
        self._count = self._rows = self._ms = self._rows2 = self._rows_ms = 0.0

    def observe(self, rows: int, ms: float) -> None:
        """Take in a step of `rows` rows that took `ms`."""
        self._count = MEMORY * self._count + 1
        self._rows = MEMORY * self._rows + rows
        self._ms = MEMORY * self._ms + ms
        self._rows2 = MEMORY * self._rows2 + rows * rows
        self._rows_ms = MEMORY * self._rows_ms + rows * ms

    def cost(self) -> tuple[float, float] | None:
        """(ms of a pass, ms of each row), None as long as steps were too few or too alike to tell."""
        spread = self._count * self._rows2 - self._rows * self._rows
        if self._count < 3 or spread < 1e-6 * self._count * self._rows2:
            return None
        per_row = max(0.0, (self._count * self._rows_ms - self._rows * self._ms) / spread)
        return max(0.0, (self._ms - per_row * self._rows) / self._count), per_row

    def most_prefill(self, generating_rows: int, step_targets_ms: Iterable[float]) -> int | None:
        """Prompt tokens beside `generating_rows` rows so that the step keeps the tightest target; None: no bound.

        Without a target no step may stall requests for longer than STALL_MS, as soon as it is known what rows cost.
        """
        if generating_rows == 0:
            return None
        target = min(step_targets_ms, default=math.inf)
        cost = self.cost()
        if cost is None or cost[1] == 0:
            return None if target == math.inf else LEAST_PREFILL  # careful while nothing is known
        rows = int((min(target, STALL_MS) - cost[0]) / cost[1]) - generating_rows
        return max(LEAST_PREFILL, rows)
