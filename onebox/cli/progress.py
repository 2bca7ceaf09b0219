"""Progress of all commands that take long: of bytes, with their speed, or of steps; and the time left. On stderr.

A bar on a terminal; a line now and then in a log.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["byte_progress", "step_progress"]


_LINE_S = 30.0
"""Between two lines in a log."""


@contextmanager
def byte_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows progress towards `total_bytes`; call the returned function with each number of bytes done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LogLines(what, total_bytes).add
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda count: progress.update(task, advance=count)


@contextmanager
def step_progress(what: str, num_steps: int) -> Iterator[Callable[[int], None]]:
    """Shows progress towards `num_steps`; call the returned function with each number of steps done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LogLines(what, num_steps, unit="steps").add
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=num_steps)
        yield lambda count: progress.update(task, advance=count)


class _LogLines:
    """Writes a line every half minute; none for what ends sooner, which the command's last line reports."""

    def __init__(self, what: str, total: int, line_s: float = _LINE_S, unit: str = "bytes") -> None:
        self._what = what
        self._unit = unit
        self._total = total
        self._line_s = line_s
        self._done = 0
        self._before: tuple[float, int] = (time.monotonic(), 0)
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            (last, before), now = self._before, time.monotonic()
            if now - last < self._line_s:
                return
            self._before = now, self._done
            speed = max(self._done - before, 1) / (now - last)
        left_s = max(0, self._total - self._done) / speed
        if self._unit == "bytes":
            done = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {speed / 1e6:.0f} MB/s"
        else:
            done = f"{self._done:,} of {self._total:,} {self._unit}"
        sys.stderr.write(f"{self._what}: {done}, {left_s / 60:.0f} min left\n")
        sys.stderr.flush()
