"""Figures computed from requests: medians, percentiles, speeds, goodput. Pure functions over the record.

Figure names are a stable interface for readers of a record:

| figure | meaning |
|---|---|
| `ttft_cold_*_s`, `ttft_warm_*_s`, `ttft_*_s` | time to the first chunk: unique prompt, prompt sent before, all |
| `prefill_tok_s` | prompt tokens divided by the median cold time to the first chunk |
| `decode_*_tok_s` | a request's tokens after its first delivery, divided by the time after it |
| `e2e_*_tok_s` | a request's tokens divided by its total time, prompt included |
| `decode_warm_*_tok_s`, `e2e_warm_*_tok_s` | the same of the warm requests |
| `itl_*_s` | gaps between two deliveries of one request; a delivery may hold several tokens |
| `tpot_*_s` | a request's mean time per token after the first delivery |
| `latency_*_s` | a request's total time |
| `late_*_s` | open loop: from a request's planned arrival to its sending |
| `aggregate_tok_s` | tokens of complete answers divided by the duration; in a sweep, by the time from first to last |
| `ttft_turnN_p50_s` | in conversations: the median of turn N |
| `cached_share` | share of prompt tokens that the server reports as cached |
| `goodput_req_s`, `slo_share` | requests per second that met the SLO, and their share of all requests sent |

`*` is p50, p95, p99, min, max, mean or std (of a sample, absent for one value). Times are seconds, speeds tokens per
second. `timing.py` defines a delivery, and when an answer is too short to have a decode speed. A sweep's cell also has
the figures of `benchy.py`. A figure that cannot be known is absent, never 0.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onebox.bench.benchy import benchy_figures, benchy_values
from onebox.bench.record import Figures, RequestRecord, Role, WorkloadKind, WorkloadRecord
from onebox.bench.timing import batch_tok_s, batches, decode_tok_s, e2e_tok_s, gaps_s, tpot_s
from onebox.spec.errors import UsageError

__all__ = ["CONTEXT_LABEL", "Slo", "failure_counts", "figures", "percentile", "speed_notes"]

CONTEXT_LABEL = "context"
"""Label of a sweep request that only loads a context: excluded from the cell's figures."""


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest values, as in numpy; the values need not be sorted."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Slo:
    """Limits that an answer must meet; None means no limit."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """Limit for the 95th percentile of the request's own gaps."""
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parses "ttft=2s,itl=100ms"."""
        limits: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            found = re.fullmatch(r"(ttft|itl|tpot|e2e)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)", part)
            if not found:
                raise UsageError(f"--slo holds {part!r}; write it as ttft=2s,itl=100ms,tpot=50ms,e2e=30s.")
            name, number, unit = found.groups()
            limits[f"{name}_s"] = float(number) / (1000 if unit == "ms" else 1)
        return cls(**limits)

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in (self.ttft_s, self.itl_s, self.tpot_s, self.e2e_s))

    def holds(self, request: RequestRecord) -> bool:
        gaps = gaps_s(request)
        found = (
            (self.ttft_s, request.first_s),
            (self.itl_s, percentile(gaps, 95) if gaps else 0.0),
            (self.tpot_s, tpot_s(request) or 0.0),
            (self.e2e_s, request.total_s),
        )
        return request.is_ok and all(limit is None or (value is not None and value <= limit) for limit, value in found)


def figures(workload: WorkloadRecord, slo: Slo | None = None) -> Figures:
    """All figures of a workload. A figure without any request is absent, never 0."""
    measured = [request for request in workload.measured if request.label != CONTEXT_LABEL]
    if not measured:
        return {}
    found: Figures = {"completion_tokens": statistics.median(r.completion_tokens or 0 for r in _cold(measured))}
    prompts = _known(request.prompt_tokens for request in measured)
    if prompts:
        found["prompt_tokens"] = statistics.median(prompts)
    match workload.kind:
        case WorkloadKind.LOAD:
            return found | _load_figures(workload, measured, slo)
        case WorkloadKind.SWEEP:
            return found | _cell_figures(workload, measured)
    return found | _single_figures(measured)


def speed_notes(workload: WorkloadRecord) -> list[str]:
    """Says how many answers are too short to have a decode speed."""
    measured = [request for request in workload.measured if request.label != CONTEXT_LABEL]
    short = sum(decode_tok_s(request) is None for request in measured)
    if not short:
        return []
    return [f"{short} of {len(measured)} answers are too short to have a decode speed"]


def _cold(requests: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    """Without the warm requests, whose speeds are figures of their own."""
    return [request for request in requests if request.role is not Role.WARM] or requests


def _single_figures(measured: Sequence[RequestRecord]) -> Figures:
    cold, warm = ([request for request in measured if request.role is role] for role in (Role.COLD, Role.WARM))
    first_cold, first_warm = (_known(request.first_s for request in requests) for requests in (cold, warm))
    found = _spread("ttft_cold", "s", first_cold) | _spread("ttft_warm", "s", first_warm)
    prompts = _known(request.prompt_tokens for request in cold)
    if first_cold and prompts:
        found["prefill_tok_s"] = statistics.median(prompts) / statistics.median(first_cold)
    for suffix, requests in (("", _cold(measured)), ("_warm", warm)):
        found |= _spread(f"decode{suffix}", "tok_s", _known(map(decode_tok_s, requests)))
        found |= _spread(f"e2e{suffix}", "tok_s", _known(map(e2e_tok_s, requests)))
    found |= _percentiles("itl", [gap for request in _cold(measured) for gap in gaps_s(request)])
    return found


def _load_figures(workload: WorkloadRecord, measured: Sequence[RequestRecord], slo: Slo | None) -> Figures:
    sent = sum(1 for request in workload.requests if request.role is not Role.WARM_UP)
    found = {
        "completed": float(len(measured)),
        "failed": float(sent - len(measured)),
        "requests_s": len(measured) / workload.duration_s,
        "aggregate_tok_s": _aggregate(workload, measured),
    }
    prompts = _known(request.prompt_tokens for request in measured)
    if len(prompts) == len(measured):
        found["input_tok_s"] = sum(prompts) / workload.duration_s
    found |= _percentiles("ttft", _known(request.first_s for request in measured))
    found |= _percentiles("itl", [gap for request in measured for gap in gaps_s(request)])
    found |= _percentiles("tpot", _known(tpot_s(request) for request in measured))
    found |= _percentiles("latency", [request.total_s for request in measured])
    found |= _spread("decode", "tok_s", _known(decode_tok_s(request) for request in measured))
    found |= _spread("e2e", "tok_s", _known(e2e_tok_s(request) for request in measured))
    late = _known(request.late_s for request in measured)
    if late:
        found |= _percentiles("late", late) | {"late_max_s": max(late)}
    found |= _turn_figures(measured)
    if slo and slo.is_set:
        good = sum(slo.holds(request) for request in measured)
        # Share of all requests sent: a failed request does not meet the SLO.
        found |= {"goodput_req_s": good / workload.duration_s, "slo_share": good / sent}
    return found


def _turn_figures(measured: Sequence[RequestRecord]) -> Figures:
    """Conversations: TTFT of each turn and the cached share of the prompts."""
    told = [request for request in measured if request.cached_tokens is not None]
    read = sum(request.prompt_tokens or 0 for request in told)
    found = {"cached_share": sum(request.cached_tokens or 0 for request in told) / read} if read else {}
    for turn in sorted({request.turn for request in measured} - {0}):
        firsts = _known(request.first_s for request in measured if request.turn == turn)
        if firsts:
            found[f"ttft_turn{turn}_p50_s"] = statistics.median(firsts)
    return found


def _cell_figures(workload: WorkloadRecord, measured: Sequence[RequestRecord]) -> Figures:
    """One cell of a sweep: the prompt tokens exclude the context."""
    firsts = _known(request.first_s for request in measured)
    found = _spread("ttft", "s", firsts)
    if firsts and "prompt" in workload.settings:
        found["prefill_tok_s"] = float(workload.settings["prompt"]) / statistics.median(firsts)
    found |= _spread("decode", "tok_s", _known(map(decode_tok_s, measured)))
    found |= _percentiles("itl", [gap for request in measured for gap in gaps_s(request)])
    speeds = _known(batch_tok_s(batch) for batch in batches(measured))
    if speeds:
        found["aggregate_tok_s"] = statistics.median(speeds)
    loads = [request for request in workload.measured if request.label == CONTEXT_LABEL]
    for prefix, requests, size in (("", measured, "prompt"), ("ctx_", loads, "depth")):
        if requests and workload.settings.get(size):
            together, latency_s = workload.settings.get("concurrency", 1), workload.settings.get("latency_s", 0.0)
            values = benchy_values(requests, workload.settings[size], together, latency_s)
            found |= benchy_figures(values, prefix)
    return found


def _aggregate(workload: WorkloadRecord, measured: Sequence[RequestRecord]) -> float:
    return sum(request.completion_tokens or 0 for request in measured) / workload.duration_s


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(name: str, unit: str, values: Sequence[float]) -> Figures:
    if not values:
        return {}
    found = {
        f"{name}_p50_{unit}": statistics.median(values),
        f"{name}_min_{unit}": min(values),
        f"{name}_max_{unit}": max(values),
        f"{name}_mean_{unit}": statistics.fmean(values),
    }
    if len(values) > 1:
        found[f"{name}_std_{unit}"] = statistics.stdev(values)
    return found


def _percentiles(name: str, values: Sequence[float]) -> Figures:
    return {f"{name}_p{share}_s": percentile(values, share) for share in (50, 95, 99)} if values else {}


def failure_counts(requests: Iterable[RequestRecord]) -> list[tuple[str, int | None, str, int]]:
    """(reason, status, message, count), most frequent first. Messages that differ only in numbers are merged."""
    counts: Counter[tuple[str, int | None, str]] = Counter()
    examples: dict[tuple[str, int | None, str], str] = {}
    for request in requests:
        if failure := request.failure:
            key = (str(failure.reason), failure.status, re.sub(r"\d+(\.\d+)?", "#", failure.message))
            counts[key] += 1
            examples.setdefault(key, failure.message)
    return [(key[0], key[1], examples[key], count) for key, count in counts.most_common()]
