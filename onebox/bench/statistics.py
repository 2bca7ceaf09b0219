"""Confidence intervals and tests for small samples.

Right-or-wrong answers of two servers to the same questions are compared by McNemar's exact test on the questions where
they differ, and by Tango's score interval, which remains valid if they never differ. Other figures are resampled. All
resampling is seeded: the same numbers give the same interval. Independent of servers, questions and files.
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
    "bootstrap",
    "bootstrap_ratio_of_medians",
    "flip_test",
    "mcnemar",
    "paired_difference",
    "plain_json",
    "score_interval",
    "share_interval",
    "welch",
]

CONFIDENCE = 0.95
RESAMPLES = 10_000
FLIPS = 20_000
EXACT_FLIPS_UP_TO = 14
"""Up to this many pairs, all sign patterns are enumerated."""
_SEED = 20_261
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


def _quantile_of_normal(probability: float) -> float:
    """Quantile z of the standard normal distribution for this probability."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)


def share_interval(successes: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval for a share: within 0 to 1, and of positive width if all or none succeeded."""
    if total == 0:
        return Interval(math.nan, 0.0, 1.0)
    z = _quantile_of_normal(0.5 + confidence / 2)
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
    return score_interval(only_first, only_second, total, _quantile_of_normal(0.5 + confidence / 2))


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


def bootstrap(
    numerators: Sequence[float], denominators: Sequence[float] | None = None, confidence: float = CONFIDENCE
) -> Interval:
    """Bootstrap interval of sum(numerators) / sum(denominators) over whole items; of the mean without denominators.

    An item is an independent unit (a passage, a question), not a token in it.
    """
    above = np.asarray(numerators, dtype=np.float64)
    below = np.ones_like(above) if denominators is None else np.asarray(denominators, dtype=np.float64)
    if not len(above):
        return Interval(math.nan, math.nan, math.nan)
    rng = np.random.default_rng(_SEED)
    picks = rng.integers(0, len(above), size=(RESAMPLES, len(above)))
    low, high = _ends(above[picks].sum(1) / below[picks].sum(1), confidence)
    return Interval(float(above.sum() / below.sum()), low, high)


def bootstrap_ratio_of_medians(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """Interval of median(second) / median(first) of two independent samples."""
    rng = np.random.default_rng(_SEED)
    one, two = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if not len(one) or not len(two) or np.median(one) == 0:
        return Interval(math.nan, math.nan, math.nan)
    drawn_one, drawn_two = (
        np.median(values[rng.integers(0, len(values), size=(RESAMPLES, len(values)))], axis=1) for values in (one, two)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = _ends(drawn_two / drawn_one, confidence)
    return Interval(float(np.median(two) / np.median(one)), low, high)


def _ends(drawn: Floats, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(drawn, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def flip_test(differences: Sequence[float]) -> float:
    """Two-sided p-value of paired differences by sign flipping: without an effect, each sign is equally likely."""
    values = np.asarray(differences, dtype=np.float64)
    if not len(values) or not values.any():
        return 1.0
    seen = abs(values.sum()) * (1 - 1e-12)
    if len(values) <= EXACT_FLIPS_UP_TO:
        patterns = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1
        return float(np.mean(abs((1 - 2 * patterns) @ values) >= seen))
    signs = np.random.default_rng(_SEED).choice((-1.0, 1.0), size=(FLIPS, len(values)))
    return float((np.count_nonzero(abs(signs @ values) >= seen) + 1) / (FLIPS + 1))


def welch(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Interval of mean(second) - mean(first) of two independent samples of unequal variance (Welch)."""
    one, two = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if len(one) < 2 or len(two) < 2:
        return Interval(math.nan, math.nan, math.nan)
    parts = [float(values.var(ddof=1)) / len(values) for values in (one, two)]
    difference, error = float(two.mean() - one.mean()), math.sqrt(sum(parts))
    if error == 0:
        return Interval(difference, difference, difference)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(one) - 1) + parts[1] ** 2 / (len(two) - 1))
    half = _quantile_of_t(0.5 + confidence / 2, freedom) * error
    return Interval(difference, difference - half, difference + half)


def _quantile_of_t(probability: float, freedom: float) -> float:
    """Quantile of Student's t above the median, by bisection of its distribution function."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_below(t: float, freedom: float) -> float:
    """P(T <= t) for t >= 0, by Gauss-Legendre quadrature after substituting t = sqrt(freedom) tan(angle)."""
    end = math.atan(t / math.sqrt(freedom))
    angles = (_NODES + 1) * end / 2
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)
    density = np.exp(log_scale + (freedom - 1) * np.log(np.cos(angles)))
    return 0.5 + float((_WEIGHTS * density).sum() * end / 2)
