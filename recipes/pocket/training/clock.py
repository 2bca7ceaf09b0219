"""The time of a training run, which decides its schedule, and how far it has come, which a stopped run goes on from."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onebox.spec.errors import MismatchError
from onebox.spec.model import read_json
from recipes.pocket.export import write_checkpoint
from recipes.pocket.training.network import Weights

__all__ = ["PROGRESS", "Clock", "progress_of", "save_run"]

PROGRESS = "progress.json"
CLOSING_SECONDS = 12
"""Left at the end for the last checkpoint."""


@dataclass
class Clock:
    """Time since the process began work, and since the first step, in a run of `minutes` of which `done` is a share."""

    minutes: float
    done: float = 0.0
    began: float = field(default_factory=time.monotonic)
    first_step: float | None = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def progress(self) -> float:
        """Share of the run that is over, counted from the first step: what starting took is no part of the schedule."""
        if self.first_step is None:
            self.first_step = self.elapsed
        minutes = self.minutes * (1 - self.done)
        end = minutes * 60 - min(CLOSING_SECONDS, minutes * 6)
        return self.done + (1 - self.done) * (self.elapsed - self.first_step) / max(1e-9, end - self.first_step)


def save_run(directory: Path, config: Mapping[str, Any], clock: Clock, weights: Weights) -> None:
    """The checkpoint, and how far the run has come; while files are being replaced there is no such word."""
    mark = directory / PROGRESS
    mark.unlink(missing_ok=True)
    write_checkpoint(directory, config, weights)
    mark.write_text(json.dumps({"progress": min(1.0, clock.progress)}) + "\n", encoding="utf-8")


def progress_of(directory: Path) -> float:
    """The share of the run whose checkpoint is in `directory`: 0 where there is none, 1 when it is over."""
    mark = directory / PROGRESS
    if not mark.exists():
        return 0.0
    share = read_json(mark).get("progress")
    if not isinstance(share, float | int) or not 0 <= share <= 1:
        raise MismatchError(f"{mark} does not say how far the run has come: remove {directory} to start anew.")
    return float(share)
