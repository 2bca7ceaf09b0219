"""The independent units of a workload, for `compare.py`: runs, batches sent together, or blocks of time.

Requests that overlap share the server's steps and are not independent: taken as such, two runs of the same server
differ "significantly" in nearly every second comparison. A load is therefore cut into blocks of time, each longer than
nearly all requests, and a block is one value. Blocks that follow each other may still depend on each other, which
`welch` takes into account. Values are logarithms, so that differences are ratios.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from onebox.bench.figures import CONTEXT_LABEL, percentile
from onebox.bench.record import RequestRecord, Role, WorkloadKind, WorkloadRecord
from onebox.bench.timing import batches

__all__ = ["LEAST_BLOCKS", "RequestFigure", "Units", "batch_units", "least_duration_s", "make_units"]

LEAST_BLOCKS = 6
"""Blocks of each load; below, the dependence between them cannot be estimated."""
_MOST_BLOCKS = 20
_BLOCK_LATENCIES = 1.5
"""Length of a block in 95th percentiles of the requests' times."""

RequestFigure = Callable[[RequestRecord], float | None]


class Units(NamedTuple):
    """Logarithms of a figure, one for each independent unit of both workloads, in the order of time."""

    first: list[float]
    second: list[float]
    kind: str
    """"run", "batch" or "block"."""
    least: int
    """Units that each side needs for a verdict."""

    @property
    def is_enough(self) -> bool:
        return min(len(self.first), len(self.second)) >= self.least


class _Value(NamedTuple):
    log: float
    label: str
    run: int
    middle_s: float


def make_units(first: WorkloadRecord, second: WorkloadRecord, figure: RequestFigure, role: Role | None = None) -> Units:
    """Units of two workloads of one kind. The figure of a request is None where it has none."""
    one, two = _without_labels(*(_values(workload, figure, role) for workload in (first, second)))
    if first.kind is WorkloadKind.LOAD:
        block_s = max(_block_s(first), _block_s(second))
        return Units(_blocks(one, first, block_s), _blocks(two, second, block_s), "block", LEAST_BLOCKS)
    return Units(_run_means(one), _run_means(two), "batch" if first.kind is WorkloadKind.SWEEP else "run", 2)


def batch_units(
    first: WorkloadRecord, second: WorkloadRecord, figure: Callable[[Sequence[RequestRecord]], float | None]
) -> Units:
    """The same for a figure of requests that were sent together."""

    def logs(workload: WorkloadRecord) -> list[float]:
        measured = [request for request in workload.measured if request.label != CONTEXT_LABEL]
        return [math.log(value) for value in map(figure, batches(measured)) if value]

    return Units(logs(first), logs(second), "batch", 2)


def least_duration_s(first: WorkloadRecord, second: WorkloadRecord) -> float:
    """How long a load has to run to have enough blocks."""
    return LEAST_BLOCKS * max(_block_s(first), _block_s(second))


def _values(workload: WorkloadRecord, figure: RequestFigure, role: Role | None) -> list[_Value]:
    chosen = [request for request in workload.measured if role is None or request.role is role]
    begins = min((request.start_s for request in chosen), default=0.0)
    return [
        _Value(math.log(value), request.label, request.run, request.start_s - begins + request.total_s / 2)
        for request in chosen
        if request.label != CONTEXT_LABEL and (value := figure(request))
    ]


def _without_labels(*sides: Sequence[_Value]) -> list[list[_Value]]:
    """Subtracts the mean of each task over both sides: a block's value must not depend on the tasks in it."""
    logs: dict[str, list[float]] = {}
    for value in (value for side in sides for value in side):
        logs.setdefault(value.label, []).append(value.log)
    means = {label: statistics.fmean(found) for label, found in logs.items()}
    return [[value._replace(log=value.log - means[value.label]) for value in side] for side in sides]


def _run_means(values: Sequence[_Value]) -> list[float]:
    runs: dict[int, list[float]] = {}
    for value in values:
        runs.setdefault(value.run, []).append(value.log)
    return [statistics.fmean(runs[run]) for run in sorted(runs)]


def _block_s(workload: WorkloadRecord) -> float:
    times = [request.total_s for request in workload.measured]
    return _BLOCK_LATENCIES * percentile(times, 95) if times else 0.0


def _blocks(values: Sequence[_Value], workload: WorkloadRecord, block_s: float) -> list[float]:
    """Means of blocks of equal length; a request belongs to the block of its middle."""
    if not values or block_s <= 0:
        return []
    whole_s = max(workload.duration_s, max(value.middle_s for value in values))
    count = min(int(whole_s / block_s), _MOST_BLOCKS)
    found: dict[int, list[float]] = {}
    for value in values:
        found.setdefault(min(int(value.middle_s / whole_s * count), count - 1), []).append(value.log)
    return [statistics.fmean(found[place]) for place in sorted(found)] if count else []
