"""Probes /health and sends canaries from a process of its own, so that the soak's own work does not delay them.

Run as a program: commands come as lines on standard input, samples leave as lines of JSON on standard output.
"""

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.soak.checks import CanarySample, HealthSample, longest_wait_s
from benchmarks.soak.processes import engine_pid, run_delay_s, task_delays_s
from benchmarks.soak.server import ServerLife

__all__ = ["Probes"]

_HEALTH_INTERVAL_S = 0.2
_CANARY_INTERVAL_S = 0.4
_HEALTH_LIMIT_S = 15.0
_CANARY_LIMIT_S = 120.0
_ROOT = Path(__file__).parents[2]
# The priority keeps it from waiting behind ordinary requests: what delays it delays everybody.
_CANARY_BODY = {
    "messages": [{"role": "user", "content": "Count from 1 to 12."}],
    "max_tokens": 24,
    "temperature": 0,
    "stream": True,
    "enable_thinking": False,
    "priority": -100,
}


class Probes:
    """The probing process, as the soak sees it."""

    def __init__(self) -> None:
        self.health: list[HealthSample] = []
        self.canaries: list[CanarySample] = []
        command = [sys.executable, "-m", "benchmarks.soak.probes"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def watch(self, life: ServerLife) -> None:
        """From now on probes this server's health; `canaries_from` says the rest."""
        self._say({"address": life.address, "pid": life.pid})

    def send_canaries(self, is_wanted: bool) -> None:
        self._say({"canaries": is_wanted})

    def rest(self) -> None:
        """Probes nothing until told again."""
        self._say({"address": None, "canaries": False})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(timeout=_HEALTH_LIMIT_S * 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(5)
        self._process.stdout.close()  # type: ignore[union-attr]

    def _say(self, command: dict[str, object]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - asked for above
        for line in self._process.stdout:
            kind, *values = json.loads(line)
            if kind == "health":
                self.health.append(HealthSample(*values))
            else:
                self.canaries.append(CanarySample(*values))


class _Prober:
    """In the probing process: two threads that probe, and the target that commands change."""

    def __init__(self) -> None:
        self._address: tuple[str, int, str | None] | None = None
        self._pid = 0
        self._has_canaries = False
        self._has_ended = threading.Event()
        self._output = threading.Lock()

    def run(self) -> None:
        threads = [threading.Thread(target=self._probe_health), threading.Thread(target=self._send_canaries)]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for line in sys.stdin:
            command = json.loads(line)
            self._has_canaries = command.get("canaries", self._has_canaries)
            self._pid = command.get("pid", self._pid)
            self._address = command.get("address", self._address)
        self._has_ended.set()

    def _probe_health(self) -> None:
        while not self._has_ended.wait(_HEALTH_INTERVAL_S):
            if address := self._address:
                at, delay = time.monotonic(), run_delay_s(self._pid)
                status = _health_status(*address[:2])
                self._write("health", at, time.monotonic() - at, status, run_delay_s(self._pid) - delay)

    def _send_canaries(self) -> None:
        while not self._has_ended.wait(_CANARY_INTERVAL_S):
            if (address := self._address) and self._has_canaries:
                began, before = time.monotonic(), self._delays()
                status, arrivals = _canary(*address)
                ended = time.monotonic()
                delays = (now - before.get(task, 0.0) for task, now in self._delays().items())
                wait_s = longest_wait_s(began, arrivals or [ended])
                self._write("canary", began, ended, wait_s, max(delays, default=0.0), status)

    def _delays(self) -> dict[str, float]:
        pids = (pid for pid in (self._pid, engine_pid(self._pid)) if pid)
        return {f"{pid} {task}": delay for pid in pids for task, delay in task_delays_s(pid).items()}

    def _write(self, *values: object) -> None:
        with self._output:
            print(json.dumps(values), flush=True)


def _health_status(host: str, port: int) -> int:
    """0 where no answer came."""
    connection = http.client.HTTPConnection(host, port, timeout=_HEALTH_LIMIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _canary(host: str, port: int, api_key: str | None) -> tuple[int, list[float]]:
    """(status, arrivals of its lines); status 0 where the stream has no end."""
    connection = http.client.HTTPConnection(host, port, timeout=_CANARY_LIMIT_S)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    arrivals: list[float] = []
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(_CANARY_BODY), headers)
        response = connection.getresponse()
        last = b""
        for line in response:
            arrivals.append(time.monotonic())
            last = line.strip() or last
        is_whole = response.status != 200 or last == b"data: [DONE]"
        return response.status if is_whole else 0, arrivals
    except (OSError, http.client.HTTPException):
        return 0, arrivals
    finally:
        connection.close()


if __name__ == "__main__":
    _Prober().run()
