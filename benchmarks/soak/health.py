"""Probes /health from a process of its own, so that the soak's own work does not delay it.

Run as a program: addresses and process ids come as lines on standard input, samples leave as lines on standard output.
"""

import contextlib
import http.client
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.soak.checks import HealthSample
from benchmarks.soak.processes import run_delay_s

__all__ = ["HealthProbe"]

_INTERVAL_S = 0.2
_LIMIT_S = 15.0
ROOT = Path(__file__).parents[2]


class HealthProbe:
    """The probing process, as the soak sees it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.soak.health"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )
        self.samples: list[HealthSample] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def watch(self, host: str, port: int, pid: int) -> None:
        """From now on probes this server."""
        self._say(f"{host} {port} {pid}")

    def rest(self) -> None:
        """Probes nothing until told again."""
        self._say("rest")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(timeout=_LIMIT_S * 2)
        self._reader.join(5)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - asked for above
        for line in self._process.stdout:
            at, latency, status, delay = line.split()
            self.samples.append(HealthSample(float(at), float(latency), int(status), float(delay)))


def _probe(host: str, port: int, pid: int) -> HealthSample:
    at, delay = time.monotonic(), run_delay_s(pid)
    status = 0
    connection = http.client.HTTPConnection(host, port, timeout=_LIMIT_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    return HealthSample(at, time.monotonic() - at, status, run_delay_s(pid) - delay)


def main() -> None:
    target: list[str] = ["rest"]
    has_ended = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            target[0] = line.strip()
        has_ended.set()

    threading.Thread(target=listen, daemon=True).start()
    while not has_ended.wait(_INTERVAL_S):
        if target[0] != "rest":
            host, port, pid = target[0].split()
            sample = _probe(host, int(port), int(pid))
            print(sample.at, sample.latency_s, sample.status, sample.delay_s, flush=True)


if __name__ == "__main__":
    main()
