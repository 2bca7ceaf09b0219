"""Processes that the fleet starts, and so may stop: members of its own, and the router."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from onebox.spec.errors import OneboxError, UsageError

__all__ = ["KILL_S", "OwnedProcess", "free_ports"]

_NUM_LINES = 20
KILL_S = 10.0
"""After a process should have ended."""
_SERVER_PORTS = range(20000, 30000)


class OwnedProcess:
    """A process in a group of its own: Ctrl-C in the terminal reaches the fleet alone, which ends the others in order.

    What it prints goes into a file; its last lines are for the sentence that says why it ended.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] = {}) -> None:
        self.name = name
        self.log = log
        try:
            with log.open("ab") as file:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
        except OSError as error:
            raise UsageError(f"{name} cannot be started: {command[0]} ({error.strerror}).") from None

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def why(self) -> str:
        """How it ended, with the last line that it printed."""
        last = ""
        with contextlib.suppress(OSError), self.log.open(errors="replace") as file:
            last = next((line.strip() for line in reversed(deque(file, _NUM_LINES)) if line.strip()), "")
        return f"{self.name} ended with status {self.status}: {last[:300] or 'it printed nothing'} ({self.log})"

    async def stop(self, limit_s: float) -> None:
        """SIGTERM, time to end what is running, then SIGKILL to the group."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)
        if not await self.wait(limit_s):
            self.kill()
            await self.wait(KILL_S)
        # What it has started may be left, such as an engine whose server was killed.
        self.kill()

    async def wait(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.status is None:
                    await asyncio.sleep(0.05)
        return self.status is not None

    def kill(self) -> None:
        """SIGKILL to the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nobody has now.

    Not those that the system gives to outgoing connections: one of these could take the port of a server that is down
    before it is started again.
    """
    found: list[int] = []
    for port in random.sample(_SERVER_PORTS, len(_SERVER_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
    if len(found) < count:
        raise OneboxError(f"No port from {_SERVER_PORTS[0]} to {_SERVER_PORTS[-1]} is free on 127.0.0.1.")
    return found
