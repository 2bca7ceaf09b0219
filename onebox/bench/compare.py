"""Comparison of two `onebox bench` runs: the ratio of each figure with its confidence interval.

The intervals are computed from the individual requests of both runs: medians are resampled if there are enough
requests, else Welch's interval of the logarithms is used. All intervals hold jointly with 95% confidence (Bonferroni),
so that in a table of many rows none looks significant by chance. Runs with different requests are refused unless
--allow-different is given; then the differences are listed first.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from onebox.bench.figures import CONTEXT_LABEL
from onebox.bench.record import RequestRecord, Role, Run, WorkloadKind, WorkloadRecord
from onebox.bench.statistics import CONFIDENCE, Interval, bootstrap_ratio_of_medians, welch
from onebox.bench.timing import batch_tok_s, batches, decode_tok_s, e2e_tok_s
from onebox.spec.errors import MismatchError

__all__ = ["Change", "ComparedFigure", "RunComparison", "compare_runs"]

_ENOUGH_FOR_MEDIANS = 8
_SHOWN = 6


class Change(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no difference seen"
    UNKNOWN = "too few requests"


_SHARED_CONFIG = ("ignore_eos", "max_context", "slo")
_NOT_SAMPLED = ("seed", "runs", "warm_ups", "count", "duration_s")
"""Settings that select the number and choice of requests, not their kind."""


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of one workload in both runs. `first` and `second` are medians."""

    workload: str
    figure: str
    unit: str
    first: float
    second: float
    num_first: int
    num_second: int
    ratio: Interval
    """second / first."""
    method: str
    change: Change


@dataclass(frozen=True)
class RunComparison:
    """B compared with A, row by row."""

    rows: tuple[ComparedFigure, ...]
    differences: tuple[str, ...]
    """Differences in the requests. Non-empty only with --allow-different."""
    machines: tuple[str, ...]
    """Differences between the servers and machines: usually the subject of the comparison."""
    num_failures: tuple[int, int]
    interrupted: tuple[bool, bool]

    @property
    def slower(self) -> tuple[ComparedFigure, ...]:
        return tuple(row for row in self.rows if row.change is Change.SLOWER)


@dataclass(frozen=True)
class _Figure:
    name: str
    unit: str
    is_better_high: bool
    sample: Callable[[WorkloadRecord], Sequence[float]]


def compare_runs(first: Run, second: Run, *, allow_different: bool = False) -> RunComparison:
    """Rows for every workload measured in both runs."""
    differences = _differences(first, second)
    if differences and not allow_different:
        shown = "; ".join(differences[:_SHOWN])
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise MismatchError(
            f"The two runs sent different requests: {shown}{more}. Measure both alike, or compare what they share "
            "with --allow-different."
        )
    named = {workload.name: workload for workload in second.workloads}
    found = [
        (workload, named[workload.name], figure)
        for workload in first.workloads
        if workload.name in named and workload.kind is named[workload.name].kind
        for figure in _FIGURES[workload.kind]
    ]
    samples = [(one, figure, figure.sample(one), figure.sample(two)) for one, two, figure in found]
    kept = [sample for sample in samples if sample[2] and sample[3]]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(kept))
    return RunComparison(
        tuple(_row(workload.name, figure, one, two, confidence) for workload, figure, one, two in kept),
        tuple(differences),
        tuple(_machines(first, second)),
        (len(first.failed), len(second.failed)),
        (first.interrupted, second.interrupted),
    )


def _row(
    workload: str, figure: _Figure, one: Sequence[float], two: Sequence[float], confidence: float
) -> ComparedFigure:
    if min(len(one), len(two)) >= _ENOUGH_FOR_MEDIANS:
        ratio, method = bootstrap_ratio_of_medians(one, two, confidence), "medians, resampled"
    else:
        logs = welch([math.log(value) for value in one], [math.log(value) for value in two], confidence)
        ratio, method = Interval(*(math.exp(end) for end in (logs.estimate, logs.low, logs.high))), "means, Welch"
    return ComparedFigure(
        workload,
        figure.name,
        figure.unit,
        statistics.median(one),
        statistics.median(two),
        len(one),
        len(two),
        ratio,
        method,
        _change(ratio, figure.is_better_high),
    )


