"""The figures of a sweep's cell as llama-benchy 0.4.0 defines them: mean and deviation over the runs.

| figure | meaning |
|---|---|
| `pp`, `pp_req` | prompt tokens per second: of all concurrent requests until the last has its first token; of each |
| `tg`, `tg_req` | tokens after the first delivery per second: of all concurrent requests together; of each |
| `peak`, `peak_req` | most tokens within one second: of all concurrent requests together; of each |
| `ttfr` | time to the first event of the answer, with or without a token |
| `est_ppt` | `ttfr` without the latency of a request that computes nothing (GET /v1/models) |
| `e2e_ttft` | time to the first token |

With one request at a time `pp` and `tg` are those of each request. The deviation is that of a population, as
llama-benchy prints it. A peak or a speed of an answer that is too short to have one is absent.
"""

import statistics
from collections.abc import Iterable, Sequence

from onebox.bench.record import Figures, RequestRecord
from onebox.bench.timing import LEAST_DECODE_S, batch_tok_s, batches, deliveries, token_times

__all__ = ["BENCHY_SPEEDS", "BENCHY_TIMES", "benchy_figures", "benchy_values", "peak_tok_s"]

BENCHY_SPEEDS = ("pp", "pp_req", "tg", "tg_req", "peak", "peak_req")
BENCHY_TIMES = ("ttfr", "est_ppt", "e2e_ttft")
_WINDOW_S = 1.0
"""Window over which a peak speed is computed."""
_NEAR = 0.2
"""The server's count of prompt tokens is used if it differs by less than this share from the cell's."""


def benchy_values(
    requests: Sequence[RequestRecord], num_prompt: int, concurrency: int, latency_s: float
) -> dict[str, list[float]]:
    """Every value of each figure; speeds in tokens per second, times in seconds.

    `num_prompt` is the cell's prompt tokens, without a context that was sent before.
    """
    answered = [request for request in requests if request.arrivals_s]
    groups = batches(answered)
    read_each = [_prompt_tokens(r, num_prompt) / ppt for r in answered if (ppt := _est_ppt_s(r, latency_s)) > 0]
    made_each = _known(_made_tok_s([request]) for request in answered)
    is_alone = concurrency == 1
    return {
        "pp": read_each if is_alone else _known(_batch_read_tok_s(group, num_prompt) for group in groups),
        "pp_req": read_each,
        "tg": made_each if is_alone else _known(map(_made_tok_s, groups)),
        "tg_req": made_each,
        "peak": _known(map(peak_tok_s, groups)),
        "peak_req": _known(peak_tok_s([request]) for request in answered),
        "ttfr": [_responded_s(request) for request in answered],
        "est_ppt": [_est_ppt_s(request, latency_s) for request in answered],
        "e2e_ttft": [request.arrivals_s[0] for request in answered],
    }


def benchy_figures(values: dict[str, list[float]], prefix: str = "") -> Figures:
    """Mean and deviation of each figure that has values."""
    found: Figures = {}
    for names, unit in ((BENCHY_SPEEDS, "tok_s"), (BENCHY_TIMES, "s")):
        for name in names:
            if values[name]:
                found[f"{prefix}{name}_mean_{unit}"] = statistics.fmean(values[name])
                found[f"{prefix}{name}_std_{unit}"] = statistics.pstdev(values[name])
    return found


def _responded_s(request: RequestRecord) -> float:
    return request.arrivals_s[0] if request.responded_s is None else request.responded_s


def _est_ppt_s(request: RequestRecord, latency_s: float) -> float:
    return max(0.0, _responded_s(request) - latency_s)


def _prompt_tokens(request: RequestRecord, expected: int) -> int:
    told = request.prompt_tokens
    return told if told is not None and abs(told - expected) < _NEAR * expected else expected


def _batch_read_tok_s(group: Sequence[RequestRecord], num_prompt: int) -> float | None:
    begins = min(request.start_s for request in group)
    seconds = max(request.start_s + request.arrivals_s[0] for request in group) - begins
    return sum(_prompt_tokens(request, num_prompt) for request in group) / seconds if seconds > 0 else None


def _made_tok_s(group: Sequence[RequestRecord]) -> float | None:
    """Tokens after each request's first time, over the time from the earliest first token to the last."""
    if batch_tok_s(group) is None:
        return None
    times = [(request.start_s, found) for request in group if (found := token_times(request))]
    begins = min(start + found[0] for start, found in times)
    ends = max(start + found[-1] for start, found in times)
    return sum(at_s > found[0] for _, found in times for at_s in found) / (ends - begins)


def peak_tok_s(group: Sequence[RequestRecord]) -> float | None:
    """The most tokens received within one second; of a shorter answer, all of them over its time."""
    if max((len(deliveries(request)) for request in group), default=0) < 2:
        return None
    times = sorted(request.start_s + at_s for request in group for at_s in token_times(request))
    if len(times) < 2 or times[-1] - times[0] < LEAST_DECODE_S:
        return None
    if times[-1] - times[0] < _WINDOW_S:
        return len(times) / (times[-1] - times[0])
    first, most = 0, 0
    for last, time in enumerate(times):
        while times[first] <= time - _WINDOW_S:
            first += 1
        most = max(most, last - first + 1)
    return most / _WINDOW_S


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
