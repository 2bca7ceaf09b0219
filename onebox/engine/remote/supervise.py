"""One engine process: starting it, talking to it, ending it; and when to start the next one."""

import contextlib
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from onebox.engine.remote.messages import StartEngine
from onebox.engine.remote.spawn import KILL_S, SpawnedProcess, kill_group, spawn
from onebox.engine.request import QueueFullError

__all__ = ["ChildProcess", "Deaths", "RestartPolicy"]

MAX_UNSENT_BYTES = 256 << 20
"""Of messages to a process that does not read them; images make requests large."""
_END_S = 1.0
"""A process whose socket is closed has this long to end by itself, since its own exit status says more."""


@dataclass(frozen=True)
class RestartPolicy:
    """When an engine counts as hung, how long to wait before a restart, and when to give up. Times in seconds."""

    hang_s: float = 300.0
    """Without a finished step while requests are open. A step computes at most --max-num-batched-tokens of prompt, so
    only a stuck one takes this long; loading has no limit."""
    first_wait_s: float = 1.0
    """Doubled with every quick death in a row."""
    max_wait_s: float = 30.0
    quick_s: float = 60.0
    """A process that served for less died quickly."""
    max_quick_deaths: int = 5
    unstartable_s: float = 300.0
    """How long starts are tried that fail because the system has no descriptors, memory or processes left."""

    def wait_s(self, num_in_a_row: int) -> float:
        """Before the next start, after so many quick deaths or failed starts in a row."""
        return float(min(self.first_wait_s * 2 ** max(0, num_in_a_row - 1), self.max_wait_s))


class Deaths:
    """The recent deaths of an engine: how long to wait before the next start, and when to give up."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_quick = 0
        self._num_unstarted = 0
        self._unstarted_since = 0.0

    def add(self, served_s: float) -> None:
        """A process died after it had served for so long."""
        self._num_unstarted = 0
        self._num_quick = self._num_quick + 1 if served_s < self._policy.quick_s else 0

    def add_unstarted(self) -> None:
        """A process could not even be started."""
        if not self._num_unstarted:
            self._unstarted_since = time.monotonic()
        self._num_unstarted += 1

    @property
    def wait_s(self) -> float:
        return self._policy.wait_s(self._num_unstarted or self._num_quick)

    @property
    def verdict(self) -> str | None:
        """Why restarting is given up, as the beginning of a sentence; None to go on."""
        if self._num_unstarted:
            seconds = time.monotonic() - self._unstarted_since
            is_over = seconds >= self._policy.unstartable_s
            return f"The engine could not be started for {seconds:.0f} s, the last time because" if is_over else None
        if self._num_quick >= self._policy.max_quick_deaths:
            return f"The engine died {self._num_quick} times in a row soon after its start, the last time because"
        return None


class ChildProcess:
    """One engine process and the socket to it. One thread receives; any thread may send."""

    def __init__(self, first: StartEngine, silence_s: float, spawned: SpawnedProcess | None = None) -> None:
        """`spawned` if there is a process already. A message that stays half-received for `silence_s` seconds is an
        error of `receive`.

        Raises OSError where the system has no descriptors, memory or processes left.
        """
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_unsent_bytes = 0
        self._counting = threading.Lock()
        self._process, self._socket = spawned or spawn()
        with contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            undo.callback(self._process.wait)
            undo.callback(self.kill)
            whole, part = divmod(silence_s, 1)
            limit = struct.pack("ll", int(whole), int(part * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._connection: Connection[Any, Any] = Connection(self._socket.fileno())
            undo.callback(self._connection.close)
            undo.callback(self._socket.detach)
            self._sender = threading.Thread(target=self._send_all, name="onebox-engine-sender", daemon=True)
            try:
                self._sender.start()
            except RuntimeError as error:
                raise OSError(str(error)) from None
            undo.pop_all()
        self.send(pickle.dumps(first))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Asked beside reading: processes that it started may hold its end of the socket open.

        Does not collect the process, so that its id, and that of its group, cannot be another's before `end`.
        """
        if self._process.returncode is not None:
            return True
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        except ChildProcessError:
            return True

    def check_room(self, num_bytes: int) -> None:
        """Refuses a message that would be one too many for a process that does not read."""
        with self._counting:
            waiting = self._num_unsent_bytes
        if waiting and waiting + num_bytes > MAX_UNSENT_BYTES:
            raise QueueFullError(
                f"The engine has not yet read {waiting >> 20} MiB of requests that were sent to it, and this one has "
                f"{num_bytes >> 20} MiB; try again in a moment."
            )

    def send(self, pickled: bytes) -> None:
        """Never blocks: a process that does not read must not hold up callers."""
        with self._counting:
            self._num_unsent_bytes += len(pickled)
        self._unsent.put(pickled)

    def receive(self, timeout_s: float) -> Any:
        """The next message, or None when none comes in time.

        TimeoutError when it stops in the middle of a message; EOFError or another OSError when the process is gone.
        """
        if not self._connection.poll(timeout_s):
            return None
        try:
            return self._connection.recv()
        except BlockingIOError:
            raise TimeoutError("it stopped in the middle of a message") from None

    def kill(self) -> None:
        """Kills the process and those that it started."""
        kill_group(self._process)

    def end(self) -> str:
        """Makes sure that the process is gone, and returns how it ended."""
        limit = time.monotonic() + _END_S
        while not self.has_ended and time.monotonic() < limit:
            time.sleep(0.01)
        self.kill()
        self._unsent.put(None)
        # Wakes a sender that waits for a reader.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._sender.join(KILL_S)
        self._socket.detach()
        self._connection.close()
        try:
            status = self._process.wait(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            return "its process does not end even when killed"
        if status < 0:
            return f"its process was killed by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    def _send_all(self) -> None:
        while (pickled := self._unsent.get()) is not None:
            try:
                self._connection.send_bytes(pickled)
            except OSError:
                return
            with self._counting:
                self._num_unsent_bytes -= len(pickled)
