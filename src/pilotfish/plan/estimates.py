"""What speculation would bring: speed-up over draft length and batch size, by the formulas of control/speedup.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.control.speedup import (
    Load,
    Roofline,
    best_drafts,
    break_even,
    expected_tokens,
    flat_cost,
    largest_paying_batch,
    least_break_even,
    rule_of_thumb,
    speed_up,
)
from pilotfish.plan.machine import Machine
from pilotfish.plan.sizes import DRAFT_SHARES, ModelSizes

FREE = "no weights"  # n-gram and suffix drafters


@dataclass(frozen=True)
class Drafter:
    """What drafts, and what one of its passes moves; None: nothing."""

    name: str
    load: Load | None


@dataclass(frozen=True)
class Length:
    """One draft length k at one batch size; the ratios are over plain decoding."""

    drafts: int
    tokens: float  # emitted in a pass, equation (1)
    pass_ratio: float  # a pass of k + 1 rows over one of 1, for each request
    speed_up: float  # passes of k + 1 rows as the roofline has them
    flat: float  # theorem 3.8: passes of k + 1 rows as long as those of one
    rule_of_thumb: float
    break_even: float | None  # acceptance rate; None: never


@dataclass(frozen=True)
class BestAt:
    """The best draft length at one batch size; 0 is plain decoding."""

    batch: int
    drafts: int
    speed_up: float


@dataclass(frozen=True)
class Estimate:
    """One drafter at one acceptance rate."""

    drafter: str
    acceptance: float
    plain_ms: float  # a step of plain decoding at the batch and context
    cost_ratio: float  # c: one pass of the drafter over one of the target, at the batch and context
    lengths: tuple[Length, ...]
    best: BestAt
    break_even: float | None  # the least acceptance rate at which some length pays; None: never
    batches: tuple[BestAt, ...]
    pays_until: int | None  # the largest batch at which it pays, 0: none; None: at every one


def load_of(model: ModelSizes) -> Load:
    return Load(
        model.pass_bytes, model.operations_per_row, model.kv_bytes_per_token, model.attention_operations_per_token
    )


def drafters(target: ModelSizes, draft: ModelSizes | None) -> list[Drafter]:
    """The draft model, or without one the range of what there could be."""
    if draft is not None:
        return [Drafter(draft.name, load_of(draft))]
    shares = [Drafter(f"{100 * share:g} % of the target", load_of(target).share(share)) for share in DRAFT_SHARES]
    return [Drafter(FREE, None), *shares]


def estimate(
    target: ModelSizes,
    drafter: Drafter,
    machine: Machine,
    *,
    acceptance: float,
    batch: int,
    context: int,
    most_drafts: int,
    batches: Sequence[int],
) -> Estimate:
    """Everything about one drafter; `most_drafts` is the longest draft looked at."""
    roofline, load = Roofline(machine.gb_per_s, machine.tflop_per_s), load_of(target)
    cost = roofline.cost(load, drafter.load, batch, context)
    plain_ms = roofline.pass_ms(load, batch, 1, context)
    ratio = 0.0 if drafter.load is None else roofline.pass_ms(drafter.load, batch, 1, context) / plain_ms

    def best_at(size: int) -> BestAt:
        return BestAt(size, *best_drafts(acceptance, roofline.cost(load, drafter.load, size, context), most_drafts))

    # Beyond the batch where each model waits for arithmetic even with one row a request, all grows in step.
    ridges = [roofline.ridge_rows(part) for part in (load, drafter.load) if part is not None]
    limit = max(2, math.ceil(max(ridges)) + 1)
    return Estimate(
        drafter.name,
        acceptance,
        plain_ms,
        ratio,
        tuple(
            Length(
                drafts,
                expected_tokens(acceptance, drafts),
                roofline.pass_ms(load, batch, drafts + 1, context) / plain_ms,
                speed_up(acceptance, drafts, cost(drafts)),
                speed_up(acceptance, drafts, flat_cost(drafts, ratio)),
                rule_of_thumb(acceptance, drafts),
                break_even(drafts, cost(drafts)),
            )
            for drafts in range(1, most_drafts + 1)
        ),
        best_at(batch),
        least_break_even(cost, most_drafts),
        tuple(best_at(size) for size in batches),
        largest_paying_batch(lambda size: best_at(size).drafts > 0, limit),
    )
