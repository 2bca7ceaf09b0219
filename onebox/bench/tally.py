"""Collects the requests of one workload and builds the workload from them.

The requests measured before an interruption can be turned into a workload at any time.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from onebox.bench.answer import StreamedAnswer
from onebox.bench.figures import Slo, figures, percentile, speed_notes
from onebox.bench.metrics import DraftCounters, acceptance
from onebox.bench.record import RequestRecord, Role, WorkloadKind, WorkloadRecord

__all__ = ["WorkloadTally"]

_CACHED_SHARE = 0.1
"""Cached share above which a cold prompt is noted as not cold."""
_CACHED_TOKENS = 64
"""Tokens that all prompts may share: the beginning of the template."""
_LATE_S = 0.1
"""Lateness of sends above which the arrivals are not those that were planned."""


@dataclass
class _Entry:
    answer: StreamedAnswer
    role: Role
    turn: int
    run: int
    late_s: float | None


@dataclass
class WorkloadTally:
    """Collects requests; `workload` builds the result."""

    name: str
    kind: WorkloadKind
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    slo: Slo = field(default_factory=Slo)
    counted: DraftCounters | None = None
    """Drafts counted by the server's metrics while the requests in the figures ran."""
    began_at: float = field(default_factory=time.perf_counter)
    _entries: list[_Entry] = field(default_factory=list)

    @property
    def answers(self) -> list[StreamedAnswer]:
        return [entry.answer for entry in self._entries]

    def add(
        self, answer: StreamedAnswer, role: Role, *, turn: int = 0, run: int = 0, late_s: float | None = None
    ) -> None:
        self._entries.append(_Entry(answer, role, turn, run, late_s))

    def is_over(self, limit_s: float | None, run: int, runs: int) -> bool:
        """Whether the time limit has passed, so that run number `run` must not start; if so, adds a note."""
        if limit_s is None or run == 0 or time.perf_counter() - self.began_at < limit_s:
            return False
        self.notes.append(f"{run} of {runs} runs: they took more than the {limit_s:g} s of --limit")
        return True

    def count_drafts(self, before: DraftCounters | None, after: DraftCounters | None) -> None:
        if before and after:
            self.counted = after - before + (self.counted or DraftCounters())

    def workload(self) -> WorkloadRecord:
        """The workload so far, with its figures."""
        entries = self._entries
        requests = tuple(
            entry.answer.recorded(entry.role, self.began_at, turn=entry.turn, run=entry.run, late_s=entry.late_s)
            for entry in entries
        )
        timed = [request for request in requests if request.role is not Role.WARM_UP]
        made = WorkloadRecord(
            self.name,
            self.kind,
            settings=self.settings,
            requests=requests,
            duration_s=_duration(timed),
            notes=(*self.notes, *_cache_notes(timed), *_tool_notes(self.answers)),
            acceptance=acceptance((r for r in timed if r.role is not Role.WARM), self.counted),
        )
        notes = (*made.notes, *speed_notes(made), *_late_notes(timed), *_differing_notes(made))
        return replace(made, figures=figures(made, self.slo), notes=notes)


def _duration(timed: list[RequestRecord]) -> float:
    if not timed:
        return 0.0
    return max(r.start_s + r.total_s for r in timed) - min(r.start_s for r in timed)


def _cache_notes(timed: list[RequestRecord]) -> Iterable[str]:
    """Notes cold prompts that were partly cached, since they make the TTFT look too good."""
    for request in timed:
        cached = request.cached_tokens or 0
        if request.role is Role.COLD and cached > max(_CACHED_TOKENS, _CACHED_SHARE * (request.prompt_tokens or 0)):
            yield f"a cold prompt had {cached:,} tokens in the server's cache"
            return


def _late_notes(timed: list[RequestRecord]) -> Iterable[str]:
    late = [request.late_s for request in timed if request.late_s is not None]
    if late and percentile(late, 95) > _LATE_S:
        yield f"requests were sent late, 5% of them by {percentile(late, 95):.2f} s or more: the client was too busy"


def _differing_notes(workload: WorkloadRecord) -> Iterable[str]:
    """Greedy answers to the same prompt, cold and warm, should be the same text."""
    if workload.kind is not WorkloadKind.SINGLE or workload.settings.get("temperature") != 0:
        return
    texts: dict[int, set[str]] = {}
    for request in workload.measured:
        texts.setdefault(request.run, set()).add(request.text_sha256)
    differing = sum(len(found) > 1 for found in texts.values())
    if differing:
        yield f"{differing} of {len(texts)} warm answers differ from the cold one to the same prompt, at temperature 0"


def _tool_notes(answers: list[StreamedAnswer]) -> Iterable[str]:
    asked = [answer for answer in answers if answer.ask.tools and not answer.failure and answer.ask.max_tokens > 64]
    if asked:
        yield f"{sum(bool(answer.calls) for answer in asked)} of {len(asked)} answers contain a tool call"
