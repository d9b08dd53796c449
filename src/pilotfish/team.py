"""A drafter and how it stands, the drafters of a request, and what these have for it in a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pilotfish.drafters.base import Drafter, DraftRequest, ModelDrafter, Observer, TargetPass
from pilotfish.tree import DraftTree
from pilotfish.watchdog import TookTooLong, Watchdog

FIRST_PARK, LONGEST_PARK = 64, 65536  # steps that a drafter rests after a failure

logger = logging.getLogger("pilotfish")


@dataclass(frozen=True)
class Ask:
    """A request that may be drafted for in this step.

    `legal` cuts what the request's masks would refuse. `context` is how many tokens it has.
    """

    request: DraftRequest
    legal: Callable[[DraftTree], DraftTree]
    context: int


@dataclass
class Member:
    """A drafter, and how it stands."""

    drafter: Drafter
    requests: set[int] = field(default_factory=set)
    failures: int = 0  # in a row
    parked: int = 0  # until this step
    pinned: bool = False  # kept though nobody uses it
    lost: bool = False  # it did not come back in time, or can not be trusted any more

    @property
    def name(self) -> str:
        return self.drafter.name

    def __post_init__(self) -> None:
        self.has_passes = isinstance(self.drafter, ModelDrafter)
        self.passes_on = isinstance(self.drafter, TargetPass)
        self.observes = isinstance(self.drafter, Observer)
        self.whole = bool(getattr(self.drafter, "WHOLE", False))

    def ready(self, step: int) -> bool:
        """Whether it may be asked in this step."""
        return not self.lost and step >= self.parked

    def run(self, action: Callable[[], object], watchdog: Watchdog, limit_s: float, step: int) -> bool:
        """Run code of the drafter. False when it failed: it is then parked, or lost when it did not come back."""
        try:
            with watchdog.limit(limit_s):
                action()
            return True
        except TookTooLong:
            self.lost = True
            what = f"it took longer than {limit_s:g} s and is not asked again"
        except Exception as error:
            self.failures += 1
            rest = min(FIRST_PARK * 4 ** (self.failures - 1), LONGEST_PARK)
            self.parked = step + rest
            what = f"it is parked for {rest} steps: {type(error).__name__}: {error}"
        logger.warning("drafter %s failed: %s", self.name, what)
        return False


@dataclass(frozen=True)
class Team:
    """The drafters of a request, each with the most it may draft in a step; None: what the controller gives."""

    members: tuple[tuple[Member, int | None], ...]
    fixed: int | None  # the draft budget of all its steps, whatever it costs


@dataclass
class Offered:
    """What a request has been offered so far in this step."""

    tree: DraftTree = field(default_factory=DraftTree.empty)
    survivals: list[float] = field(default_factory=list)
    whole: bool = False
    asked: list[str] = field(default_factory=list)  # lookups that proposed

    @property
    def gain(self) -> float:
        return sum(self.survivals)
