"""What the callers' process and the engine's process say to each other: plain values, pickled, in order.

Nothing here imports torch: the callers' process does without.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from onebox.engine.api import Deliver, Engine
from onebox.engine.config import EngineConfig
from onebox.engine.request import Event, Request
from onebox.engine.stats import EngineStats
from onebox.planner.memory import MemoryPlan
from onebox.spec.errors import OneboxError

__all__ = [
    "Abort",
    "Died",
    "NotOpened",
    "Open",
    "Opening",
    "Phase",
    "Planned",
    "Progress",
    "Ready",
    "Step",
    "Submit",
    "Tell",
    "Verdict",
    "timed",
]


@dataclass(frozen=True)
class Phase:
    """A part of opening the engine is done."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Planned:
    """What was decided before loading. A later process is opened with it, so that it is the same engine again."""

    config: EngineConfig
    vocab_size: int
    memory: MemoryPlan
    dtype: str
    """Of the activations."""
    plan: bytes
    """All of it, as the engine's process keeps it; nobody else needs to read it."""


Progress = Phase | Planned
Tell = Callable[[Phase], None]


class Opening(Protocol):
    """How the engine's process opens its engine. Pickled on its way there."""

    def plan(self, tell: Tell) -> Planned: ...
    def start(self, planned: Planned, tell: Tell, deliver: Deliver) -> Engine: ...


# To the engine's process.


@dataclass(frozen=True)
class Open:
    """The first message. Without a plan, one is made."""

    opening: Opening
    planned: Planned | None


@dataclass(frozen=True)
class Submit:
    """All of these or none. Answered by a Verdict if it is refused, or where a grammar had to be looked at."""

    number: int
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Abort:
    request_id: str


# From the engine's process, beside Phase and Planned.


@dataclass(frozen=True)
class Ready:
    """Requests are taken from now on."""

    stats: EngineStats


@dataclass(frozen=True)
class NotOpened:
    """The process ends: there is no engine."""

    error: OneboxError


@dataclass(frozen=True)
class Verdict:
    """On the submission of that number; no error where it was accepted."""

    number: int
    request_ids: tuple[str, ...]
    error: OneboxError | None


@dataclass(frozen=True)
class Step:
    """All that one step gave, nothing included: the message is also the engine's heartbeat."""

    events: tuple[Event, ...]
    stats: EngineStats
    began: float
    """On time.monotonic's clock, which all processes of a machine share."""


@dataclass(frozen=True)
class Died:
    """The engine stopped; its process ends."""

    message: str


@contextmanager
def timed(name: str, tell: Tell) -> Iterator[None]:
    """Tells how long the block took."""
    began = time.perf_counter()
    yield
    tell(Phase(name, time.perf_counter() - began))
