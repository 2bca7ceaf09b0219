"""Progress bar of all commands that read or write many bytes: share, bytes, speed, time left. On stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["byte_progress"]


@contextmanager
def byte_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows progress towards `total_bytes`; call the returned function with each number of bytes done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # No bar in a log; the command's last line reports the result.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda count: progress.update(task, advance=count)
