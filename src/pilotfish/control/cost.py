"""How long a forward pass takes on this machine, by what it has to do.

A pass of a model costs T(rows) + a * context + b * work + h * outputs. T is a table, as real curves have steps where
tiles fill and where reading weights stops being the bound; it is measured (calibrate.py) and never falls. The three
slopes are not negative. What real passes took then corrects the table: one factor for the speed of the machine, which
moves, and slower ones for each row count of the table and for what context and work cost.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from pilotfish.tree import TreeBatch

FORMAT = 1
TABLE_ROWS = 512  # up to here, or to the most rows that were measured, a prediction is one look into a list
MOST_ROWS = 1 << 16  # that can be measured
RECENT = 8  # passes that say how fast the machine is; the quarter at either end of them does not count
ERRORS = 64  # passes that `error` looks back on
FASTEST = math.log(8)  # bound of the speed factor, either way
FARTHEST = math.log(2)  # bound of a row count's factor, either way
SLOPED_FARTHEST = math.log(4)  # bound of the factor of context and work, either way
LAG = RECENT // 2  # passes after which it is decided what was due to the rows of a pass
LEARNING = 0.06  # share of a pass's rest that its row counts take over, once they have seen some passes
BEGINNING = 3  # the first passes of a row count have shares of 1 / BEGINNING, 1 / (BEGINNING + 1), ...
SLOPED_LEARNING = 0.3  # share that the factor of context and work takes over, times their part in the pass
TOLD = 0.004  # how far factors may move, all together, before predictions follow
BOUND_OF_REST = 0.2  # what of a rest counts, as a logarithm
_SOFT = 0.1  # relative residual above which a sample of the calibration loses weight
_SLOPES = ("context_ms", "work_ms", "output_ms")


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass has to do."""

    rows: int  # query rows of the pass
    context: int = 0  # sum over requests of the tokens whose KV is read, once for all rows of a request
    work: int = 0  # sum over rows of the tokens that each attends to
    outputs: int | None = None  # rows whose logits are wanted; None: all

    @staticmethod
    def of(batch: TreeBatch) -> Load:
        """What this batch has to do."""
        # Slots of a request ascend with its rows, so its last row tells how much KV there is.
        ends = batch.row_starts[1:].tolist()
        starts = batch.row_starts[:-1].tolist()
        slots = batch.slots.tolist()
        return Load(
            rows=batch.num_rows,
            context=sum(slots[end - 1] + 1 for start, end in zip(starts, ends, strict=True) if end > start),
            work=int(batch.positions.sum()) + batch.num_rows,
            outputs=len(batch.logit_rows),
        )