def _change(ratio: Interval, is_better_high: bool) -> Change:
    if math.isnan(ratio.low):
        return Change.UNKNOWN
    if ratio.low <= 1 <= ratio.high:
        return Change.NONE
    return Change.FASTER if (ratio.low > 1) is is_better_high else Change.SLOWER


def _differences(first: Run, second: Run) -> list[str]:
    """Differences between the requests of the two runs."""
    found = []
    for key in _SHARED_CONFIG:
        found += _differing(key, first.config.get(key), second.config.get(key))
    names = [{workload.name: workload for workload in run.workloads} for run in (first, second)]
    for name in dict.fromkeys([*names[0], *names[1]]):
        one, two = (workloads.get(name) for workloads in names)
        if one is None or two is None:
            found.append(f"{name} is only in {'B' if one is None else 'A'}")
        elif bool(one.skipped) != bool(two.skipped):
            found.append(f"{name} was skipped in {'A' if one.skipped else 'B'} ({one.skipped or two.skipped})")
        else:
            found += _differing(name, *(_kind_of(workload) for workload in (one, two)))
    return found


def _kind_of(workload: WorkloadRecord) -> dict[str, Any]:
    return {key: value for key, value in workload.settings.items() if key not in _NOT_SAMPLED}


def _differing(name: str, one: Any, two: Any) -> list[str]:
    if isinstance(one, dict) and isinstance(two, dict):
        return [
            line
            for key in dict.fromkeys([*one, *two])
            for line in _differing(f"{name}: {key}", one.get(key), two.get(key))
        ]
    return [] if one == two else [f"{name} is {one!r} in A and {two!r} in B"]


def _machines(first: Run, second: Run) -> list[str]:
    pairs = {
        "server": (first.server.kind, second.server.kind),
        "server version": (first.server.version, second.server.version),
        "model": (first.server.model, second.server.model),
        "commit": (first.commit, second.commit),
        "onebox": (first.versions.get("onebox"), second.versions.get("onebox")),
        "CPU": (first.hardware.cpu, second.hardware.cpu),
        "GPUs": (list(first.hardware.gpus), list(second.hardware.gpus)),
        "the machine's load at the start": (first.hardware.load_average, second.hardware.load_average),
    }
    return [line for name, (one, two) in pairs.items() for line in _differing(name, one, two)]


def _of(role: Role | None, figure: Callable[[RequestRecord], float | None]) -> Callable[[WorkloadRecord], list[float]]:
    """The figure of every measured request with a role; of all requests if the role is None."""

    def sample(workload: WorkloadRecord) -> list[float]:
        chosen = [request for request in workload.measured if role is None or request.role is role]
        values = (figure(request) for request in chosen if request.label != CONTEXT_LABEL)
        return [value for value in values if value]

    return sample


def _batch_speeds(workload: WorkloadRecord) -> list[float]:
    measured = [request for request in workload.measured if request.label != CONTEXT_LABEL]
    return [speed for speed in map(batch_tok_s, batches(measured)) if speed]


def _first_s(request: RequestRecord) -> float | None:
    return request.first_s


_FIGURES: dict[WorkloadKind, tuple[_Figure, ...]] = {
    WorkloadKind.SINGLE: (
        _Figure("decode", "tok/s", True, _of(Role.COLD, decode_tok_s)),
        _Figure("end to end", "tok/s", True, _of(Role.COLD, e2e_tok_s)),
        _Figure("first token, cold", "s", False, _of(Role.COLD, _first_s)),
        _Figure("first token, warm", "s", False, _of(Role.WARM, _first_s)),
    ),
    WorkloadKind.LOAD: (
        _Figure("decode of a request", "tok/s", True, _of(None, decode_tok_s)),
        _Figure("first token", "s", False, _of(None, _first_s)),
        _Figure("whole answer", "s", False, _of(None, lambda request: request.total_s)),
    ),
    WorkloadKind.SWEEP: (
        _Figure("decode together", "tok/s", True, _batch_speeds),
        _Figure("first token", "s", False, _of(None, _first_s)),
    ),
}
