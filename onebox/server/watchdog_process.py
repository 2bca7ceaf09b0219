"""The process that ends a frozen server: `python -I -S watchdog_process.py BEATS SIGNALS FREEZE_S UNHEARD_S`.

Started by `Watchdog` only, by its path and without site-packages, so that it takes 10 MB. Two things are watched:
BEATS, a pipe into which the server's event loop writes, and SIGNALS, the socket on which the server hears of SIGTERM. A
signal that lies there unread was delivered to a process that cannot run Python any more.

Seconds are those in which this process itself was awake and the server was not stopped. So neither a laptop that
sleeps, a paused container or machine, Ctrl-Z nor a debugger looks like a freeze.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

__all__ = ["END_SIGNAL", "EXIT_SIGNAL", "main"]

END_SIGNAL = signal.SIGALRM
"""Has the server write the stacks of its threads and exit."""
EXIT_SIGNAL = signal.SIGVTALRM
"""Has it exit at once. SIGKILL would not: as a container's first process it is spared by those inside."""
MAX_TICK_S = 1.0
STACKS_S = 2.0
"""To write stacks to a stderr that may be held; then the server has to exit without."""
EXIT_S = 1.0
_STOPPED = (b"T", b"t")
"""States in /proc: stopped by a signal, or by a debugger."""


def main(beats: int, signals: int, freeze_s: float, unheard_s: float) -> None:
    """Returns when the server is gone, or has been ended."""
    # The server decides when this process ends: a terminal's Ctrl-C reaches it too.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    server_id = os.getppid()
    os.set_blocking(beats, False)
    inbox = socket.socket(fileno=signals)
    tick_s = min(MAX_TICK_S, freeze_s / 10, unheard_s / 10)
    silent_s = waiting_s = 0.0
    while True:
        time.sleep(tick_s)
        beat = _read(beats)
        if beat == b"" or os.getppid() != server_id:
            return
        is_stopped = _is_stopped(server_id)
        silent_s = 0.0 if beat or is_stopped else silent_s + tick_s
        waiting_s = waiting_s + tick_s if _is_waiting(inbox) and not is_stopped else 0.0
        if silent_s > freeze_s:
            reason = f"the event loop has not run for {freeze_s:g} s"
            break
        if waiting_s > unheard_s:
            reason = f"a signal to stop was not heard for {unheard_s:g} s"
            break
    _end(server_id, reason)


def _read(beats: int) -> bytes | None:
    """None where the event loop has not beaten since the last time, nothing where the server has closed its end."""
    try:
        return os.read(beats, 65536)
    except BlockingIOError:
        return None


def _is_waiting(inbox: socket.socket) -> bool:
    """Whether a signal lies there that the server has not read. It is left there."""
    try:
        return bool(inbox.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def _is_stopped(process_id: int) -> bool:
    """Where there is no /proc, no process is."""
    try:
        file = os.open(f"/proc/{process_id}/stat", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.read(file, 4096).rpartition(b")")[2].split()[0] in _STOPPED
    except (OSError, IndexError):
        return False
    finally:
        os.close(file)


def _end(server_id: int, reason: str) -> None:
    """Has the server write the stacks of its threads and exit, or exit at once, or be killed, until it is gone."""
    _say(f"onebox: {reason}: the server is ended, so that it can be started again. What its threads were doing:\n")
    for number, limit_s in ((END_SIGNAL, STACKS_S), (EXIT_SIGNAL, EXIT_S), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server_id, number)
        limit = time.monotonic() + limit_s
        while os.getppid() == server_id and time.monotonic() < limit:
            time.sleep(0.01)
        if os.getppid() != server_id:
            return


def _say(line: str) -> None:
    """Writes to stderr where that does not block: a held terminal must not keep the server."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, line.encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
