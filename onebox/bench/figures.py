"""Figures computed from requests: medians, percentiles, speeds, goodput. Pure functions over the record.

Figure names are a stable interface for readers of a record:

| figure | meaning |
|---|---|
| `ttft_cold_*_s`, `ttft_warm_*_s`, `ttft_*_s` | time to the first chunk: unique prompt, prompt sent before, all |
| `prefill_tok_s` | prompt tokens divided by the median cold time to the first chunk |
| `decode_*_tok_s` | a request's tokens after those of its first chunk, divided by the time after it |
| `e2e_*_tok_s` | a request's tokens divided by its total time, prompt included |
| `itl_*_s` | gaps between two deliveries of one request; a delivery may hold several tokens |
| `tpot_*_s` | a request's mean time per token after the first chunk |
| `latency_*_s` | a request's total time |
| `aggregate_tok_s` | tokens of complete answers divided by the duration; in a sweep, by the time from first to last |
| `ttft_turnN_p50_s` | in conversations: the median of turn N |
| `cached_share` | share of prompt tokens that the server reports as cached |
| `goodput_req_s`, `slo_share` | requests per second that met the SLO, and their share of all requests sent |

`*` is p50, p95, p99, min, max or std. Times are seconds, speeds tokens per second.
"""

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onebox.bench.record import Figures, RequestRecord, Role, WorkloadKind, WorkloadRecord
from onebox.spec.errors import UsageError

__all__ = [
    "CONTEXT_LABEL",
    "Slo",
    "batch_tok_s",
    "batches",
    "decode_tok_s",
    "e2e_tok_s",
    "failure_counts",
    "figures",
    "gaps_s",
    "percentile",
    "tokens_after_first",
    "tpot_s",
]

CONTEXT_LABEL = "context"
"""Label of a sweep request that only loads a context: excluded from the cell's figures."""


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest values, as in numpy; the values need not be sorted."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def gaps_s(request: RequestRecord) -> list[float]:
    """Gaps between consecutive deliveries."""
    return [later - earlier for earlier, later in itertools.pairwise(request.arrivals_s)]


def tokens_after_first(request: RequestRecord) -> int:
    """Tokens after the first chunk. Without token ids the first chunk counts as one token."""
    first = request.arrival_tokens[0] if request.arrival_tokens else 1
    return max((request.completion_tokens or 0) - max(first, 1), 0)


def decode_tok_s(request: RequestRecord) -> float | None:
    """None if nothing was decoded after the first chunk."""
    seconds = request.arrivals_s[-1] - request.arrivals_s[0] if request.arrivals_s else 0.0
    made = tokens_after_first(request)
    return made / seconds if made and seconds > 0 else None


def tpot_s(request: RequestRecord) -> float | None:
    speed = decode_tok_s(request)
    return 1 / speed if speed else None


def e2e_tok_s(request: RequestRecord) -> float | None:
    return (request.completion_tokens or 0) / request.total_s if request.total_s > 0 else None


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
    found: Figures = {
        "prompt_tokens": statistics.median(request.prompt_tokens or 0 for request in measured),
        "completion_tokens": statistics.median(request.completion_tokens or 0 for request in _whole(measured)),
    }
    match workload.kind:
        case WorkloadKind.LOAD:
            return found | _load_figures(workload, measured, slo)
        case WorkloadKind.SWEEP:
            return found | _cell_figures(workload, measured)
    return found | _single_figures(measured)


def _whole(requests: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    """Requests with full-length answers. Warm requests are excluded: they measure only the first token."""
    return [request for request in requests if request.role is not Role.WARM] or requests


def _single_figures(measured: Sequence[RequestRecord]) -> Figures:
    whole = _whole(measured)
    cold, warm = (_firsts(measured, role) for role in (Role.COLD, Role.WARM))
    found = _spread("ttft_cold", "s", cold) | _spread("ttft_warm", "s", warm)
    if cold:
        prompts = [request.prompt_tokens or 0 for request in measured if request.role is Role.COLD]
        found["prefill_tok_s"] = statistics.median(prompts) / statistics.median(cold)
    found |= _spread("decode", "tok_s", _known(decode_tok_s(request) for request in whole))
    found |= _spread("e2e", "tok_s", _known(e2e_tok_s(request) for request in whole))
    found |= _percentiles("itl", [gap for request in whole for gap in gaps_s(request)])
    return found


def _load_figures(workload: WorkloadRecord, measured: Sequence[RequestRecord], slo: Slo | None) -> Figures:
    sent = sum(1 for request in workload.requests if request.role is not Role.WARM_UP)
    found = {
        "completed": float(len(measured)),
        "failed": float(sent - len(measured)),
        "requests_s": len(measured) / workload.duration_s,
        "aggregate_tok_s": _aggregate(workload, measured),
        "input_tok_s": sum(request.prompt_tokens or 0 for request in measured) / workload.duration_s,
    }
    found |= _percentiles("ttft", _known(request.first_s for request in measured))
    found |= _percentiles("itl", [gap for request in measured for gap in gaps_s(request)])
    found |= _percentiles("tpot", _known(tpot_s(request) for request in measured))
    found |= _percentiles("latency", [request.total_s for request in measured])
    found |= _spread("decode", "tok_s", _known(decode_tok_s(request) for request in measured))
    found |= _spread("e2e", "tok_s", _known(e2e_tok_s(request) for request in measured))
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
    if firsts:
        found["prefill_tok_s"] = float(workload.settings.get("prompt", 0)) / statistics.median(firsts)
    found |= _spread("decode", "tok_s", _known(decode_tok_s(request) for request in measured))
    found |= _percentiles("itl", [gap for request in measured for gap in gaps_s(request)])
    speeds = _known(batch_tok_s(batch) for batch in batches(measured))
    if speeds:
        found["aggregate_tok_s"] = statistics.median(speeds)
    return found


def batches(requests: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    """Requests sent together, grouped by run."""
    found: dict[int, list[RequestRecord]] = {}
    for request in requests:
        found.setdefault(request.run, []).append(request)
    return list(found.values())


def batch_tok_s(batch: Sequence[RequestRecord]) -> float | None:
    """Tokens after each request's first chunk, divided by the time from the earliest first chunk to the last chunk."""
    answered = [request for request in batch if request.arrivals_s]
    if not answered:
        return None
    begins = min(request.start_s + request.arrivals_s[0] for request in answered)
    ends = max(request.start_s + request.arrivals_s[-1] for request in answered)
    made = sum(tokens_after_first(request) for request in answered)
    return made / (ends - begins) if made and ends > begins else None


def _aggregate(workload: WorkloadRecord, measured: Sequence[RequestRecord]) -> float:
    return sum(request.completion_tokens or 0 for request in measured) / workload.duration_s


def _firsts(requests: Sequence[RequestRecord], role: Role) -> list[float]:
    return _known(request.first_s for request in requests if request.role is role)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(name: str, unit: str, values: Sequence[float]) -> Figures:
    if not values:
        return {}
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        f"{name}_p50_{unit}": statistics.median(values),
        f"{name}_min_{unit}": min(values),
        f"{name}_max_{unit}": max(values),
        f"{name}_std_{unit}": deviation,
    }


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
