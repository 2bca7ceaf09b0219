"""Starts a server and times its start: until it listens, until it is healthy, until its first token.

Works with any command that serves at the given address. The server's output goes to a file; the end of that file is
shown if the start fails.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from onebox.bench.answer import Ask
from onebox.bench.client import Client, Connection
from onebox.bench.machine import resident_bytes
from onebox.spec.errors import OneboxError, UsageError

__all__ = ["Launched", "launched"]

_LOOK_S = 0.05
_STOP_S = 60.0
_TAIL = 15


@dataclass
class Launched:
    """A server started by the benchmark."""

    process: subprocess.Popen[bytes]
    startup_s: dict[str, float] = field(default_factory=dict)
    """`listening`, `healthy`, `first token`, each in seconds from the start of the process."""

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.process.pid)


@contextlib.asynccontextmanager
async def launched(command: str, connection: Connection, patience_s: float) -> AsyncIterator[Launched]:
    """Runs the server; it is stopped on exit with SIGINT."""
    words = shlex.split(command)
    if not words:
        raise UsageError("--launch is empty; give the command that starts the server.")
    if await _answers(connection):
        raise UsageError(f"A server already answers at {connection.url}; stop it, or leave --launch out.")
    with tempfile.NamedTemporaryFile(prefix="onebox-bench-", suffix=".log") as log:
        began_at = time.perf_counter()
        try:
            # A separate process group, so that Ctrl-C reaches only the client, which then stops the server.
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise UsageError(f"--launch cannot be started: {words[0]}: {error.strerror}.") from None
        server = Launched(process)
        try:
            await _wait(server, connection, began_at, patience_s, Path(log.name))
            yield server
        finally:
            _stop(process)


async def _answers(connection: Connection) -> bool:
    async with Client(connection) as client, httpx.AsyncClient(base_url=client.url, timeout=5) as http:
        with contextlib.suppress(httpx.HTTPError):
            await http.get("/health")
            return True
    return False


async def _wait(server: Launched, connection: Connection, began_at: float, patience_s: float, log: Path) -> None:
    async with Client(connection) as client, httpx.AsyncClient(base_url=client.url, timeout=30) as http:
        while "healthy" not in server.startup_s:
            _refuse_dead(server, time.perf_counter() - began_at > patience_s, patience_s, log)
            with contextlib.suppress(httpx.HTTPError):
                status = (await http.get("/health")).status_code
                server.startup_s.setdefault("listening", time.perf_counter() - began_at)
                # A server without /health counts as healthy.
                if status in (200, 404):
                    server.startup_s["healthy"] = time.perf_counter() - began_at
            await asyncio.sleep(_LOOK_S)
        await client.name_model()
        answer = await client.ask(Ask(({"role": "user", "content": "Hello"},), max_tokens=4))
        if answer.arrivals_s:
            server.startup_s["first token"] = answer.sent_at + answer.arrivals_s[0] - began_at


def _refuse_dead(server: Launched, is_late: bool, patience_s: float, log: Path) -> None:
    code = server.process.poll()
    if code is None and not is_late:
        return
    said = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
    why = f"did not start within {patience_s:g} s" if code is None else f"ended with status {code} before it served"
    raise OneboxError(f"The server of --launch {why}. The end of its output:\n{said}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGINT to the group, then stronger signals."""
    try:
        for sent in (signal.SIGINT, signal.SIGTERM):
            if process.poll() is not None:
                return
            _send(process, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
    finally:
        # Also when Ctrl-C is pressed again meanwhile.
        if process.poll() is None:
            _send(process, signal.SIGKILL)
            process.wait(_STOP_S)


def _send(process: subprocess.Popen[bytes], sent: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, sent)
