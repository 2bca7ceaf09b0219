"""Codebooks for one coordinate of a random unit vector: the levels with the least squared error (Lloyd-Max).

A coordinate of a uniformly random unit vector in d dimensions has density

    f(x) = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) * (1 - x*x) ** ((d-3)/2)      on [-1, 1], about N(0, 1/d)

Levels are symmetric; the solver works on the positive half, with cell boundaries halfway between levels:

    0 = b0 ── c1 ── b1 ── c2 ── b2 ── ... ── cn ── bn = 1       b(i) = (c(i) + c(i+1)) / 2
                                                                c(i) = mean of f over [b(i-1), b(i)]

and repeats both rules until convergence. Plain float64 Python: the same table on every device.
"""

import math
from functools import lru_cache
from itertools import pairwise

from onebox.spec.errors import UnsupportedError

__all__ = ["lloyd_max_levels"]

_SIMPSON_STEPS = 32  # per cell; cells are about one standard deviation wide, so mass is accurate to about 1e-9
_MAX_ITERATIONS = 5000
_TOLERANCE = 1e-12


@lru_cache
def lloyd_max_levels(dim: int, bits: int) -> tuple[float, ...]:
    """The 2**bits levels in ascending order for unit vectors of `dim` coordinates."""
    if dim < 4 or not 1 <= bits <= 4:
        raise UnsupportedError(f"Codebooks exist for 1 to 4 bits and at least 4 dimensions, not {bits} bits, {dim}.")
    count = 2 ** (bits - 1)
    levels = [2.5 * (i + 0.5) / count / math.sqrt(dim) for i in range(count)]
    for _ in range(_MAX_ITERATIONS):
        moved = _improve(levels, dim)
        change = max(abs(a - b) for a, b in zip(levels, moved, strict=True))
        levels = moved
        if change < _TOLERANCE:
            break
    return tuple([-level for level in reversed(levels)] + levels)


def _improve(levels: list[float], dim: int) -> list[float]:
    """One Lloyd step on the positive half: boundaries become midpoints, levels the means between them."""
    bounds = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), 1.0]
    masses = [_mass(a, b, dim) for a, b in pairwise(bounds[:-1])]
    masses.append(0.5 - sum(masses))  # the last cell is long and nearly empty: the remainder
    moments = [_moment(a, b, dim) for a, b in pairwise(bounds)]
    return [moment / mass for moment, mass in zip(moments, masses, strict=True)]


def _mass(low: float, high: float, dim: int) -> float:
    """Integral of f over [low, high], Simpson's rule."""
    step = (high - low) / _SIMPSON_STEPS
    weights = [1.0, *(4.0 if i % 2 else 2.0 for i in range(1, _SIMPSON_STEPS)), 1.0]
    power = (dim - 3) / 2
    total = sum(weight * math.pow(1.0 - (low + i * step) ** 2, power) for i, weight in enumerate(weights))
    return _density_at_zero(dim) * total * step / 3


def _moment(low: float, high: float, dim: int) -> float:
    """Integral of x f(x) over [low, high], in closed form."""
    power = (dim - 1) / 2
    return _density_at_zero(dim) * (math.pow(1.0 - low * low, power) - math.pow(1.0 - high * high, power)) / (2 * power)


def _density_at_zero(dim: int) -> float:
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)) / math.sqrt(math.pi)
