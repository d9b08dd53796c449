"""Which layers of a target to leave out so that the rest drafts for it best: a search, and its result on disk.

The idea is SWIFT's (Xia et al. 2024): no training, sets of layers are scored by how often the view's likeliest token is
the target's, each in one parallel pass over a small text. SWIFT searches while requests run, at random with a Bayesian
step now and then; here it is done once for each model, greedily: the layers that change their rows least are tried
first (the block influence of ShortGPT, Men et al. 2024), and what is found is improved by exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pilotfish.control.speedup import speed_up
from pilotfish.loaders.kept import kept_or_made

FORMAT = 1  # of a file, and of what is searched
TRIED = 3  # layers that are tried in each round
ROUNDS = 12  # at most
PATIENCE = 2  # rounds without a better view after which it ends
EXCHANGES = 4  # tried at the end
LEAST_MATCH = 0.25  # a view that agrees less often is not thinned further
MOST_DRAFTS = 16
ROW_COST = 0.02  # of one more row in the target's pass, in passes of one row


class Trial(Protocol):
    """A view that has been run over the text."""

    @property
    def match(self) -> float:
        """How often its likeliest token is the target's, 0 to 1."""

    @property
    def influence(self) -> Mapping[int, float]:
        """For each layer that ran, how much it changes its rows: 1 - cosine."""


class Text(Protocol):
    """Something to run views over."""

    def run(self, skipped: frozenset[int], base: Trial | None) -> Trial:
        """One pass of the view without `skipped`; what `base` has in common with it need not be computed again."""


@dataclass(frozen=True)
class Found:
    """The layers to leave out, and what was found of them."""

    skipped: tuple[int, ...]  # ascending
    match: float  # on the text, a little too good: it was chosen for it
    draft_tokens: int  # for which this is expected:
    speed_up: float  # over plain decoding


def expected(skipped: int, match: float, layer_share: float) -> tuple[float, int]:
    """The best expected speed-up over numbers of drafts from 1, and that number.

    Leviathan et al. 2023, theorem 3.8, with the cost of a draft in passes of the target: `layer_share` less for each
    layer that is left out, plus a row in the target's pass.
    """
    cost = 1.0 - skipped * layer_share + ROW_COST
    gains = {drafts: speed_up(match, drafts, 1.0 + drafts * cost) for drafts in range(1, MOST_DRAFTS + 1)}
    drafts = max(gains, key=gains.__getitem__)  # the first of equals
    return gains[drafts], drafts


def search(
    text: Text, num_layers: int, layer_share: float, progress: Callable[[float], None] = lambda done: None
) -> Found:
    """The best set of layers to leave out, by at most 1 + ROUNDS * TRIED + EXCHANGES passes over the text.

    `layer_share` is the share of one layer in the time of a pass of the target; `progress` is told the share that is
    done. Raises ValueError for a model of one layer.
    """
    if num_layers < 2:
        raise ValueError("a model of one layer has none to leave out")
    most = 1 + ROUNDS * TRIED + EXCHANGES

    known: dict[frozenset[int], Trial] = {}

    def run(skipped: frozenset[int], base: Trial | None) -> Trial:
        if skipped not in known:
            progress(len(known) / most)
            known[skipped] = text.run(skipped, base)
        return known[skipped]

    def gain(skipped: frozenset[int], trial: Trial) -> float:
        return expected(len(skipped), trial.match, layer_share)[0]

    # The first and the last layer change everything, in models with enough layers to do without (SWIFT keeps them).
    free = frozenset(range(1, num_layers - 1) if num_layers > 3 else range(num_layers))
    group = max(1, num_layers // 24)  # left out in one round
    at: frozenset[int] = frozenset()
    trial = run(at, None)
    best: tuple[float, frozenset[int], Trial] | None = None
    in_vain = 0
    while len(known) < most - EXCHANGES and in_vain < PATIENCE:
        order = _least_influence(trial, free - at)
        sets = {at.union(order[first : first + group]) for first in range(TRIED) if first + group <= len(order)}
        sets = {skipped for skipped in sets if len(skipped) < num_layers}
        if not sets:
            break
        trials = [(skipped, run(skipped, trial)) for skipped in sorted(sets, key=sorted)]
        at, trial = max(trials, key=lambda item: (gain(*item), item[1].match))
        in_vain += 1
        if best is None or gain(at, trial) > best[0]:
            best, in_vain = (gain(at, trial), at, trial), 0
        if trial.match < LEAST_MATCH:
            break
    assert best is not None  # with two layers there is a set to try
    best = _exchange(run, gain, free, best)
    value, drafts = expected(len(best[1]), best[2].match, layer_share)
    progress(1.0)
    return Found(tuple(sorted(best[1])), best[2].match, drafts, value)


def _least_influence(trial: Trial, layers: frozenset[int]) -> list[int]:
    influence = trial.influence
    return sorted(layers, key=lambda layer: (influence[layer], layer))


def _exchange(
    run: Callable[[frozenset[int], Trial | None], Trial],
    gain: Callable[[frozenset[int], Trial], float],
    free: frozenset[int],
    best: tuple[float, frozenset[int], Trial],
) -> tuple[float, frozenset[int], Trial]:
    """Try other layers in place of those that are left out, the ones of least influence first."""
    for turn in range(EXCHANGES):
        _, skipped, trial = best
        order = _least_influence(trial, free - skipped)
        if not order:
            break
        back = sorted(skipped)[turn % len(skipped)]
        other = (skipped - {back}) | {order[turn // len(skipped) % len(order)]}
        tried = run(other, trial)
        if gain(other, tried) > best[0]:
            best = gain(other, tried), other, tried
    return best


def kept(key: Mapping[str, object], num_layers: int, folder: Path, search_now: Callable[[], Found]) -> Found:
    """The result for the model that `key` describes: out of `folder`, else searched and kept there.

    A file that is damaged or of another key is searched again. A folder that can not be written costs only the next
    start the time.
    """

    def read(fields: Any) -> Found:
        found = Found(
            tuple(int(layer) for layer in fields["skipped"]),
            float(fields["match"]),
            int(fields["draft_tokens"]),
            float(fields["speed_up"]),
        )
        if not _sound(found.skipped, num_layers):
            raise ValueError(f"no layers to skip of {num_layers}: {found.skipped}")
        return found

    return kept_or_made(
        folder,
        {"format": FORMAT, **key},
        "found",
        "which layers to skip",
        make=search_now,
        write=asdict,
        read=read,
    )


def _sound(skipped: Sequence[int], num_layers: int) -> bool:
    inside = all(0 <= layer < num_layers for layer in skipped)
    return inside and 0 < len(skipped) < num_layers and list(skipped) == sorted(set(skipped))
