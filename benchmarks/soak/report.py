"""The report of a run: failures first, then tables of what was done and measured; and the same as JSON."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.soak.checks import HealthSample, summarize_health
from benchmarks.soak.run import Soak

__all__ = ["health_misses", "record", "report"]

_MAX_SHOWN = 8
"""Failures of one check; the record has more."""


def health_misses(soak: Soak) -> list[HealthSample]:
    """Probes without an answer within a second, the machine's own delays and planted faults excepted."""
    return [sample for sample in _counted(soak) if sample.net_s > 1 or not sample.status]


def _counted(soak: Soak) -> list[HealthSample]:
    ledger = soak.ledger
    return [s for s in soak.probes.health if not ledger.is_excused("health", s.at, s.at + s.latency_s)]


def report(soak: Soak) -> str:
    return "\n".join(_lines(soak))


def _lines(soak: Soak) -> Iterator[str]:
    ledger = soak.ledger
    yield ""
    yield f"FAILED: {sum(ledger.num_failures.values())}" if ledger.failures else "PASSED"
    for check, count in ledger.num_failures.most_common():
        yield f"  {count:6} {check}"
    shown: Counter[str] = Counter()
    for failure in ledger.failures:
        shown[failure.check] += 1
        if shown[failure.check] <= _MAX_SHOWN:
            yield f"  {failure.at_s:7.1f} s  {failure.check}: {failure.what} {failure.detail}".rstrip()
    yield ""
    yield from _requests(ledger.outcomes)
    yield ""
    num_wrong = ledger.num_failures["wrong answer"]
    yield f"answers compared with those computed alone: {ledger.num_compared}, wrong: {num_wrong}"
    health = summarize_health(_counted(soak))
    yield "/health: " + ", ".join(f"{name} {value:.3g}" for name, value in health.items())
    yield f"canaries: {soak.num_canaries}; their longest waits without time spent waiting for a core:"
    for wait_s, at_s, who in ledger.stalls[:3]:
        yield f"  {wait_s:.2f} s at {at_s:.0f} s beside {who[:160]}"
    yield "hostile requests that took longest:"
    for kind, seconds in sorted(ledger.slowest.items(), key=lambda item: -item[1])[:5]:
        yield f"  {seconds:5.1f} s  {kind}"
    yield f"faults planted: {dict(Counter(soak.faults))}; engine deaths: {sum(life.num_deaths for life in soak.lives)}"
    for life in soak.lives:
        yield f"life {life.name}: ready after {life.start_s:.1f} s, {len(life.points)} quiet points"
        for change in life.changes:
            yield (
                f"  resident memory of the {change.process}: first quarter {change.first_bytes / 1e6:.1f} MB, "
                f"last {change.last_bytes / 1e6:.1f} MB ({change.share:+.2%})"
            )


def _requests(outcomes: Counter[tuple[str, str]]) -> Iterator[str]:
    """A line per kind: how often each outcome."""
    kinds: dict[str, list[str]] = {}
    for (kind, outcome), count in sorted(outcomes.items()):
        kinds.setdefault(kind, []).append(f"{outcome}: {count}")
    yield f"{'requests':<42}outcomes"
    for kind, parts in kinds.items():
        yield f"{kind:<42}{', '.join(parts)}"


def record(soak: Soak) -> dict[str, Any]:
    """Everything the report says, and the lives' quiet points."""
    ledger = soak.ledger
    return {
        "failures": [failure.__dict__ for failure in ledger.failures],
        "num_failures": dict(ledger.num_failures),
        "requests": [[kind, outcome, count] for (kind, outcome), count in sorted(ledger.outcomes.items())],
        "num_compared": ledger.num_compared,
        "health": summarize_health(_counted(soak)),
        "stalls": ledger.stalls,
        "slowest_s": ledger.slowest,
        "faults": soak.faults,
        "lives": [
            {
                "name": life.name,
                "start_s": life.start_s,
                "points": [[at, state._asdict()] for at, state in life.points],
                "memory": [{**change._asdict(), "share": change.share} for change in life.changes],
            }
            for life in soak.lives
        ],
        "log": ledger.notes,
    }
