"""One progress bar for all commands that read or write many bytes: share, bytes, speed, time left. On stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["byte_progress"]


@contextmanager
def byte_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows progress towards `total_bytes`; call what it gives with each number of bytes done."""
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
    # Without a terminal a bar is noise in a log; the command's last line says what was done.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda count: progress.update(task, advance=count)
