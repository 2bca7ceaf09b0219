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

from onebox.spec.log import LogStyle

__all__ = ["end_process", "flush_output", "log_in_background", "log_style", "say"]

MAX_LINES = 1000
"""That wait for a slow reader; further ones are dropped."""
FLUSH_S = 2.0

_lines: queue.Queue[tuple[int, bytes]] = queue.Queue(MAX_LINES)
_starting = threading.Lock()
_writer: threading.Thread | None = None
_style = LogStyle()


def say(line: str, *, is_error: bool = False) -> None:
    """Writes a line to stdout or stderr, soon; never blocks and never fails.

    What is no error counts as information where `log_in_background` set a higher level.
    """
    level = "error" if is_error else "info"
    if _style.writes(level):
        _write(_style.line(level, line), is_error=is_error)


def _write(line: str, *, is_error: bool) -> None:
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


def log_in_background(style: LogStyle | None = None) -> None:
    """Sends what is logged in this process to stderr, on the thread that writes what is said, in a style of both."""
    global _style
    _style = style or LogStyle()
    handler = _BackgroundHandler()
    handler.setFormatter(_style.formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Of other libraries warnings alone: what they tell below that may hold what clients send.
    logging.getLogger("onebox").setLevel(_style.number)


def log_style() -> LogStyle:
    """That of this process."""
    return _style


class _BackgroundHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write(self.format(record), is_error=True)
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
