"""What the caller's process and the engine's process send each other: plain values, pickled, in order.

Nothing here imports torch: the caller's process runs without it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from onebox.engine.config import EngineConfig
from onebox.engine.engine import Deliver, Engine
from onebox.engine.grammar.value import Grammar
from onebox.engine.prefix import PrefixLookup
from onebox.engine.request import Event, Request
from onebox.engine.stats import EngineStats
from onebox.planner.memory import MemoryPlan
from onebox.spec.errors import OneboxError

__all__ = [
    "Abort",
    "CheckGrammar",
    "CloseEngine",
    "DeviceMemory",
    "DraftVocabOpened",
    "EngineDied",
    "EngineStarter",
    "Lookup",
    "LookupReply",
    "Planned",
    "PrefixDiskOpened",
    "Progress",
    "Ready",
    "ReportStart",
    "StartDetail",
    "StartEngine",
    "StartFailed",
    "StartPhase",
    "StepEvents",
    "Submit",
    "SubmitReply",
    "timed",
]


class StartPhase(NamedTuple):
    """A phase of starting the engine is done."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Planned:
    """What was decided before loading. A restarted process gets it too, so that it runs the same engine again."""

    config: EngineConfig
    vocab_size: int
    memory: MemoryPlan
    dtype: str
    """Of the activations."""
    plan: bytes
    """The whole plan, opaque to all but the engine's process."""
    fingerprint: str = ""
    """Of what decides an answer's tokens: weights, dtype, KV and state formats."""


class StartDetail(NamedTuple):
    """How far a phase of starting the engine is."""

    name: str
    text: str


class DeviceMemory(NamedTuple):
    """The GPU's memory in use when the engine is ready, by anyone, and what the plan leaves to onebox, in bytes."""

    used_bytes: int
    planned_bytes: int


class PrefixDiskOpened(NamedTuple):
    """What the prefix directory holds when the engine starts."""

    path: str
    num_entries: int
    """Prefixes that this engine can use."""
    num_bytes: int
    num_foreign_bytes: int
    """Of other models, or of another version of this engine."""


class DraftVocabOpened(NamedTuple):
    """The tokens that drafts are chosen from when the engine starts."""

    size: int
    vocab_size: int
    num_counted: int
    """Tokens of answers that were counted, by this engine's predecessors."""
    coverage: float | None
    """The share of them that are listed; None if none was counted."""


Progress = StartPhase | StartDetail | DeviceMemory | PrefixDiskOpened | DraftVocabOpened | Planned
ReportStart = Callable[[StartPhase | StartDetail | DeviceMemory | PrefixDiskOpened | DraftVocabOpened], None]


class EngineStarter(Protocol):
    """Plans and starts an engine inside the engine's process. Pickled on its way there."""

    def plan(self, report: ReportStart) -> Planned: ...
    def start(self, planned: Planned, report: ReportStart, deliver: Deliver) -> Engine: ...


# To the engine's process.


@dataclass(frozen=True)
class StartEngine:
    """The first message. Without a plan, the process makes one."""

    starter: EngineStarter
    planned: Planned | None


@dataclass(frozen=True)
class Submit:
    """All of these or none. Answered by a SubmitReply if it is refused, or if a grammar had to be compiled."""

    number: int
    requests: tuple[Request, ...]

    @property
    def has_grammar(self) -> bool:
        return any(request.sampling.grammar for request in self.requests)


@dataclass(frozen=True)
class CheckGrammar:
    """Answered by a SubmitReply without requests, once it is known whether the grammar can be used."""

    number: int
    grammar: Grammar


@dataclass(frozen=True)
class Lookup:
    """Answered by a LookupReply."""

    number: int
    request: Request


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class CloseEngine:
    """The last message: the engine writes what is to be kept, and ends."""


# From the engine's process, beside StartPhase and Planned.


class Ready(NamedTuple):
    """Requests are accepted from now on."""

    stats: EngineStats


class StartFailed(NamedTuple):
    """There is no engine; the process ends."""

    error: OneboxError


class SubmitReply(NamedTuple):
    """Answers the Submit of that number; no error where it was accepted."""

    number: int
    request_ids: tuple[str, ...]
    error: OneboxError | None


class LookupReply(NamedTuple):
    """Answers the Lookup of that number."""

    number: int
    found: PrefixLookup | OneboxError


@dataclass(frozen=True)
class StepEvents:
    """The events of one step, possibly none: the message is also the engine's heartbeat."""

    events: tuple[Event, ...]
    stats: EngineStats
    started_at: float
    """On time.monotonic's clock, which all processes of a machine share."""
    died: str | None = None
    """Why the engine stopped, if it has: these events may tell clients so. An EngineDied follows."""


@dataclass(frozen=True)
class EngineDied:
    """The engine stopped; its process ends."""

    message: str


@contextmanager
def timed(name: str, report: ReportStart) -> Iterator[None]:
    """Reports how long the block took."""
    began = time.perf_counter()
    yield
    report(StartPhase(name, time.perf_counter() - began))
