"""The schedule of a training run, as a function of the share of its time that has passed."""

import time
from dataclasses import dataclass, field

__all__ = ["LEARNING_RATE", "LONG_PART", "RunClock", "learning_rate"]

LEARNING_RATE = 4e-3
WARM_UP = 0.02
"""Share of the run in which the learning rate rises from 0."""
DECAY = 0.45
"""Share of the run, at its end, in which the learning rate falls to 0."""
LONG_PART = 0.35
"""Share of the run, at its end, that reads long sequences: there the model learns to retrieve from far back."""
CLOSING_SECONDS = 12
"""Reserved at the end for the last checkpoint."""


def learning_rate(progress: float) -> float:
    """At a share `progress` of the run: a linear rise, a constant part, a linear fall to 0."""
    return LEARNING_RATE * max(0.0, min(1.0, progress / WARM_UP, (1 - progress) / DECAY))


@dataclass
class RunClock:
    """The time of a run of `minutes`, of which earlier processes completed the share `done`."""

    minutes: float
    done: float = 0.0
    began: float = field(default_factory=time.monotonic)
    first_step: float | None = None

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
