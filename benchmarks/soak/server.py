"""One life of `onebox serve`: started in a process group of its own, its log read, its numbers asked for, ended."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.checks import QuietState
from benchmarks.soak.http import Address, Sent, call
from benchmarks.soak.processes import engine_pid, tree_use

__all__ = ["LifeOptions", "ServerLife"]

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 240
IDLE_S = 4
# Small enough that prefixes are evicted and requests preempted within minutes.
_ARGUMENTS = ("--port", "0", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(24 << 20))
_QUEUE = ("--max-num-seqs", "6", "--max-num-waiting", "24", "--shutdown-timeout", "8")
# A cache directory on a file system of 64 KiB, seen by the server alone; the shell becomes the server.
_FULL_DISK = (
    'mount -t tmpfs -o size=64k none "$XDG_CACHE_HOME" && { head -c 1000000 /dev/zero > "$XDG_CACHE_HOME/full" 2>&-; '
    'exec "$0" "$@"; }'
)


@dataclass(frozen=True)
class LifeOptions:
    """How a life is started."""

    name: str
    api_key: str | None = None
    closes_stdout: bool = False
    """The reader of the server's standard output leaves once it is ready."""
    has_full_disk: bool = False
    is_released: bool = False
    """The engine's memory is freed when nobody asks for a few seconds."""
    stores_in_files: bool = False
    """Answers of the Responses API are kept in a directory; in memory they grow up to a limit, as a cache does."""


class ServerLife:
    """A running server. `on_line` gets every line of its log, on threads of this object."""

    def __init__(self, options: LifeOptions, directory: Path, on_line: Callable[[str], None]) -> None:
        self.options = options
        self.num_deaths = 0
        """Engine deaths that the soak planted in this life."""
        self.last_seen = 0.0
        """When it was last found alive."""
        self._on_line = on_line
        self._log = (directory / "server.log").open("a")
        self._log.write(f"--- {options.name}\n")
        self._ready = threading.Event()
        self._url = ""
        began = time.monotonic()
        self.process = subprocess.Popen(
            self._command(directory),
            env=self._environment(directory),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._wait_ready()
        self.start_s = time.monotonic() - began

    def _command(self, directory: Path) -> list[str]:
        command = [sys.executable, "-m", "onebox.cli.main", "serve", *_ARGUMENTS, *_QUEUE]
        if self.options.api_key:
            command += ["--api-key", self.options.api_key]
        if self.options.is_released:
            command += ["--idle-release", str(IDLE_S)]
        if self.options.stores_in_files:
            command += ["--responses-dir", str(directory / "responses")]
        if self.options.has_full_disk:
            command = ["unshare", "--map-root-user", "--mount", "sh", "-c", _FULL_DISK, *command]
        return command

    def _environment(self, directory: Path) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        if self.options.has_full_disk:
            cache = directory / "full-disk"
            cache.mkdir(exist_ok=True)
            environment["XDG_CACHE_HOME"] = str(cache)
        return environment

    def _wait_ready(self) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while not self._ready.wait(0.2):
            if self.process.poll() is not None or time.monotonic() > limit:
                self.kill()
                raise RuntimeError(f"onebox serve ({self.options.name}) did not become ready; see its log")

    def _read_output(self) -> None:
        output = self.process.stdout
        assert output is not None  # noqa: S101 - asked for above
        for line in output:
            self._take(line)
            if found := re.search(r"^Ready .* at (http\S+)/v1", line):
                self._url = found.group(1)
                self._ready.set()
                if self.options.closes_stdout:
                    output.close()
                    return

    def _read_errors(self) -> None:
        assert self.process.stderr is not None  # noqa: S101 - asked for above
        for line in self.process.stderr:
            self._take(line)

    def _take(self, line: str) -> None:
        with contextlib.suppress(ValueError):
            self._log.write(line)
            self._log.flush()
        self._on_line(line)

    @property
    def address(self) -> Address:
        host, port = self._url.removeprefix("http://").rsplit(":", 1)
        return Address(host, int(port), self.options.api_key)

    @property
    def pid(self) -> int:
        """Of the server itself; with a full disk, `unshare` and the shell have become it."""
        return self.process.pid

    @property
    def engine_pid(self) -> int | None:
        return engine_pid(self.pid)

    @property
    def is_alive(self) -> bool:
        if self.process.poll() is not None:
            return False
        self.last_seen = time.monotonic()
        return True

    async def metrics(self) -> dict[str, float]:
        """The sum of every metric's samples, by its name."""
        reply = await call(self.address, Sent("/metrics", method="GET", limit_s=20))
        totals: dict[str, float] = {}
        for line in reply.body.decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    async def quiet_state(self) -> QuietState:
        metrics = await self.metrics()
        uses = tree_use(self.pid)
        return QuietState(
            metrics.get("vllm:num_requests_running", -1),
            metrics.get("vllm:num_requests_waiting", -1),
            metrics.get("vllm:kv_cache_usage_perc", -1),
            metrics.get("onebox:engine_restarts_total", -1),
            {name: use.num_descriptors for name, use in uses.items()},
            {name: use.num_threads for name, use in uses.items()},
            {name: use.rss_bytes for name, use in uses.items()},
            {name: use.peak_bytes for name, use in uses.items()},
        )

    async def is_idle(self) -> bool:
        """Whether the engine's memory is released."""
        reply = await call(self.address, Sent("/health", method="GET", limit_s=5))
        return reply.status == 200 and reply.json().get("status") == "idle" and self.engine_pid is None

    async def is_healthy(self) -> bool:
        reply = await call(self.address, Sent("/health", method="GET", limit_s=5))
        return reply.status == 200

    def signal_engine(self, number: signal.Signals) -> bool:
        pid = self.engine_pid
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def kill(self) -> None:
        """Ends the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()
        self._log.close()
