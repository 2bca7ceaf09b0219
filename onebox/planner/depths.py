"""The speed of a step by its number of drafts, on one acceptance curve: how deep to draft, and what choosing brings.

A curve that is long enough says the acceptance of every smaller depth too: a step with n drafts yields one token and
the first n acceptances, and costs its rows' experts. An engine that chooses the depth for each step by what it measured
gets the best of these.
"""

from dataclasses import replace
from typing import NamedTuple

from onebox.planner.levers import Setting

__all__ = ["DepthRate", "best_depth", "constant_acceptance", "depth_rates"]

_HALVINGS = 60


class DepthRate(NamedTuple):
    """A step with so many drafts, on this engine."""

    drafts: int
    tokens_per_step: float
    step_seconds: float
    tokens_per_second: float


def depth_rates(setting: Setting) -> tuple[DepthRate, ...]:
    """Of 0 to all drafts of the curve; none where the acceptance or the box's bandwidth is not known."""
    curve = setting.workload.acceptance
    if curve is None or setting.box.usable is None:
        return ()
    return tuple(_rate(setting, depth) for depth in range(len(curve) + 1))


def best_depth(rates: tuple[DepthRate, ...]) -> DepthRate:
    """The fastest; of equals the one with fewer drafts."""
    return max(rates, key=lambda rate: (rate.tokens_per_second, -rate.drafts))


def constant_acceptance(tokens_per_step: float, drafts: int) -> tuple[float, ...]:
    """The curve of so many tokens a step whose drafts are all equally likely to be accepted after those before."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(_powers(middle, drafts)) < tokens_per_step else (low, middle)
    return _powers(high, drafts)


def _powers(share: float, drafts: int) -> tuple[float, ...]:
    return tuple(share**draft for draft in range(1, drafts + 1))


def _rate(setting: Setting, depth: int) -> DepthRate:
    curve = (setting.workload.acceptance or ())[:depth]
    workload = replace(setting.workload, drafts=depth, acceptance=curve if depth else None)
    engine = replace(setting, workload=workload).project().engine_rate
    if engine is None:
        raise ValueError("A depth has no rate without the box's bandwidth.")
    return DepthRate(depth, workload.tokens_per_step, engine.step_seconds, engine.tokens_per_second)
