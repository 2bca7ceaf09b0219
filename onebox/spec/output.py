"""What a server and its engine tell their operator, written on a thread of its own.

A terminal that is held (Ctrl-S), a pipe whose reader is gone or reads nothing, a log on a full disk: none of them stops
or ends the process that speaks. Lines that cannot be written in time are dropped.
"""

import contextlib
import logging
import os
import queue
import sys
import threading
from typing import IO, NoReturn

__all__ = ["end_process", "flush_output", "log_in_background", "say"]

MAX_LINES = 1000
"""That wait for a slow reader; further ones are dropped."""
FLUSH_S = 2.0

_lines: queue.Queue[tuple[int, bytes]] = queue.Queue(MAX_LINES)
_starting = threading.Lock()
_writer: threading.Thread | None = None


def say(line: str, *, is_error: bool = False) -> None:
    """Writes a line to stdout or stderr, soon; never blocks and never fails."""
    stream = sys.stderr if is_error else sys.stdout
    number = _file_number(stream)
    if number is None:
        return
    with contextlib.suppress(queue.Full, RuntimeError):
        _start_writer()
        _lines.put_nowait((number, f"{line}\n".encode(errors="replace")))


def flush_output(timeout_s: float = FLUSH_S) -> None:
    """Waits until all lines are written, or for so long."""
    with _lines.all_tasks_done:
        _lines.all_tasks_done.wait_for(lambda: not _lines.unfinished_tasks, timeout_s)


def end_process(status: int) -> NoReturn:
    """Ends the process once its lines are written, whatever its other threads wait for."""
    flush_output()
    os._exit(status)


def log_in_background() -> None:
    """Sends what is logged in this process to stderr, as `say` does."""
    handler = _BackgroundHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]


class _BackgroundHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record), is_error=True)
        except Exception:
            self.handleError(record)


def _file_number(stream: IO[str] | None) -> int | None:
    """Of a standard stream; None where it was closed before the process started."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


def _start_writer() -> None:
    global _writer
    with _starting:
        if _writer is None:
            thread = threading.Thread(target=_write_all, name="onebox-output", daemon=True)
            thread.start()
            _writer = thread


def _write_all() -> None:
    while True:
        number, data = _lines.get()
        try:
            while data:
                data = data[os.write(number, data) :]
        except OSError:
            pass  # nobody reads it, or it is full
        finally:
            _lines.task_done()
