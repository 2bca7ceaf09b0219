"""What the soak saw: requests by kind and outcome, failures, and the windows of the faults it planted itself."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Failure", "FaultWindow", "Ledger"]

_MAX_KEPT = 200
_GRACE_S = 3.0
"""A fault's effects reach clients a little after it has ended."""


@dataclass(frozen=True)
class Failure:
    """One broken promise: which check, what was seen, and enough to see it again."""

    at_s: float
    check: str
    what: str
    detail: str = ""


@dataclass
class FaultWindow:
    """From when to when a planted fault is active, and what it excuses: errors, stalls, health, log."""

    name: str
    excuses: frozenset[str]
    began: float
    ended: float | None = None

    def covers(self, what: str, began: float, ended: float) -> bool:
        end = float("inf") if self.ended is None else self.ended + _GRACE_S
        return what in self.excuses and began <= end and ended >= self.began


@dataclass
class Ledger:
    """Grows with the run; the server must not."""

    directory: Path
    began: float = field(default_factory=time.monotonic)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of request, outcome) to how often."""
    failures: list[Failure] = field(default_factory=list)
    num_failures: Counter[str] = field(default_factory=Counter)
    """By check, those beyond the kept ones too."""
    windows: list[FaultWindow] = field(default_factory=list)
    num_compared: int = 0
    """Answers held against those computed alone."""
    stalls: list[tuple[float, float, str]] = field(default_factory=list)
    """(wait of a canary in seconds, when it ended, what hostile clients did meanwhile), the worst ones first."""
    slowest: dict[str, float] = field(default_factory=dict)
    """The longest time to a reply in seconds, by kind of hostile request."""
    is_server_gone: Callable[[], bool] = lambda: False
    """Whether the server of the moment has ended; its death is one failure, not one of every client."""
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def count(self, kind: str, outcome: str) -> None:
        self.outcomes[kind, outcome] += 1

    def note(self, text: str) -> None:
        """A line of the run's own log, printed and kept."""
        line = f"{time.monotonic() - self.began:7.1f} s  {text}"
        self.notes.append(line)
        print(line, flush=True)

    def fail(self, check: str, what: str, detail: str = "", body: bytes | None = None) -> None:
        """Keeps a failure; a request's body goes to a file beside the record, so that it can be sent again."""
        self.num_failures[check] += 1
        if self.num_failures[check] > _MAX_KEPT:
            return
        if body is not None:
            path = self.directory / f"{check.replace(' ', '-')}-{self.num_failures[check]}.body"
            path.write_bytes(body)
            detail = f"{detail} body: {path}".strip()
        self.failures.append(Failure(time.monotonic() - self.began, check, what, detail))
        self.note(f"FAILED {check}: {what} {detail}".rstrip())

    def open_window(self, name: str, *excuses: str) -> FaultWindow:
        window = FaultWindow(name, frozenset(excuses), time.monotonic())
        self.windows.append(window)
        return window

    def is_excused(self, what: str, began: float, ended: float) -> bool:
        return any(window.covers(what, began, ended) for window in self.windows)
