"""What a server tells its operator while it serves: a line of speeds every few seconds with work in them.

The words are those of vLLM's log, which dashboards and scripts read. A thread of its own reads the engine's statistics;
it touches neither the event loop nor a step, and `say` never waits for a reader.
"""

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, Self

from onebox.engine.api import AcceptanceCounts, EngineClient, EngineStats, EngineStoppedError
from onebox.spec.output import say

__all__ = ["ActivityLog", "activity_line", "head_warning"]

DEFAULT_INTERVAL_S = 10.0
LEAST_HEAD_SAMPLES = 1000
"""First drafts before the head is judged; 32 of a request count, so they come from more than 30 requests."""
LEAST_HEAD_RATE = 0.2
"""Published figures for heads of this family: 63 to 100% of all drafts, by language and task; of first drafts 77% and
more. Broken ones get 0 to 13%: noise, a head of another model, a wrong rotation."""


class Activity(NamedTuple):
    """The engine's statistics at one moment."""

    stats: EngineStats
    at_s: float


class ActivityLog:
    """A thread that says what the engine did, every `interval_s` seconds with work in them, until it is closed."""

    def __init__(
        self,
        engine: EngineClient,
        interval_s: float = DEFAULT_INTERVAL_S,
        *,
        is_quiet: bool = False,
        judges_head: bool = True,
        tell: Callable[[str], None] = say,
    ) -> None:
        """`is_quiet`: only warnings. `judges_head`: warn where the MTP head's drafts are hardly ever accepted."""
        self._engine = engine
        self._interval_s = interval_s
        self._is_quiet = is_quiet
        self._tell = tell
        self._judges_head = judges_head
        self._closed = threading.Event()
        self._last = self._read()
        self._thread = threading.Thread(target=self._run, name="onebox-activity", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does not wait for the thread: it may be reading from an engine that hangs."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self.tick()

    def tick(self) -> None:
        """Says what was done since the last time, if anything was."""
        now, last = self._read(), self._last
        if now is None:
            return
        self._last = now
        line = activity_line(last, now) if last and not self._is_quiet else None
        if line:
            self._tell(f"{time.strftime('%m-%d %H:%M:%S')} {line}")
        warning = head_warning(now.stats) if self._judges_head else None
        if warning:
            self._judges_head = False  # said once
            say(warning, is_error=True)

    def _read(self) -> Activity | None:
        try:
            return Activity(self._engine.stats(), time.monotonic())
        except EngineStoppedError:
            return None


def activity_line(last: Activity, now: Activity) -> str | None:
    """Speeds between two moments and what runs at the second; None where nothing was done and nothing runs."""
    stats, seconds = now.stats, max(now.at_s - last.at_s, 1e-9)
    prompt = stats.totals.prompt_tokens - last.stats.totals.prompt_tokens
    generated = stats.totals.completion_tokens - last.stats.totals.completion_tokens
    if not (prompt or generated or stats.num_running or stats.num_waiting):
        return None
    return ", ".join(
        (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s",
            f"Running: {stats.num_running} reqs",
            f"Waiting: {stats.num_waiting} reqs",
            f"KV cache usage: {100 * _used_share(stats):.1f}%",
            *_prefix_hits(last.stats, stats),
            *_acceptance(last.stats.totals.drafts, stats.totals.drafts),
        )
    )


def head_warning(stats: EngineStats) -> str | None:
    """The sentence about an MTP head whose drafts are hardly ever accepted; None where it is good, or not yet known."""
    totals = stats.totals
    if totals.head_samples < LEAST_HEAD_SAMPLES or totals.head_accepted >= LEAST_HEAD_RATE * totals.head_samples:
        return None
    share = totals.head_accepted / totals.head_samples
    return (
        f"Warning: {totals.head_accepted:,} of {totals.head_samples:,} first drafts of the MTP head were accepted "
        f"({share:.1%}), where a head of this family gets 60% and more. Its weights are noise, belong to another "
        "checkpoint, or were grafted wrongly: `onebox inspect DIR --deep` looks at them, and `onebox build --mtp-from` "
        "grafts a good head. Answers are right all the same, but slower than they could be; "
        """--speculative-config '{"method": "ngram"}' drafts without the head."""
    )


def _used_share(stats: EngineStats) -> float:
    """Of the KV pages: those that requests hold and no cached prefix does."""
    return (stats.num_pages - stats.num_free_pages - stats.prefix.num_pages) / stats.num_pages


def _prefix_hits(last: EngineStats, now: EngineStats) -> Iterator[str]:
    queried = now.prefix.queried_tokens - last.prefix.queried_tokens
    if queried > 0:
        hits = now.prefix.hit_tokens - last.prefix.hit_tokens
        yield f"Prefix cache hit rate: {100 * hits / queried:.1f}%"


def _acceptance(last: AcceptanceCounts, now: AcceptanceCounts) -> Iterator[str]:
    """Of steps with drafts: tokens a step, and in which share of them the first draft was accepted, the second, ..."""
    steps, drafted = now.num_steps - last.num_steps, now.num_drafted - last.num_drafted
    if steps <= 0:
        return
    accepted = now.num_accepted - last.num_accepted
    before = (*last.accepted_by_position, *[0] * len(now.accepted_by_position))
    places = [count - earlier for count, earlier in zip(now.accepted_by_position, before, strict=False)]
    yield f"Mean acceptance length: {1 + accepted / steps:.2f}"
    yield f"Per-position acceptance rate: {', '.join(f'{count / steps:.3f}' for count in places or [0])}"
    yield f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
