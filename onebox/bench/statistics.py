"""Confidence intervals and tests for small samples.

Right-or-wrong answers of two servers to the same questions are compared by McNemar's exact test on the questions where
they differ, and by Tango's score interval, which remains valid if they never differ. Means are compared by Student's
and Welch's intervals. Independent of servers, questions and files.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CONFIDENCE",
    "Interval",
    "adjusted",
    "mcnemar",
    "paired_difference",
    "plain_json",
    "quantile_of_normal",
    "quantile_of_t",
    "score_interval",
    "share_interval",
    "student_t",
    "welch",
]

CONFIDENCE = 0.95
_MOST_CORRELATED = 0.9
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval that contains the true value with the given confidence."""

    estimate: float
    low: float
    high: float


def plain_json(result: Any) -> Any:
    """Converts a result of dataclasses to standard JSON.

    A figure that could not be computed is null, because JSON has no NaN; an unpaired surrogate, which a server may
    send, becomes a question mark, because UTF-8 cannot encode it.
    """
    if is_dataclass(result) and not isinstance(result, type):
        return plain_json(asdict(result))
    if isinstance(result, dict):
        return {key: plain_json(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain_json(value) for value in result]
    if isinstance(result, str):
        return str(result).encode("utf-8", "replace").decode()
    return None if isinstance(result, float) and not math.isfinite(result) else result


def quantile_of_normal(probability: float) -> float:
    """Quantile z of the standard normal distribution for this probability."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)


def share_interval(successes: float, total: float, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval for a share: within 0 to 1, and of positive width if all or none succeeded."""
    if total == 0:
        return Interval(math.nan, 0.0, 1.0)
    z = quantile_of_normal(0.5 + confidence / 2)
    share, scale = successes / total, 1 + z * z / total
    middle = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value: the probability of a split at least this uneven if both are equally good."""
    total, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, count) for count in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << total))


def paired_difference(only_first: int, only_second: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """Share of the second minus share of the first, by Tango's score interval for answers to the same questions."""
    return score_interval(only_first, only_second, total, quantile_of_normal(0.5 + confidence / 2))


def score_interval(only_first: int, only_second: int, total: int, z: float) -> Interval:
    """Tango's interval (Statistics in Medicine 17, 1998) at `z`; one-sided 95% bounds are its ends at z = 1.645."""
    if total == 0:
        return Interval(math.nan, -1.0, 1.0)
    estimate = (only_second - only_first) / total

    def score(difference: float) -> float:
        return _tango_score(only_first, only_second, total, difference)

    # The score decreases with the assumed difference; it crosses z below the estimate and -z above it.
    low = _crossing(lambda d: score(d) - z, -1.0, estimate)
    high = _crossing(lambda d: score(d) + z, estimate, 1.0)
    return Interval(estimate, low, high)


def _tango_score(only_first: int, only_second: int, total: int, difference: float) -> float:
    """Observed minus assumed difference, in standard errors."""
    gap = only_second - only_first - total * difference
    linear = (2 * total - only_second + only_first) * difference - only_second - only_first
    root = math.sqrt(max(0.0, linear**2 - 8 * total * (-only_first * difference * (1 - difference))))
    share = (root - linear) / (4 * total)
    variance = total * (2 * share + difference * (1 - difference))
    if variance <= 0:
        return 0.0 if abs(gap) < 1e-12 else math.copysign(math.inf, gap)
    return gap / math.sqrt(variance)


def _crossing(falling: Callable[[float], float], low: float, high: float) -> float:
    """Zero of a decreasing function between two bounds, by bisection."""
    if falling(low) <= 0:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment for multiple comparisons, some of which would look significant by chance."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    result, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        result[index] = highest
    return result


def welch(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE, *, is_series: bool = False
) -> Interval:
    """Interval of mean(second) - mean(first) of two independent samples of unequal variance (Welch).

    The values of a series follow each other in time and may depend on the value before: its variance is increased and
    its degrees of freedom reduced by the correlation of neighbours.
    """
    one, two = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if len(one) < 2 or len(two) < 2:
        return Interval(math.nan, math.nan, math.nan)
    excess = [_excess(values) if is_series else 1.0 for values in (one, two)]
    parts = [float(values.var(ddof=1)) * times / len(values) for values, times in zip((one, two), excess, strict=True)]
    difference, error = float(two.mean() - one.mean()), math.sqrt(sum(parts))
    if error == 0:
        return Interval(difference, difference, difference)
    free = [max(len(values) / times - 1, 1.0) for values, times in zip((one, two), excess, strict=True)]
    freedom = sum(parts) ** 2 / sum(part**2 / each for part, each in zip(parts, free, strict=True))
    half = quantile_of_t(0.5 + confidence / 2, freedom) * error
    return Interval(difference, difference - half, difference + half)


def _excess(values: Floats) -> float:
    """How much larger the variance of the mean is than that of independent values: (1 + r) / (1 - r).

    r is the correlation of neighbours, corrected for its bias in short series: its expectation is r - (1 + 3r) / n.
    """
    off = values - values.mean()
    total = float((off * off).sum())
    if total == 0:
        return 1.0
    seen = float((off[1:] * off[:-1]).sum()) / total
    r = min(max(seen + (1 + 3 * seen) / len(values), 0.0), _MOST_CORRELATED)
    return (1 + r) / (1 - r)


def quantile_of_t(probability: float, freedom: float) -> float:
    """Quantile of Student's t above the median, by Newton's method.

    The distribution function is concave there, so that the steps from the smaller normal quantile never overshoot.
    """
    t = quantile_of_normal(probability)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    for _ in range(100):
        step = (probability - student_t(t, freedom)) / (scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2))
        t += step
        if abs(step) <= 1e-10 * t:
            break
    return t


def student_t(t: float, freedom: float) -> float:
    """P(T <= t) for t >= 0, by Gauss-Legendre quadrature after substituting t = sqrt(freedom) tan(angle)."""
    end = math.atan(t / math.sqrt(freedom))
    angles = (_NODES + 1) * end / 2
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)
    density = np.exp(log_scale + (freedom - 1) * np.log(np.cos(angles)))
    return 0.5 + float((_WEIGHTS * density).sum() * end / 2)
