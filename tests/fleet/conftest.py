"""A nursery of servers, and fleets over them with the real router."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest

from onebox.fleet.config import read_fleet_config
from onebox.fleet.fleet import open_fleet
from onebox.fleet.page import ADMIN_HEADER
from onebox.fleet.process import free_ports
from tests.fleet.nursery import MemberOptions, ask

LIMIT_S = 120
HTTP = httpx.Client(verify=False, trust_env=False, timeout=LIMIT_S)  # noqa: S501 - no TLS here, whose setup takes time


def wait_until(condition):
    """Waits for what must come; the limit is only there so that a defect does not wait for ever."""
    limit = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.05)
    return found


class Nursery:
    """Starts servers; `start_line` is for a fleet's file."""

    def __init__(self, path, process):
        self.path, self.process = path, process
        self._held = []

    def start(self, port, **options):
        """The process id of a server that answers."""
        child, connection = ask(self.path, asdict(MemberOptions(port, **options)))
        self._held.append(connection)
        wait_until(lambda: is_healthy(f"http://127.0.0.1:{port}"))
        return child

    def start_line(self, **options):
        given = json.dumps({**options, "port": 0}).replace('"port": 0', '"port": {port}')
        return shlex.join([sys.executable, "-S", str(Path(__file__).parent / "nursery.py"), self.path, given])

    def close(self):
        for held in self._held:
            held.close()


def is_healthy(url):
    try:
        return HTTP.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session", autouse=True)
def _logs_of_fleets(tmp_path_factory):
    """Fleets that are refused keep theirs."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("logs"))
    yield
    tempfile.tempdir = None


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    from onebox.model.random import write_random_checkpoint

    root = tmp_path_factory.mktemp("nursery")
    for seed in range(2):
        write_random_checkpoint(root / f"tiny{seed}", seed=seed)
    path = str(root / "socket")
    command = [sys.executable, str(Path(__file__).parent / "nursery.py"), "listen", path]
    command += [str(root / f"tiny{seed}") for seed in range(2)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_until(lambda: Path(path).exists() or process.poll() is not None)
            assert process.poll() is None, "the nursery ended"
            made = Nursery(path, process)
            yield made
            made.close()
            HTTP.close()
        finally:
            process.kill()


class RunningFleet:
    """A fleet on a thread of this process, asked over HTTP as its users do."""

    def __init__(self, config):
        self.config = config
        self.fleet = None
        self.lines = []
        self.error = None
        self.pids = {}
        self._ready, self._stop = threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self):
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            async with open_fleet(self.config, self.lines.append) as self.fleet:
                self._ready.set()
                await self._stop.wait()
        except Exception as error:
            self.error = error
        self._ready.set()
        # What was closed or cancelled in its last moment needs some turns of the loop to let go of its socket.
        await asyncio.sleep(0.1)

    @contextmanager
    def running(self):
        self._thread.start()
        self._ready.wait()
        try:
            if self.error:
                raise self.error
            yield self
        finally:
            self.stop()

    def stop(self):
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def url(self):
        return self.config.url

    def admin(self, method, path):
        response = HTTP.request(method, f"{self.config.admin_url}{path}", headers={ADMIN_HEADER: "1"})
        response.raise_for_status()
        return response.json()

    def member(self, name):
        (found,) = [each for each in self.admin("GET", "/status")["members"] if each["name"] == name]
        return found

    def wait_state(self, name, state):
        wait_until(lambda: self.member(name)["state"] == state)

    def signal(self, name, number):
        os.kill(self.pids[name], number)

    def kill(self, name):
        self.signal(name, signal.SIGKILL)


def write_config(path, members, **settings):
    """A fleet's file with small times; `members` are tables."""
    port, admin_port = free_ports(2)
    given = {"port": port, "admin_port": admin_port, "poll_s": 0.25, "hang_s": 3, "start_s": 60, "drain_s": 60}
    tables = ["[fleet]", *(f"{name} = {json.dumps(value)}" for name, value in {**given, **settings}.items())]
    for member in members:
        tables += ["[[member]]", *(f"{name} = {json.dumps(value)}" for name, value in member.items())]
    path.write_text("\n".join(tables) + "\n")
    return read_fleet_config(path)


STEP_S = 0.03
"""A step of the servers takes at least this: what is to be in the middle of an answer is."""


def fleet_of_three(nursery, directory, **settings):
    """Three servers that the fleet does not own, a, b and c, behind a router."""
    ports = dict(zip("abc", free_ports(3), strict=True))
    members = [{"name": name, "url": f"http://127.0.0.1:{port}"} for name, port in ports.items()]
    fleet = RunningFleet(write_config(directory / "fleet.toml", members, **settings))
    fleet.pids, fleet.ports = {name: nursery.start(port, step_s=STEP_S) for name, port in ports.items()}, ports
    return fleet


@pytest.fixture(scope="module")
def fleet(nursery, tmp_path_factory):
    with fleet_of_three(nursery, tmp_path_factory.mktemp("fleet")).running() as running:
        yield running
