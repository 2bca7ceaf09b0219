"""What steps cost, by their rows and by the passes of drafters in them: learnt from measured steps.

Only ratios matter for a choice of drafts. So a step is measured against the machine's current pace, which is followed
within some ten steps, and the ratios between kinds of steps are remembered for hundreds: another program that slows the
machine down for a while, or a context that grows, changes the pace and not the ratios.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

__all__ = ["CostPrior", "StepCosts"]

_LARGEST_WEIGHT = 1e60
_OFFSET_MEMORY = 0.998
"""By what the offset of a kind of step decays with every step of another kind."""


@dataclass(frozen=True)
class CostPrior:
    """Assumed costs before any step was measured, as fractions of a step with one row and no drafts."""

    row: float
    """Each row after the first."""
    draft: float
    """Each pass of the MTP head."""
    block: float = 0.1
    """The pass of the DFlash drafter, however few drafts it makes."""
    block_draft: float = 0.0
    """Each of these."""

    def __post_init__(self) -> None:
        if min(self.row, self.draft, self.block, self.block_draft) < 0:
            raise ValueError(f"costs are fractions of a step and cannot be negative: {self}")


class StepCosts:
    """What a step costs, by its rows, the MTP passes chained in it and the drafts of the DFlash drafter's pass.

    One for all sequences of an engine. A plane fitted to recent steps, cost = first + row x (rows - 1) + draft x
    chained + block + block draft x drafts, and for each kind of step its offset from the plane: some kernel sizes are
    faster than others. Offsets of kinds that have not occurred for long decay. The unit is about a plain step.
    """

    _MEMORY = 0.995
    """Factor on the weight of older steps per new one: a memory of about 200 steps."""
    _FIT_INTERVAL = 8
    _PRIOR_WEIGHTS = (0.1, 0.1, 0.1, 0.1, 10.0)
    """In steps: enough to separate rows from passes where the observed steps do not. One depth of blocks does not tell
    the pass from its drafts: until there are others, deeper ones cost no more."""
    _LEAST_FIRST = 0.01
    """Of a typical step: the least fixed cost, whatever the fit gives."""
    _SHORTEST = 1e-6
    """Where the clock has not advanced between start and end."""
    _NUM_PACES = 21
    """The pace is the median of so many steps."""
    _NUM_LATEST = 5
    _LEAST_SEEN = 3
    _WELL_SEEN, _SKIPPED = 16, 4
    """One in so many steps is measured of a kind without passes that was measured so often."""
    _LEAST_RATE = 0.03
    _NOISE_RATE = 0.02
    _USUAL_OFFSET = 0.06
    """How far from the plane a kind may be expected to lie, as a share of its cost."""
    _CLIPPED = (0.4, 1.5)
    """Outliers are clipped: a step counts as at least and at most so much of its expected cost."""

    def __init__(self, prior: CostPrior) -> None:
        self._prior = [1.0, prior.row, prior.draft, prior.block, prior.block_draft]
        self._plane = [*self._prior]
        # Least squares of relative errors; each step is its (1, rows - 1, chained, block, block drafts), over its cost.
        # Plain lists: between two steps, the processor's caches hold nothing of numpy.
        self._moments = [[0.0] * 5 for _ in range(5)]
        self._sums = [0.0] * 5
        self._unit = 1.0
        """The weight of the latest step: what is new weighs more and more, so that what is old need not be touched."""
        self._num_observed = self._num_fitted = self._num_skipped = 0
        """Steps so far, and of those the ones before the last fit."""
        self._paces_s = deque[float](maxlen=self._NUM_PACES)
        """Seconds of a cost of 1, by the latest steps."""
        self._pace_s = 0.0
        self._noise = self._USUAL_OFFSET
        """The mean relative error of what is expected."""
        self._offsets: dict[tuple[int, int, int], _Offset] = {}
        self._known: dict[tuple[int, int], _CostsByRows] = {}
        """Since the last fit. A choice compares dozens of steps, and a measured step changes the cost of one."""

    def cost(self, num_rows: int, num_chained: int, num_blocks: int = 0) -> float:
        """Of a step with `num_rows` rows, drafts included, that makes so many drafts by MTP and by DFlash for the next.

        `num_chained` MTP passes run one after the other, `num_blocks` drafts come from one pass.
        """
        return self.by_rows(num_chained, num_blocks)[num_rows]

    def by_rows(self, num_chained: int, num_blocks: int) -> Mapping[int, float]:
        """`cost` of steps that make so many drafts by MTP and by DFlash, by the number of rows."""
        found = self._known.get((num_chained, num_blocks))
        if found is None:
            found = _CostsByRows(lambda num_rows: self._expected((num_rows, num_chained, num_blocks)))
            self._known[num_chained, num_blocks] = found
        return found

    def _expected(self, key: tuple[int, int, int]) -> float:
        offset = self._offsets.get(key)
        # As of the last fit, so that it does not matter when it was asked for first.
        return self._on_plane(key) * (offset.ratio_at(self._num_fitted) if offset else 1.0)

    def seconds(self, num_rows: int, num_chained: int, num_blocks: int = 0) -> float:
        """The same at the machine's current pace; 0 before anything was observed."""
        return self._pace_s * self.cost(num_rows, num_chained, num_blocks)

    def observe(self, num_rows: int, num_chained: int, num_blocks: int, seconds: float) -> None:
        """Records a step that took `seconds`; of short ones whose cost is well known, one in some."""
        if not (num_chained or num_blocks) and self._may_skip(num_rows):
            return
        seconds = max(seconds, self._SHORTEST)
        key = num_rows, num_chained, num_blocks
        expected, known = self.cost(num_rows, num_chained, num_blocks), self._offsets.get(key)
        # A kind that was seen before differs because the pace does; a new one, because its cost is not known yet.
        is_known = known is not None and known.num_seen >= self._LEAST_SEEN + 2 * self._doubt
        if is_known or self._num_observed < self._LEAST_SEEN:
            self._pace_s = self._pace_with(seconds / expected)
        low, high = self._CLIPPED
        cost = min(max(seconds / self._pace_s, low * expected), high * expected)
        if known and known.num_seen >= self._LEAST_SEEN:
            self._noise += self._NOISE_RATE * (abs(cost / expected - 1) - self._noise)
        self._num_observed += 1
        parts = 1, num_rows - 1, num_chained, num_blocks > 0, num_blocks
        self._add((part, number / cost) for part, number in enumerate(parts))
        if self._num_observed < 2 * self._FIT_INTERVAL or self._num_observed % self._FIT_INTERVAL == 0:
            self._fit()
        self._put_offset(key, cost, known or _Offset(1.0, 0, self._num_observed))

    def _may_skip(self, num_rows: int) -> bool:
        """Whether a step without passes needs no measuring: to learn from it takes a hundredth of its time."""
        known = self._offsets.get((num_rows, 0, 0))
        if known is None or known.num_seen < self._WELL_SEEN * (1 + self._doubt):
            return False
        self._num_skipped = (self._num_skipped + 1) % self._SKIPPED
        return self._num_skipped != 0

    def _add(self, step: Iterable[tuple[int, float]]) -> None:
        """Counts in a step: its parts with their numbers."""
        self._unit /= self._MEMORY
        parts = [part for part in step if part[1]]
        for part, value in parts:
            self._sums[part] += self._unit * value
            for other, other_value in parts:
                self._moments[part][other] += self._unit * value * other_value
        if self._unit > _LARGEST_WEIGHT:
            self._sums = [value / self._unit for value in self._sums]
            self._moments = [[value / self._unit for value in row] for row in self._moments]
            self._unit = 1.0

    @property
    def _doubt(self) -> float:
        """Steps that it takes to tell an offset from noise."""
        return min(10.0, (self._noise / self._USUAL_OFFSET) ** 2)

    def _pace_with(self, latest_s: float) -> float:
        """The pace with the latest step counted in. Where the last few steps all differ, those before are dropped."""
        paces = self._paces_s
        paces.append(latest_s)
        pace_s, few = _median(paces), list(paces)[-self._NUM_LATEST :]
        latest_s = _median(few)
        if abs(latest_s / pace_s - 1) > max(2 * self._noise, self._USUAL_OFFSET):
            paces.clear()
            paces.extend(few)
            return latest_s
        return pace_s

    def _put_offset(self, key: tuple[int, int, int], cost: float, offset: "_Offset") -> None:
        ratio = offset.ratio_at(self._num_observed)
        # The noisier the machine is, the more steps it takes to tell that a kind is off the plane.
        doubt = self._doubt
        rate = max(1 / (offset.num_seen + 1 + doubt), self._LEAST_RATE / (1 + doubt))
        on_plane = self._on_plane(key)
        ratio += rate * (cost / on_plane - ratio)
        self._offsets[key] = _Offset(ratio, offset.num_seen + 1, self._num_observed)
        if known := self._known.get(key[1:]):
            known[key[0]] = on_plane * ratio

    def _on_plane(self, key: tuple[int, int, int]) -> float:
        first, row, draft, block, block_draft = self._plane
        return first + row * (key[0] - 1) + draft * key[1] + (block + block_draft * key[2] if key[2] else 0.0)

    def _fit(self) -> None:
        """Fits the plane to the steps and, where they leave it open, to the prior."""
        total = (1 - self._MEMORY**self._num_observed) / (1 - self._MEMORY)
        sums, prior = [value / self._unit for value in self._sums], self._prior
        typical = total / sums[0]
        # The prior's unit, from its prediction of the same steps.
        unit = total / sum(map(mul, prior, sums))
        moments = [[value / self._unit for value in row] for row in self._moments]
        for part, (assumed, steps) in enumerate(zip(prior, self._PRIOR_WEIGHTS, strict=True)):
            moments[part][part] += steps / typical**2
            sums[part] += steps / typical**2 * unit * assumed
        plane, parts = [0.0] * len(prior), [*range(len(prior))]
        while parts:
            solved = _solve([[moments[row][part] for part in parts] for row in parts], [sums[row] for row in parts])
            for part, value in zip(parts, solved, strict=True):
                plane[part] = value
            # No cost is negative: one that noise makes negative is set to 0, and the others are fitted again.
            negative = min(parts, key=lambda part: plane[part])
            if plane[negative] >= 0:
                break
            plane[negative] = 0.0
            parts.remove(negative)
        plane[0] = max(plane[0], self._LEAST_FIRST * typical)
        self._plane = plane
        self._num_fitted = self._num_observed
        self._known.clear()


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """X of matrix [n, n] x = right [n], for a matrix that is symmetric and positive definite."""
    rows, size = [[*row, value] for row, value in zip(matrix, right, strict=True)], len(right)
    for place, own in enumerate(rows):
        for row in rows[place + 1 :]:
            factor = row[place] / own[place]
            for column in range(place, size + 1):
                row[column] -= factor * own[column]
    solved = [0.0] * size
    for place in reversed(range(size)):
        known = sum(rows[place][other] * solved[other] for other in range(place + 1, size))
        solved[place] = (rows[place][size] - known) / rows[place][place]
    return solved


def _median(values: Iterable[float]) -> float:
    """The lower one of two: a stall makes no pace."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class _CostsByRows(dict[int, float]):
    """Costs by the number of rows, each computed when it is first asked for."""

    def __init__(self, compute: Callable[[int], float]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, num_rows: int) -> float:
        cost = self[num_rows] = self._compute(num_rows)
        return cost


class _Offset(NamedTuple):
    """The offset of one kind of step from the plane."""

    ratio: float
    num_seen: int
    last_seen: int
    """In observed steps."""

    def ratio_at(self, num_observed: int) -> float:
        return 1 + (self.ratio - 1) * math.pow(_OFFSET_MEMORY, max(0, num_observed - self.last_seen))
