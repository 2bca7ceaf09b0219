"""Comparison of two `onebox bench` runs: the ratio of each figure with its confidence interval.

The intervals are Welch's, over the independent units of both runs (`units.py`): runs of a single stream, batches of a
sweep, blocks of time of a load, where requests overlap. All intervals hold jointly with 95% confidence (Bonferroni), so
that in a table of many rows none looks significant by chance. Too few units is a verdict of its own. Runs with
different requests are refused unless --allow-different is given; then the differences are listed first.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from onebox.bench.figures import CONTEXT_LABEL
from onebox.bench.record import RequestRecord, Role, Run, WorkloadKind, WorkloadRecord
from onebox.bench.statistics import CONFIDENCE, Interval, welch
from onebox.bench.timing import batch_tok_s, batches, decode_tok_s, e2e_tok_s
from onebox.bench.units import RequestFigure, Units, batch_units, least_duration_s, make_units
from onebox.spec.errors import MismatchError

__all__ = ["Change", "ComparedFigure", "RunComparison", "compare_runs"]

_SHOWN = 6


class Change(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no difference seen"
    TOO_FEW = "too few to tell"
    """Fewer independent units than an interval needs."""


_SHARED_CONFIG = ("ignore_eos", "max_context", "slo")
_NOT_SAMPLED = ("seed", "runs", "warm_ups", "count", "duration_s", "latency_s")
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
    """Requests, or batches of a figure of batches."""
    units: str
    """The independent units: "run", "batch" or "block"."""
    num_units: tuple[int, int]
    ratio: Interval
    """second / first, of geometric means over the units."""
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
    advice: tuple[str, ...] = ()
    """How to measure what could not be told."""

    @property
    def untold(self) -> tuple[ComparedFigure, ...]:
        return tuple(row for row in self.rows if row.change is Change.TOO_FEW)

    @property
    def slower(self) -> tuple[ComparedFigure, ...]:
        return tuple(row for row in self.rows if row.change is Change.SLOWER)


@dataclass(frozen=True)
class _Figure:
    """A figure of each request with a role (None: of all), or of each batch."""

    name: str
    unit: str
    is_better_high: bool
    of_request: RequestFigure | None = None
    role: Role | None = None
    of_batch: Callable[[Sequence[RequestRecord]], float | None] | None = None

    def values(self, workload: WorkloadRecord) -> list[float]:
        measured = [request for request in workload.measured if request.label != CONTEXT_LABEL]
        if self.of_batch:
            return [value for value in map(self.of_batch, batches(measured)) if value]
        chosen = [request for request in measured if self.role in (None, request.role)]
        return [value for value in map(self.of_request, chosen) if value] if self.of_request else []

    def units(self, first: WorkloadRecord, second: WorkloadRecord) -> Units:
        if self.of_batch:
            return batch_units(first, second, self.of_batch)
        return make_units(first, second, self.of_request or _first_s, self.role)


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
    pairs = list(_pairs(first, second))
    # Rows that cannot be told anyway take no share of the confidence.
    confidence = 1 - (1 - CONFIDENCE) / max(1, sum(pair.units.is_enough for pair in pairs))
    return RunComparison(
        tuple(_row(pair, confidence) for pair in pairs),
        tuple(differences),
        tuple(_machines(first, second)),
        (len(first.failed), len(second.failed)),
        (first.interrupted, second.interrupted),
        tuple(dict.fromkeys(_advice(pair) for pair in pairs if not pair.units.is_enough)),
    )


class _Pair(NamedTuple):
    """One figure of one workload in both runs."""

    first: WorkloadRecord
    second: WorkloadRecord
    figure: _Figure
    values: tuple[list[float], list[float]]
    units: Units


def _pairs(first: Run, second: Run) -> Iterator[_Pair]:
    """What both runs measured."""
    named = {workload.name: workload for workload in second.workloads}
    for one in first.workloads:
        two = named.get(one.name)
        if two is None or one.kind is not two.kind:
            continue
        for figure in _FIGURES[one.kind]:
            values = figure.values(one), figure.values(two)
            if all(values):
                yield _Pair(one, two, figure, values, figure.units(one, two))


def _row(pair: _Pair, confidence: float) -> ComparedFigure:
    figure, units = pair.figure, pair.units
    first, second = (statistics.median(values) for values in pair.values)
    ratio = Interval(second / first, math.nan, math.nan)
    if units.is_enough:
        logs = welch(units.first, units.second, confidence, is_series=units.kind == "block")
        ratio = Interval(*(math.exp(end) for end in (logs.estimate, logs.low, logs.high)))
    return ComparedFigure(
        pair.first.name,
        figure.name,
        figure.unit,
        first,
        second,
        len(pair.values[0]),
        len(pair.values[1]),
        units.kind,
        (len(units.first), len(units.second)),
        ratio,
        _change(ratio, figure.is_better_high),
    )


def _advice(pair: _Pair) -> str:
    name = pair.first.name
    if pair.units.kind != "block":
        return f"{name}: measure with --runs {pair.units.least} or more"
    least_s = least_duration_s(pair.first, pair.second)
    return f"{name}: its requests overlap; measure with --duration {least_s:.0f} or more"


def _change(ratio: Interval, is_better_high: bool) -> Change:
    if math.isnan(ratio.low):
        return Change.TOO_FEW
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


def _first_s(request: RequestRecord) -> float | None:
    return request.first_s


def _total_s(request: RequestRecord) -> float | None:
    return request.total_s


_FIGURES: dict[WorkloadKind, tuple[_Figure, ...]] = {
    WorkloadKind.SINGLE: (
        _Figure("decode", "tok/s", True, decode_tok_s, Role.COLD),
        _Figure("end to end", "tok/s", True, e2e_tok_s, Role.COLD),
        _Figure("first token, cold", "s", False, _first_s, Role.COLD),
        _Figure("first token, warm", "s", False, _first_s, Role.WARM),
    ),
    WorkloadKind.LOAD: (
        _Figure("decode of a request", "tok/s", True, decode_tok_s),
        _Figure("first token", "s", False, _first_s),
        _Figure("whole answer", "s", False, _total_s),
    ),
    WorkloadKind.SWEEP: (
        _Figure("decode together", "tok/s", True, of_batch=batch_tok_s),
        _Figure("first token", "s", False, _first_s),
    ),
}
