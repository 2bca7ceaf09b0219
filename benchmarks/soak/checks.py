"""The promises, each as a function of what was seen: no server, no clock. An empty list is a promise kept."""

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = [
    "CanarySample",
    "HealthSample",
    "LogScan",
    "MemoryChange",
    "QuietState",
    "check_error",
    "check_quiet",
    "compare_quarters",
    "longest_wait_s",
    "summarize_health",
]

MAX_ERROR_BYTES = 16 << 10
"""A refusal does not repeat what was sent."""
MAX_KEPT_BYTES = 256 << 20
"""What an idle server may hold beyond what it had before the load."""
MAX_PEAK_BYTES = 1 << 30
"""The same at its highest: some bodies of 64 MiB at once, and what is made of them."""
_LONG_LIFE_S = 1200.0
_TOLERANCE, _SHORT_TOLERANCE = 0.02, 0.10
_THREAD_SLACK = 48
"""Pools start threads as they need them; their limits together."""
_BAD_LINES = re.compile(
    r"Task exception was never retrieved|was never awaited|Fatal Python error|Segmentation fault"
    r"|\bdied\b|\bERROR\b|Exception|core dumped|\bMemoryError\b"
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_ENGINE_LINES = re.compile(r"the engine died|engine runs again|timeout graceful shutdown exceeded")
_OUT_OF_MEMORY = re.compile(r"MemoryError|[Cc]an(?:'t|not) allocate memory")
"""What an engine that is refused memory may die of."""


class HealthSample(NamedTuple):
    """One probe of /health. `delay_s` is how long the server's thread waited for a core meanwhile."""

    at: float
    latency_s: float
    status: int
    """0: no answer."""
    delay_s: float = 0.0

    @property
    def net_s(self) -> float:
        """Without the time that other processes took the cores away."""
        return max(0.0, self.latency_s - self.delay_s)


class CanarySample(NamedTuple):
    """One short stream of high priority, timed. `delay_s` as above, of the thread that waited longest."""

    began: float
    ended: float
    wait_s: float
    """The longest silence, to the first byte or between two."""
    delay_s: float
    status: int
    """0: no whole answer."""

    @property
    def net_s(self) -> float:
        return max(0.0, self.wait_s - self.delay_s)


class QuietState(NamedTuple):
    """The server with no client: what must have come back."""

    num_running: float
    num_waiting: float
    page_usage: float
    num_restarts: float
    num_descriptors: dict[str, int]
    num_threads: dict[str, int]
    rss_bytes: dict[str, int]
    peak_bytes: dict[str, int]


class MemoryChange(NamedTuple):
    process: str
    first_bytes: float
    last_bytes: float
    num_samples: int
    tolerance: float = _TOLERANCE

    @property
    def share(self) -> float:
        return self.last_bytes / self.first_bytes - 1

    @property
    def is_flat(self) -> bool:
        return self.share <= self.tolerance


def check_error(status: int, body: bytes, path: str) -> list[str]:
    """A refusal is JSON in the dialect's shape, has a sentence, and is short."""
    problems = []
    if len(body) > MAX_ERROR_BYTES:
        problems.append(f"the error has {len(body)} bytes")
    try:
        given = json.loads(body, parse_constant=_refuse_constant)
    except ValueError:
        return [*problems, f"the body of status {status} is not JSON: {body[:200]!r}"]
    error = given.get("error") if isinstance(given, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("type"), str):
        return [*problems, f"the body of status {status} has no error with a type: {body[:200]!r}"]
    if path.startswith("/v1/messages") and given.get("type") != "error":
        problems.append("an error of /v1/messages has not Anthropic's shape")
    message = error.get("message")
    if not isinstance(message, str) or len(message) < 8:
        problems.append(f"the error says nothing: {message!r}")
    return problems


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class LogScan:
    """Finds what should not be in a log; a traceback is one finding, named by its last line."""

    def __init__(self) -> None:
        self._in_traceback = False

    def take(self, line: str, *, engine_may_die: bool) -> str | None:
        """What is wrong with this line, or with the traceback that it ends."""
        text = line.rstrip()
        if _TRACEBACK.search(text):
            self._in_traceback = True
            return None
        if self._in_traceback:
            if not text or text[0].isspace() or text.startswith("|"):
                return None
            self._in_traceback = False
            return None if engine_may_die and _OUT_OF_MEMORY.search(text) else f"traceback: {text}"
        if not _BAD_LINES.search(text) or (engine_may_die and _ENGINE_LINES.search(text)):
            return None
        return text


def check_quiet(state: QuietState, base: QuietState, num_restarts: int) -> list[str]:
    """Slots, pages, descriptors, threads and processes of an idle server against those it had before the load."""
    problems = []
    if state.num_running or state.num_waiting:
        problems.append(f"{state.num_running:.0f} requests run and {state.num_waiting:.0f} wait with no client there")
    if state.page_usage:
        problems.append(f"{state.page_usage:.4f} of the KV pages belong to nobody")
    if state.num_restarts != num_restarts:
        problems.append(
            f"the engine was restarted {state.num_restarts:.0f} times, and {num_restarts} deaths were planted"
        )
    for name, count in base.num_descriptors.items():
        now = state.num_descriptors.get(name)
        if now is None:
            problems.append(f"the process {name} is gone")
        elif now > count:
            problems.append(f"{name} holds {now} descriptors, {count} before")
    for name, count in base.num_threads.items():
        if state.num_threads.get(name, 0) > count + _THREAD_SLACK:
            problems.append(f"{name} has {state.num_threads[name]} threads, {count} before")
    return [*problems, *_check_memory(state, base)]


def _check_memory(state: QuietState, base: QuietState) -> list[str]:
    problems = []
    for name, before in base.rss_bytes.items():
        kept = state.rss_bytes.get(name, 0) - before
        peak = state.peak_bytes.get(name, 0) - before
        if kept > MAX_KEPT_BYTES:
            problems.append(f"{name} holds {kept / 1e6:.0f} MB more than before the load, {before / 1e6:.0f} MB")
        if peak > MAX_PEAK_BYTES:
            problems.append(f"{name} had {peak / 1e6:.0f} MB more than before the load, {before / 1e6:.0f} MB")
    return problems


def compare_quarters(process: str, samples: Sequence[float], life_s: float) -> MemoryChange | None:
    """Resident memory at the quiet points of one life, in order: the last quarter against the first, by medians.

    None with fewer than four quiet points. A life of less than 20 minutes is mostly warm-up, and may grow by 10%.
    """
    if len(samples) < 4:
        return None
    quarter = len(samples) // 4
    first, last = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
    tolerance = _TOLERANCE if life_s >= _LONG_LIFE_S else _SHORT_TOLERANCE
    return MemoryChange(process, first, last, len(samples), tolerance)


def longest_wait_s(began: float, arrivals: Sequence[float]) -> float:
    """The longest silence of an answer: to its first byte, or between two arrivals."""
    times = [began, *arrivals]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def summarize_health(samples: Iterable[HealthSample]) -> dict[str, float]:
    """Latencies of /health in seconds, as measured; and misses of 1 s and 3 s without the waits for a core."""
    kept = sorted(samples, key=lambda sample: sample.latency_s)
    if not kept:
        return {"num_probes": 0}
    return {
        "num_probes": len(kept),
        "median_s": kept[len(kept) // 2].latency_s,
        "p99_s": kept[int(len(kept) * 0.99)].latency_s,
        "worst_s": kept[-1].latency_s,
        "worst_net_s": max(sample.net_s for sample in kept),
        "over_1_s": sum(sample.latency_s > 1 for sample in kept),
        "over_1_s_net": sum(sample.net_s > 1 for sample in kept),
        "over_3_s": sum(sample.latency_s > 3 for sample in kept),
        "unanswered": sum(not sample.status for sample in kept),
    }
