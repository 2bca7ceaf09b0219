"""The schedule of a training run, as a function of the share of its time that has passed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = [
    "LEARNING_RATE",
    "LONG_PART",
    "TEXT_SHARE",
    "LengthAt",
    "RunClock",
    "ShareAt",
    "later_share",
    "learning_rate",
    "picture_length",
    "seeing_share",
    "text_length",
    "whole_share",
]

LEARNING_RATE = 4e-3
WARM_UP = 0.02
"""Share of the run in which the learning rate rises from 0."""
DECAY = 0.45
"""Share of the run, at its end, in which the learning rate falls to 0."""
LONG_PART = 0.35
"""Share of the run, at its end, that reads long sequences: there the model learns to retrieve from far back."""
LONGEST_FROM = 0.35
"""Share of the run after which `picture_length` has the longest rows."""
TOWER_FIRST = 0.1
"""Share of a run with pictures in which the text model's learning rate rises from 0."""
TEXT_SHARE = 0.6
"""Then: the learning rate of the text model, which was trained before, as a share of the tower's."""
CLOSING_SECONDS = 12
"""Reserved at the end for the last checkpoint."""


def learning_rate(progress: float) -> float:
    """At a share `progress` of the run: a linear rise, a constant part, a linear fall to 0."""
    return LEARNING_RATE * max(0.0, min(1.0, progress / WARM_UP, (1 - progress) / DECAY))


ShareAt = Callable[[float], float]
"""The text model's learning rate as a share of the tower's, by the share of the run that has passed."""


def whole_share(_: float) -> float:
    """Where the text model is all there is."""
    return 1.0


def seeing_share(progress: float) -> float:
    """The tower learns to be read first: answers about pictures that nobody sees yet would pull the text model away."""
    return TEXT_SHARE * min(1.0, progress / TOWER_FIRST)


def later_share(_: float) -> float:
    """For a run that goes on with a tower that was trained before."""
    return TEXT_SHARE


LengthAt = Callable[[float, int, Sequence[int]], int]
"""The length of a step's rows, by the share of the run that has passed, the step's number and the lengths there are."""


def text_length(progress: float, _: int, lengths: Sequence[int]) -> int:
    """Short rows first, long ones in the last part."""
    return max(lengths) if progress >= 1 - LONG_PART else min(lengths)


def picture_length(progress: float, step: int, lengths: Sequence[int]) -> int:
    """Mostly short rows, which alone have pictures; one step in ten has the middle ones, later one the longest."""
    short, middle, long = lengths
    place = step % 10
    if place == 9 and progress >= LONGEST_FROM:
        return long
    return middle if place == 4 else short


@dataclass
class RunClock:
    """The time of a run of `minutes`, of which earlier processes completed the share `done`.

    With `limit_seconds` this process ends after so long, and a later one continues the run.
    """

    minutes: float
    done: float = 0.0
    limit_seconds: float | None = None
    began: float = field(default_factory=time.monotonic)
    first_step: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether this process has used up its time."""
        return self.limit_seconds is not None and self.elapsed >= self.limit_seconds

    @property
    def elapsed(self) -> float:
        """Seconds since this process started."""
        return time.monotonic() - self.began

    @property
    def progress(self) -> float:
        """Completed share of the run, counted from the first step: startup time is not part of the schedule."""
        if self.first_step is None:
            self.first_step = self.elapsed
        minutes = self.minutes * (1 - self.done)
        end = minutes * 60 - min(CLOSING_SECONDS, minutes * 6)
        return self.done + (1 - self.done) * (self.elapsed - self.first_step) / max(1e-9, end - self.first_step)