class CostModel:
    """Milliseconds of a forward pass of one model on this machine.

    Predictions never fall as rows, context, work or outputs grow.
    """

    def __init__(self, rows: Sequence[int], ms: Sequence[float], slopes: Sequence[float]) -> None:
        """`ms` at each of the ascending `rows`, and ms for each token of context and work and for each output.

        Raises ValueError when the numbers can not be a cost.
        """
        self._rows, self._ms, self._slopes = [*rows], [*map(float, ms)], [*map(float, slopes)]
        self._factors = [0.0] * len(self._rows)  # logarithms
        self._sloped = 0.0  # logarithm
        self._passes = [0.0] * len(self._rows)  # seen by each factor
        self._recent: deque[tuple[Load, float]] = deque(maxlen=RECENT)  # passes and the logarithms of their ms
        self._first_speed = 0.0  # logarithm, as all speeds
        self._set_speed(0.0)
        self._ratios: deque[float] = deque(maxlen=RECENT)  # of those passes, what they took over the table
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._check_base()
        self._end = max(TABLE_ROWS, self._rows[-1])
        self._tabulate()

    @staticmethod
    def fit(samples: Iterable[tuple[Load, float]]) -> CostModel:
        """The model of measured passes (load, ms). Passes that took no finite time do not count.

        Raises ValueError when none is left.
        """
        times: dict[Load, list[float]] = {}
        for load, ms in samples:
            if _is_time(ms) and 0 < load.rows <= MOST_ROWS:
                times.setdefault(load, []).append(ms)
        if not times:
            raise ValueError("a cost model needs at least one measured pass")
        points = [_Point(load, median(found), len(found)) for load, found in times.items()]
        rows = sorted({point.rows for point in points})
        slopes = [0.0] * len(_SLOPES)
        for _ in range(8):  # reweighted least squares: a pass that something else interrupted loses its say
            slopes = _fit_slopes(points)
            groups = [[point for point in points if point.rows == count] for count in rows]
            heights = [_height(group, slopes) for group in groups]
            for point in points:
                rest = abs(point.ms - heights[rows.index(point.rows)] - point.sloped(slopes)) / point.ms
                point.weight = min(1.0, _SOFT / rest) if rest else 1.0
        counts = [sum(point.count for point in group) for group in groups]
        return CostModel(rows, _never_falling(heights, counts), slopes)

    def ms(self, load: Load) -> float:
        """What a pass with this load would take, as far as is known. Raises ValueError for fewer than no rows."""
        rows = load.rows
        if 0 <= rows <= self._end:
            ms = self._table[rows]
        elif rows > 0:
            ms = self._table[self._end] + (rows - self._end) * self._beyond
        else:
            raise ValueError(f"a pass of {rows} rows")
        if load.outputs is not None:
            ms -= (rows - load.outputs) * self._output_ms
        return self._factor * (ms + load.context * self._context_ms + load.work * self._work_ms)

    def observe(self, load: Load, ms: float) -> None:
        """Take in that a pass took `ms`. Times that can not be (0, NaN, infinite) are ignored."""
        if not _is_time(ms) or load.rows <= 0:
            return
        predicted = self.ms(load)
        if not predicted > 0:
            return
        self._errors.append(abs(predicted - ms) / ms)
        # What each pass took over what the table says at speed 1; what is not known yet counts as no news.
        self._recent.append((load, math.log(ms)))
        self._ratios.append(_within(math.log(ms) - math.log(predicted) + self._speed, FASTEST))
        ratios = self._ratios
        middle = sorted([*ratios, *[self._first_speed] * (RECENT - len(ratios))])[RECENT // 4 : -(RECENT // 4)]
        self._set_speed(sum(middle) / len(middle))
        if len(ratios) > LAG:
            # Of this pass is known what came before and after: whether it was its rows or the machine.
            self._correct(self._recent[-1 - LAG][0], _within(ratios[-1 - LAG] - self._speed, BOUND_OF_REST))
            if self._untold > TOLD:  # a table takes longer than a pass of a small model may lose
                self._tabulate()

    def _correct(self, load: Load, rest: float) -> None:
        """Give the factors that a pass depends on their share of what it took beyond the speed."""
        part = self._factor * (load.context * self._context_ms + load.work * self._work_ms) / self.ms(load)
        for index, share in self._neighbours(load.rows):
            rate = share * (1 - part) * max(LEARNING, 1 / (BEGINNING + self._passes[index]))
            self._passes[index] += share
            self._untold += abs(rate * rest)
            self._factors[index] = _within(self._factors[index] + rate * rest, FARTHEST)
        self._untold += abs(SLOPED_LEARNING * part * rest)
        self._sloped = _within(self._sloped + SLOPED_LEARNING * part * rest, SLOPED_FARTHEST)

    def error(self) -> float:
        """Median |predicted - real| / real of recent passes, each predicted before it was observed; 0 if none was."""
        return median(self._errors) if self._errors else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything that predictions depend on, for JSON."""
        self._tabulate()
        return {
            "format": FORMAT,
            "rows": [*self._rows],
            "ms": [*self._ms],
            **dict(zip(_SLOPES, self._slopes, strict=True)),
            "speed": math.exp(self._speed),
            "sloped": math.exp(self._sloped),
            "factors": [math.exp(factor) for factor in self._factors],
        }

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> CostModel:
        """The model that `as_dict` described; raises ValueError when it is not one."""
        try:
            if d["format"] != FORMAT:
                raise ValueError(f"a cost model of format {d['format']!r}; it must be {FORMAT}")
            model = CostModel(d["rows"], d["ms"], [d[name] for name in _SLOPES])
            model._speed, model._sloped = math.log(d["speed"]), math.log(d["sloped"])
            model._factors = [math.log(factor) for factor in d["factors"]]
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"this is no cost model: {error!r}") from None
        if len(model._factors) != len(model._rows):
            raise ValueError("a cost model needs a factor for each row count")
        bounds = [(model._speed, FASTEST), (model._sloped, SLOPED_FARTHEST)]
        bounds += [(factor, FARTHEST) for factor in model._factors]
        if not all(abs(value) <= bound + 1e-9 for value, bound in bounds):
            raise ValueError("a factor of the cost model is out of bounds")
        model._first_speed = model._speed
        model._set_speed(model._speed)
        model._tabulate()
        return model

    def check(self) -> None:
        """Prove that predictions can not fall; raises AssertionError when they can."""
        self._check_base()
        assert len(self._table) == self._end + 1 and self._table[0] == 0
        assert all(math.isfinite(ms) for ms in self._table)
        for before, after in pairwise(self._table):
            assert after - self._output_ms >= before - 1e-9 * after
        assert self._table[1] > 0 and self._beyond >= 0
        assert min(self._context_ms, self._work_ms, self._output_ms) >= 0
        assert abs(self._speed) <= FASTEST + 1e-9
        assert all(abs(factor) <= FARTHEST + 1e-9 for factor in self._factors)
        assert abs(self._sloped) <= SLOPED_FARTHEST + 1e-9

    def _check_base(self) -> None:
        rows, ms = self._rows, self._ms
        if not rows or len(rows) != len(ms) or len(self._slopes) != len(_SLOPES):
            raise ValueError("a cost model needs a time for each row count, and three slopes")
        if not all(isinstance(count, int) and 0 < count <= MOST_ROWS for count in rows) or sorted(set(rows)) != rows:
            raise ValueError(f"the row counts of a cost model must ascend within 1..{MOST_ROWS}")
        if not all(map(_is_time, ms)) or sorted(ms) != ms:
            raise ValueError("the times of a cost model must be positive and never fall")
        if not all(math.isfinite(slope) and slope >= 0 for slope in self._slopes):
            raise ValueError("the slopes of a cost model must not be negative")

    def _neighbours(self, rows: int) -> list[tuple[int, float]]:
        """The entries of the table that a pass of so many rows tells about, and how much it does."""
        after = bisect_right(self._rows, rows)
        if after == 0:
            return [(0, 1.0)]
        if after == len(self._rows):
            return [(after - 1, 1.0)]
        share = (rows - self._rows[after - 1]) / (self._rows[after] - self._rows[after - 1])
        return [(after - 1, 1 - share), (after, share)]

    def _set_speed(self, speed: float) -> None:
        self._speed, self._factor = speed, math.exp(speed)

    def _tabulate(self) -> None:
        """Bring the corrections into the table, linear between its entries and beyond the last."""
        self._untold = 0.0
        context_ms, work_ms, self._output_ms = self._slopes
        sloped = math.exp(self._sloped)
        self._context_ms, self._work_ms = sloped * context_ms, sloped * work_ms
        heights = _never_falling(
            [ms * math.exp(factor) for ms, factor in zip(self._ms, self._factors, strict=True)],
            [1.0] * len(self._ms),
        )
        output = self._output_ms
        table = [0.0]  # no rows, no pass
        table += [heights[0] + output * rows for rows in range(1, self._rows[0])]
        slope = 0.0
        for first, last, low, high in zip(self._rows, self._rows[1:], heights, heights[1:], strict=False):
            slope = (high - low) / (last - first)
            low -= slope * first
            table += [low + (slope + output) * rows for rows in range(first, last)]
        low = heights[-1] - slope * self._rows[-1]
        table += [low + (slope + output) * rows for rows in range(self._rows[-1], self._end + 1)]
        self._table, self._beyond = table, slope + output
        for index, (load, taken) in enumerate(self._recent):
            self._ratios[index] = _within(taken - math.log(self.ms(load)) + self._speed, FASTEST)


class _Point:
    """A load, what it took in the median of `count` passes, and how much that counts."""

    def __init__(self, load: Load, ms: float, count: int) -> None:
        self.rows, self.ms, self.count, self.weight = load.rows, ms, count, 1.0
        self.features = (load.context, load.work, load.rows if load.outputs is None else load.outputs)

    def sloped(self, slopes: Sequence[float]) -> float:
        return sum(slope * feature for slope, feature in zip(slopes, self.features, strict=True))

    @property
    def relative_weight(self) -> float:
        """So that squares of relative errors are summed, not of milliseconds."""
        return self.count * self.weight / (self.ms * self.ms)


def _fit_slopes(points: Sequence[_Point]) -> list[float]:
    """The slopes, none negative, that best explain the differences between passes of equally many rows.

    Least squares; with three slopes all choices of which are zero are tried.
    """
    groups: dict[int, list[_Point]] = {}
    for point in points:
        groups.setdefault(point.rows, []).append(point)
    lines: list[tuple[float, list[float], float]] = []  # weight, features and ms around the means of the group
    for group in groups.values():
        total = sum(point.relative_weight for point in group)
        means = [
            sum(point.relative_weight * point.features[index] for point in group) / total
            for index in range(len(_SLOPES))
        ]
        mean_ms = sum(point.relative_weight * point.ms for point in group) / total
        for point in group:
            around = [feature - mean for feature, mean in zip(point.features, means, strict=True)]
            lines.append((point.relative_weight, around, point.ms - mean_ms))
    scales = [max(abs(around[index]) for _, around, _ in lines) or 1.0 for index in range(len(_SLOPES))]
    lines = [(weight, [x / s for x, s in zip(around, scales, strict=True)], y) for weight, around, y in lines]
    best, best_loss = [0.0] * len(_SLOPES), sum(weight * y * y for weight, _, y in lines)
    for count in range(1, len(_SLOPES) + 1):
        for chosen in combinations(range(len(_SLOPES)), count):
            found = _solve(
                [[sum(w * x[i] * x[j] for w, x, _ in lines) for j in chosen] for i in chosen],
                [sum(w * x[i] * y for w, x, y in lines) for i in chosen],
            )
            if found is None or min(found) < 0:
                continue
            loss = sum(w * (y - sum(s * x[i] for s, i in zip(found, chosen, strict=True))) ** 2 for w, x, y in lines)
            if loss < best_loss * (1 - 1e-9):
                best, best_loss = [0.0] * len(_SLOPES), loss
                for index, slope in zip(chosen, found, strict=True):
                    best[index] = slope / scales[index]
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of a small symmetric system by elimination; None when it is (nearly) singular."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        if abs(rows[pivot][column]) <= 1e-9 * abs(matrix[column][column]):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(size):
            if index != column:
                factor = rows[index][column] / rows[column][column]
                rows[index] = [a - factor * b for a, b in zip(rows[index], rows[column], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]


def _height(group: Sequence[_Point], slopes: Sequence[float]) -> float:
    """What passes of so many rows take beside the slopes; at least a little of it."""
    total = sum(point.relative_weight for point in group)
    mean = sum(point.relative_weight * (point.ms - point.sloped(slopes)) for point in group) / total
    return max(mean, 1e-3 * min(point.ms for point in group))


def _never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values, by squares, that never fall (isotonic regression: adjacent violators are pooled)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for mean, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] >= mean:
            other, more, many = pools.pop()
            mean = (mean * weight + other * more) / (weight + more)
            weight, count = weight + more, count + many
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _is_time(ms: float) -> bool:
    return isinstance(ms, (int, float)) and math.isfinite(ms) and ms > 0


def _within(value: float, bound: float) -> float:
    return max(-bound, min(bound, value))
