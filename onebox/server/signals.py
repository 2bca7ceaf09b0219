"""SIGINT and SIGTERM, heard on a thread of their own: also while the event loop is blocked."""

import select
import signal
import socket
import threading
import time
from collections.abc import Callable

from onebox.spec.output import end_process, say

__all__ = ["SignalWatch"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BEGIN = 0
"""A byte that no signal has: the ending begins without one."""


class SignalWatch:
    """Passes the first two signals on, and makes sure that the process ends.

    Each begins a limit of its own, after which the process is ended whatever its threads wait for. The third signal
    ends it at once.
    """

    def __init__(self, on_signal: Callable[[int], None], limits_s: tuple[float, float]) -> None:
        """`on_signal` is called with 1 and with 2, on the thread of this object; `limits_s` are the limits of both."""
        self.status = 0
        """The exit status of a process that is ended here."""
        self._on_signal = on_signal
        self._limits_s = limits_s
        self._inbox, self._outbox = socket.socketpair()
        # A signal handler in C writes the signal's number, whatever the main thread does.
        self._outbox.setblocking(False)
        signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, _ignore)
        threading.Thread(target=self._listen, name="onebox-signals", daemon=True).start()

    def fileno(self) -> int:
        """Of the socket where a signal lies until it is heard, which takes Python's lock."""
        return self._inbox.fileno()

    def begin_ending(self, status: int) -> None:
        """As a first signal would, but without calling `on_signal`: for an ending that has another cause."""
        self.status = status
        self._outbox.send(bytes([_BEGIN]))

    def _listen(self) -> None:
        num_signals, limit = 0, float("inf")
        # Read only once Python's lock is there: the watchdog sees what lies unread.
        waiting = select.poll()
        waiting.register(self._inbox, select.POLLIN)
        while True:
            if not waiting.poll(None if limit == float("inf") else 1000 * max(0.001, limit - time.monotonic())):
                say("onebox: what was running did not end in time; stopped.", is_error=True)
                end_process(self.status)
            number = self._inbox.recv(1)[0]
            if number not in (_BEGIN, *_SIGNALS):
                continue
            num_signals += 1
            if num_signals > len(self._limits_s):
                end_process(self.status)
            limit = min(limit, time.monotonic() + self._limits_s[num_signals - 1])
            if number != _BEGIN:
                self._on_signal(num_signals)


def _ignore(*_: object) -> None:
    pass
