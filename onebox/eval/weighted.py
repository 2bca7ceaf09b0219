"""Weighted means over few independent items (passages), with intervals that hold from three items up.

Tokens of one passage are not independent, so the passage is the unit: its value is a mean over its tokens, its weight
the number of them. The variance is estimated without bias for unequal weights, and the quantiles are Student's with the
degrees of freedom that the weights leave (Satterthwaite, as Bell and McCaffrey use it for few clusters): n - 1 for n
equal weights, fewer if some dominate. `tests/eval/test_weighted.py` shows the coverage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onebox.bench.statistics import CONFIDENCE, Interval, quantile_of_normal, quantile_of_t, share_interval, student_t

__all__ = ["FEWEST_ITEMS", "WeightedMean", "weighted_mean"]

FEWEST_ITEMS = 3
"""Fewer items give no interval: with two, Student's quantile is 12.7 and the interval says nothing."""


@dataclass(frozen=True)
class WeightedMean:
    """sum(values) / sum(weights) with its standard error; both nan below `FEWEST_ITEMS` items, like every interval."""

    estimate: float
    error: float
    freedom: float
    num_items: int
    total: float
    """Sum of the weights."""

    @property
    def is_known(self) -> bool:
        """Whether there are enough items for an error."""
        return not math.isnan(self.error)

    @property
    def p_value(self) -> float:
        """Two-sided, of the mean being zero; nan where the error is."""
        if not self.is_known:
            return math.nan
        if self.error == 0:
            return 1.0 if self.estimate == 0 else 0.0
        return max(0.0, 2 * (1 - student_t(abs(self.estimate) / self.error, self.freedom)))

    def half_width(self, confidence: float = CONFIDENCE) -> float:
        return self.error * quantile_of_t(0.5 + confidence / 2, self.freedom) if self.is_known else math.nan

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        half = self.half_width(confidence)
        return Interval(self.estimate, self.estimate - half, self.estimate + half)

    def positive_interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Of a mean that cannot be negative: symmetric in its logarithm, which suits skewed values better."""
        if self.estimate <= 0 or not self.is_known:
            return self.interval(confidence)
        factor = math.exp(min(700.0, self.half_width(confidence) / self.estimate))
        return Interval(self.estimate, self.estimate / factor, self.estimate * factor)

    def share_interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Of a share: symmetric in its log odds.

        If all or none succeeded, there is no spread to go by: then it is Wilson's, every unit of weight a trial, their
        number lowered as Student's quantile is above the normal one (Korn and Graubard).
        """
        if not self.is_known:
            return self.interval(confidence)
        variance = self.estimate * (1 - self.estimate)
        if variance > 0:
            odds, half = math.log(self.estimate / (1 - self.estimate)), self.half_width(confidence) / variance
            low, high = (1 / (1 + math.exp(min(700.0, -end))) for end in (odds - half, odds + half))
            return Interval(self.estimate, low, high)
        probability = 0.5 + confidence / 2
        trials = self.total * (quantile_of_normal(probability) / quantile_of_t(probability, self.freedom)) ** 2
        found = share_interval(self.estimate * trials, trials, confidence)
        # Rounding must not exclude the estimate itself.
        return Interval(self.estimate, min(self.estimate, found.low), max(self.estimate, found.high))

    def num_needed(self, half_width: float, confidence: float = CONFIDENCE) -> int:
        """About how many items of this spread have an interval of this half-width; 0 if the spread is unknown."""
        if not self.is_known or half_width <= 0:
            return 0
        deviation = self.error * math.sqrt(self.num_items)
        num_items = FEWEST_ITEMS
        while deviation * quantile_of_t(0.5 + confidence / 2, num_items - 1) / math.sqrt(num_items) > half_width:
            num_items += max(1, num_items // 20)
        return num_items


def weighted_mean(sums: Sequence[float], weights: Sequence[float]) -> WeightedMean:
    """The mean sum(sums) / sum(weights) over items; an item's `sums` is over its `weights` units (tokens)."""
    sizes = np.asarray(weights, dtype=np.float64)
    total = float(sizes.sum())
    estimate = float(np.sum(sums)) / total if total else math.nan
    if len(sizes) < FEWEST_ITEMS:
        return WeightedMean(estimate, math.nan, math.nan, len(sizes), total)
    shares = sizes / total
    residuals = np.asarray(sums, dtype=np.float64) / sizes - estimate
    # A residual contains its own item's share of the estimate: its variance is this multiple of the item's.
    scale = shares**2 / (1 - 2 * shares + (shares**2).sum())
    variance = float((scale * residuals**2).sum())
    # The variance as a quadratic form of the values; Satterthwaite's degrees of freedom are its trace, squared, by that
    # of its square.
    centred = np.eye(len(sizes)) - shares
    form = centred.T @ (scale[:, None] * centred)
    freedom = float(np.trace(form) ** 2 / (form**2).sum())
    # What is left of equal values after rounding is no spread.
    if variance < (1e-12 * max(1e-300, abs(estimate))) ** 2:
        variance = 0.0
    return WeightedMean(estimate, math.sqrt(variance), freedom, len(sizes), total)
