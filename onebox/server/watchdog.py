"""Ends a server that is frozen, so that whoever started it starts it again.

Work that holds Python's lock and does not return (a regular expression, a C extension) stops every thread: nothing is
answered, and a signal to stop is not heard. Only another process can end that one. `Watchdog` starts it and
has the event loop tell it that it runs; `watchdog_process.py` is what it does.
"""

import asyncio
import ctypes
import faulthandler
import logging
import os
import subprocess
import sys
from pathlib import Path

from onebox.server import watchdog_process

__all__ = ["FREEZE_S", "Watchdog"]

_log = logging.getLogger(__name__)

FREEZE_S = 60.0
"""An event loop that has not run for so long is frozen for good. In hours of hostile load on two busy cores it was late
by 0.6 s at most; the longest pause by a request that came to its end, since mended, was 9 s."""
UNHEARD_S = 10.0
"""A signal to stop needs Python's lock for a moment. Whoever sends one waits already, so this is shorter."""
BEAT_S = 0.5


class Watchdog:
    """Beats on the event loop from `start` on, also while running requests finish, until `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, signals: int, freeze_s: float, unheard_s: float) -> None:
        """`signals` is the file number of the socket from which the server reads its signals."""
        self._loop = loop
        self._signals = signals
        self._limits_s = freeze_s, unheard_s
        self._beat_s = min(BEAT_S, freeze_s / 10)
        self._pipe: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The server serves without a watchdog where the system has no descriptors, memory or processes left."""
        _exit_on_signals()
        try:
            theirs, ours = os.pipe()
        except OSError as error:
            _log.warning("a frozen server would not be noticed: %s", error.strerror)
            return
        try:
            self._process = self._spawn(theirs)
        except OSError as error:
            os.close(ours)
            _log.warning("a frozen server would not be noticed: %s", error.strerror)
            return
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        self._pipe = ours
        self._beat()

    def close(self) -> None:
        """The process ends by itself when the pipe is closed."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _spawn(self, theirs: int) -> "subprocess.Popen[bytes]":
        numbers = (theirs, self._signals, *self._limits_s)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(watchdog_process.__file__)), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs, self._signals],
            process_group=0,
        )

    def _beat(self) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, b".")
        except BlockingIOError:
            pass  # it is stopped itself, and will find enough of them
        except OSError:
            _log.warning("the watchdog's process has ended: a frozen server would not be noticed")
            self.close()
            if self._process:
                self._process.poll()
            return
        self._loop.call_later(self._beat_s, self._beat)


def _exit_on_signals() -> None:
    """Has the watchdog's signals end this process with their number as its status, one of them with the stacks of all
    threads before it: in C, without Python's lock.

    The handler is the C library's own `_exit`. A signal's default would not end a container's first process.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in (watchdog_process.END_SIGNAL, watchdog_process.EXIT_SIGNAL):
        library.signal(number, ctypes.cast(library._exit, ctypes.c_void_p))
    try:
        stderr = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return  # closed before the process started
    # Chained: the stacks, then what the signal did before.
    faulthandler.register(watchdog_process.END_SIGNAL, file=stderr, all_threads=True, chain=True)
