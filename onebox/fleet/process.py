"""Processes that the fleet starts, and so may stop: members of its own, and the router."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from onebox.spec.errors import OneboxError, UsageError

__all__ = ["OwnedProcess", "free_ports"]

_NUM_LINES = 20
KILL_S = 10.0
"""After a process should have ended."""


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
        self._signal(signal.SIGTERM)
        if not await self.wait(limit_s):
            self._kill()
            await self.wait(KILL_S)
        # What it has started may be left, such as an engine whose server was killed.
        self._kill()

    async def wait(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.status is None:
                    await asyncio.sleep(0.05)
        return self.status is not None

    def _signal(self, number: int) -> None:
        if self.status is None:
            self._process.send_signal(number)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now; taken together, so that they differ."""
    sockets = []
    try:
        for _ in range(count):
            sockets.append(socket.socket())
            sockets[-1].bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    except OSError as error:
        raise OneboxError(f"No port is free on {host} ({error.strerror}).") from None
    finally:
        for each in sockets:
            each.close()
