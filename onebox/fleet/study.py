"""Questions put to the simulation: how many boxes, what affinity is worth, what a rolling update costs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onebox.fleet.simulation import (
    POLICIES,
    RollingUpdate,
    SimulatedRequest,
    simulate_trace,
    simulate_users,
)
from onebox.fleet.step_times import StepTimes
from onebox.fleet.traffic import Turn, UserTraffic

__all__ = ["FleetFigures", "FleetStudy", "StudyResult", "figures_of"]

_UPDATE_AT = 0.2
"""Of the time: a rolling update begins when caches are warm."""


@dataclass(frozen=True)
class FleetFigures:
    """Of one simulated, or one real run. Times in seconds."""

    boxes: int
    policy: str
    num_requests: int
    first_p50_s: float
    first_p90_s: float
    first_p99_s: float
    total_p50_s: float
    tokens_per_s: float
    """Of all answers together."""
    stream_tokens_per_s: float
    """Of one answer after its first token, the median."""
    hit_share: float
    """Of prompt tokens."""


@dataclass(frozen=True)
class StudyResult:
    by_boxes: list[FleetFigures]
    enough: int | None
    """The fewest boxes whose first tokens come in time, nine of ten; None: not even the most that were tried."""
    by_policy: list[FleetFigures]
    """At that number of boxes, or at the most that were tried."""
    updated: FleetFigures | None
    """The same with a rolling update."""


@dataclass(frozen=True)
class FleetStudy:
    """What is simulated. `traffic` are users, or the requests of a trace."""

    times: StepTimes
    traffic: UserTraffic | Sequence[Turn]
    seconds: float = 600.0
    """How long users send."""
    balance: int = 4

    def run(self, boxes: int, policy: str, update: RollingUpdate | None = None) -> FleetFigures:
        times = [self.times] * boxes
        if isinstance(self.traffic, UserTraffic):
            found = simulate_users(times, self.traffic, self.seconds, policy, update, self.balance)
        else:
            found = simulate_trace(times, self.traffic, policy, update, self.balance)
        return figures_of(found, boxes, policy, self.times.request_s)

    def answer(
        self,
        boxes: Sequence[int],
        policy: str,
        first_token_s: float,
        down_s: float | None,
        on_run: Callable[[], None] = lambda: None,
    ) -> StudyResult:
        """`down_s` is how long a member is away in a rolling update; None: none is simulated."""
        by_boxes = []
        for count in sorted(boxes):
            by_boxes.append(self.run(count, policy))
            on_run()
        enough = next((row.boxes for row in by_boxes if row.first_p90_s <= first_token_s), None)
        count = enough or max(boxes)
        by_policy = [next(row for row in by_boxes if row.boxes == count)]
        for other in POLICIES if count > 1 else ():
            if other != policy:
                by_policy.append(self.run(count, other))
                on_run()
        updated = None
        if down_s is not None:
            updated = self.run(count, policy, RollingUpdate(_UPDATE_AT * self._span(), down_s))
        return StudyResult(by_boxes, enough, by_policy, updated)

    def _span(self) -> float:
        return self.seconds if isinstance(self.traffic, UserTraffic) else max(turn.at_s for turn in self.traffic)


def figures_of(requests: Sequence[SimulatedRequest], boxes: int, policy: str, request_s: float) -> FleetFigures:
    ended = [request for request in requests if request.ended_s is not None and request.first_s is not None]
    first = sorted(request.wait_s + request_s for request in ended)
    total = [request.ended_s - request.arrived_s + request_s for request in ended if request.ended_s is not None]
    span = max((request.ended_s or 0.0 for request in ended), default=0.0)
    made = sum(request.turn.answer_tokens for request in ended)
    speeds = [
        (each.turn.answer_tokens - 1) / (each.ended_s - each.first_s)
        for each in ended
        if each.ended_s and each.first_s and each.ended_s > each.first_s
    ]
    prompt = sum(request.turn.prompt_tokens for request in ended)
    return FleetFigures(
        boxes,
        policy,
        len(ended),
        first_p50_s=_quantile(first, 0.5),
        first_p90_s=_quantile(first, 0.9),
        first_p99_s=_quantile(first, 0.99),
        total_p50_s=statistics.median(total) if total else 0.0,
        tokens_per_s=made / span if span else 0.0,
        stream_tokens_per_s=statistics.median(speeds) if speeds else 0.0,
        hit_share=sum(request.cached_tokens for request in ended) / prompt if prompt else 0.0,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
