"""Progress of all commands that read or write many bytes: share, bytes, speed, time left. On stderr.

A bar on a terminal; a line now and then in a log.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["byte_progress"]


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


class _LogLines:
    """Writes a line every half minute; none for what ends sooner, which the command's last line reports."""

    def __init__(self, what: str, total_bytes: int, line_s: float = _LINE_S) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._line_s = line_s
        self._done_bytes = 0
        self._before: tuple[float, int] = (time.monotonic(), 0)
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            (last, before), now = self._before, time.monotonic()
            if now - last < self._line_s:
                return
            self._before = now, self._done_bytes
            speed = max(self._done_bytes - before, 1) / (now - last)
        left_s = max(0, self._total_bytes - self._done_bytes) / speed
        sys.stderr.write(
            f"{self._what}: {self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB, {speed / 1e6:.0f} MB/s, "
            f"{left_s / 60:.0f} min left\n"
        )
        sys.stderr.flush()
