"""One engine process: starting it, talking to it, ending it; and when to start the next one."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onebox.engine.remote.messages import StartEngine

__all__ = ["ChildProcess", "RestartPolicy"]


@dataclass(frozen=True)
class RestartPolicy:
    """When an engine counts as hung, how long to wait before a restart, and when to give up. Times in seconds."""

    hang_s: float = 300.0
    """Without a finished step while requests are open. A step computes at most --max-num-batched-tokens of prompt, so
    only a stuck one takes this long; loading has no limit."""
    first_wait_s: float = 1.0
    """Doubled with every quick death in a row."""
    quick_s: float = 60.0
    """A process that served for less died quickly."""
    max_quick_deaths: int = 5

    def wait_s(self, quick_deaths: int) -> float:
        """Before the next start, after so many quick deaths in a row."""
        return float(self.first_wait_s * 2 ** max(0, quick_deaths - 1))


class ChildProcess:
    """One engine process and the socket to it. One thread receives; any thread may send."""

    def __init__(self, first: StartEngine) -> None:
        ours, theirs = socket.socketpair()
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        with theirs:
            # A fresh interpreter, not a fork: a CUDA context does not survive one, nor do other threads' locks.
            module = "onebox.engine.remote.child"
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())]
            path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        self._unsent: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="onebox-engine-sender", daemon=True)
        self._sender.start()
        self.send(first)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Never blocks: a process that does not read must not hold up callers."""
        self._unsent.put(message)

    def receive(self, timeout_s: float) -> Any:
        """The next message, or None when none comes in time; EOFError or OSError when the process is gone."""
        return self._connection.recv() if self._connection.poll(timeout_s) else None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """Makes sure that the process is gone, and returns how it ended."""
        try:
            # One whose socket is closed is about to end by itself, and its own status says more.
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self._unsent.put(None)
        self._sender.join()
        self._connection.close()
        if status < 0:
            return f"its process was killed by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    def _send_all(self) -> None:
        while (message := self._unsent.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return
