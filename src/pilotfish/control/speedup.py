"""What speculation brings, in closed form: tokens of a pass, speed-up, best draft length, break-even, roofline.

The formulas are those of Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding"
(ICML 2023), with the times of passes of one and of k + 1 rows told apart, which the paper takes to be equal. Floats
only; a *cost* is the time of a whole step (drafts and verification) over that of a step of plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_HALVINGS = 60  # of the interval [0, 1]: to the last bit of a double
_STEPS_PER_DOUBLING = 16  # of the batch sizes that `largest_paying_batch` tries
_NOISE = 1e-12  # a gain below this is rounding, not a gain


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens that a pass over `drafts` draft tokens emits on average, the recovered or bonus token included.

    Leviathan et al., equation (1): (1 - a^(k+1)) / (1 - a), for drafts that stand with chance a each, independently.
    Raises ValueError unless 0 <= acceptance <= 1 and drafts >= 0.
    """
    _check(acceptance, drafts)
    if acceptance == 0.0 or drafts == 0:
        return 1.0
    if acceptance == 1.0:
        return drafts + 1.0
    # Exact near 1, too, where 1 - a^(k+1) is not.
    return -math.expm1((drafts + 1) * math.log(acceptance)) / (1.0 - acceptance)


def speed_up(acceptance: float, drafts: int, cost: float) -> float:
    """Speed over plain decoding: tokens of a step over its cost.

    The general form of Leviathan et al., theorem 3.8: E(k) T(1) / (T_draft(k) + T(k + 1)).
    """
    return expected_tokens(acceptance, drafts) / cost


def flat_cost(drafts: int, draft_cost: float) -> float:
    """Cost of a step where a pass of many rows takes the time of one: k c + 1.

    Leviathan et al., theorem 3.8, with c of definition 3.7: one pass of the drafter over one of the target.
    """
    return drafts * draft_cost + 1.0


def rule_of_thumb(acceptance: float, drafts: int) -> float:
    """1 / (1 - a + a / (k + 1)): Amdahl's law with a share a made k + 1 times faster.

    For comparison only: it knows no cost of drafts, counts fewer tokens than equation (1), and rises in k for ever.
    """
    _check(acceptance, drafts)
    return 1.0 / (1.0 - acceptance + acceptance / (drafts + 1))


def best_drafts(acceptance: float, cost: Callable[[int], float], most: int) -> tuple[int, float]:
    """The k in 0 to `most` of the highest speed-up, and that speed-up; (0, 1.0) where no k pays.

    `cost(k)` is asked for k >= 1. Of equal ones the smallest k wins.
    """
    best, gain = 0, 1.0
    for drafts in range(1, most + 1):
        found = speed_up(acceptance, drafts, cost(drafts))
        if found > gain + _NOISE:
            best, gain = drafts, found
    return best, gain


def break_even(drafts: int, cost: float) -> float | None:
    """The acceptance rate at which `drafts` draft tokens neither gain nor lose: E(a, k) = cost, by bisection.

    0.0 where even refused drafts cost nothing, None where all drafts standing would not pay for them.
    """
    if cost <= 1.0:
        return 0.0
    if cost > drafts + 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if expected_tokens(middle, drafts) < cost:
            low = middle
        else:
            high = middle
    return high


def least_break_even(cost: Callable[[int], float], most: int) -> float | None:
    """The acceptance rate from which some k in 1 to `most` pays; None where none ever does.

    Where a pass of many rows takes the time of one this is c itself (Leviathan et al., corollary 3.9).
    """
    found = [rate for drafts in range(1, most + 1) if (rate := break_even(drafts, cost(drafts))) is not None]
    return min(found, default=None)


@dataclass(frozen=True)
class Load:
    """What one forward pass of a model moves and computes; a product and its sum are two operations."""

    weight_bytes: float  # read once in a pass, whatever its rows
    operations_per_row: float  # of its matrices
    kv_bytes_per_token: float
    attention_operations_per_token: float  # of one row over one token of context

    def share(self, of: float) -> Load:
        """A model that has this share of everything."""
        return Load(
            *(
                of * value
                for value in (
                    self.weight_bytes,
                    self.operations_per_row,
                    self.kv_bytes_per_token,
                    self.attention_operations_per_token,
                )
            )
        )


@dataclass(frozen=True)
class Roofline:
    """A device by two figures: what it reads from memory and what it computes in a second."""

    gb_per_s: float
    tflop_per_s: float

    def pass_ms(self, load: Load, batch: int, rows: int, context: int) -> float:
        """Milliseconds of a pass over `batch` requests with `rows` rows each, all at `context` tokens.

        Matrices and attention come one after the other, and each takes the longer of reading and computing (Williams
        et al. 2009, "Roofline"). Weights are read once, keys and values once for each request: its rows share them.
        Reads at this rate and nothing else: launches, barriers and sampling are left out.
        """
        tokens = batch * context
        matrices = self._ms(load.weight_bytes, batch * rows * load.operations_per_row)
        return matrices + self._ms(
            tokens * load.kv_bytes_per_token, tokens * rows * load.attention_operations_per_token
        )

    def ridge_rows(self, load: Load) -> float:
        """Rows of a pass from which its matrices wait for arithmetic instead of memory."""
        if load.operations_per_row == 0.0:
            return 0.0
        return load.weight_bytes / (self.gb_per_s * 1e9) / (load.operations_per_row / (self.tflop_per_s * 1e12))

    def cost(self, target: Load, drafter: Load | None, batch: int, context: int) -> Callable[[int], float]:
        """The cost of a step with k drafts for each request: k passes of the drafter and one of k + 1 rows.

        None as the drafter is one that reads no weights (n-gram, suffix).
        """
        plain_ms = self.pass_ms(target, batch, 1, context)
        draft_ms = 0.0 if drafter is None else self.pass_ms(drafter, batch, 1, context)
        return lambda drafts: (drafts * draft_ms + self.pass_ms(target, batch, drafts + 1, context)) / plain_ms

    def _ms(self, moved_bytes: float, operations: float) -> float:
        return 1e3 * max(moved_bytes / (self.gb_per_s * 1e9), operations / (self.tflop_per_s * 1e12))


def largest_paying_batch(pays: Callable[[int], bool], limit: int) -> int | None:
    """The largest batch size at which speculation pays; 0 where it never does, None where it still does at `limit`.

    Tries sizes close to each other and then halves the gap after the last that pays. With the roofline nothing changes
    beyond the batch at which one row each waits for arithmetic, so a limit above that is as good as none.
    """
    if pays(limit):
        return None
    sizes = sorted({min(limit, int(2 ** (step / _STEPS_PER_DOUBLING))) for step in range(_last_step(limit) + 1)})
    paying = [size for size in sizes if pays(size)]
    if not paying:
        return 0
    low = paying[-1]
    high = next(size for size in sizes if size > low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _last_step(limit: int) -> int:
    return math.ceil(_STEPS_PER_DOUBLING * math.log2(limit)) + 1


def _check(acceptance: float, drafts: int) -> None:
    if not 0.0 <= acceptance <= 1.0 or drafts < 0:
        raise ValueError(f"acceptance {acceptance} must lie in 0 to 1, and drafts {drafts} must not be negative")
