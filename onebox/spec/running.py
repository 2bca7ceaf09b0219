"""Which servers run on this machine: each keeps a small file while it runs, which `onebox ps` and `onebox stop` read.

The file lies in the service's runtime directory (systemd's RUNTIME_DIRECTORY), else in the user's. A file of a process
that is gone, or whose number another process has now, counts for nothing and is removed.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from onebox.spec.cache import temporary_cache_directory

__all__ = ["RunningServer", "registered", "running_servers"]

_SYSTEM = Path("/run/onebox")


@dataclass(frozen=True)
class RunningServer:
    """One `onebox serve`."""

    process_id: int
    started_ticks: int
    """When the process started, in the kernel's ticks: tells it from a later one with the same number."""
    model: str
    """Its name in the API."""
    directory: str
    url: str
    since: float
    """Seconds since the epoch."""
    planned_bytes: int
    """Of the memory plan."""

    @property
    def is_alive(self) -> bool:
        return _started_ticks(self.process_id) == self.started_ticks

    @property
    def resident_bytes(self) -> int:
        """Host memory of the server and the processes that it started."""
        return sum(_resident_bytes(each) for each in _family(self.process_id))


@contextlib.contextmanager
def registered(model: str, directory: str, url: str, planned_bytes: int) -> Iterator[None]:
    """Keeps this process's file. Without a place for it the server runs all the same."""
    number = os.getpid()
    server = RunningServer(number, _started_ticks(number) or 0, model, directory, url, time.time(), planned_bytes)
    path: Path | None = None
    with contextlib.suppress(OSError):
        path = _own_directory() / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(server)))
    try:
        yield
    finally:
        if path:
            with contextlib.suppress(OSError):
                path.unlink()


def running_servers() -> list[RunningServer]:
    """Those that this user can see, oldest first."""
    found: dict[int, RunningServer] = {}
    for path in (path for directory in _directories() for path in sorted(directory.glob("*.json"))):
        try:
            server = RunningServer(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if server.is_alive:
            found[server.process_id] = server
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found.values(), key=lambda server: server.since)


def _own_directory() -> Path:
    given = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given)
    user = os.environ.get("XDG_RUNTIME_DIR", "")
    if user and os.access(user, os.W_OK):
        return Path(user, "onebox")
    return temporary_cache_directory() / "running"


def _directories() -> list[Path]:
    users = Path("/run/user").glob("*/onebox")
    own = []
    with contextlib.suppress(OSError):
        own = [_own_directory()]
    found = dict.fromkeys([_SYSTEM, *users, *own])
    return [path for path in found if os.access(path, os.R_OK)]


def _started_ticks(process_id: int) -> int | None:
    try:
        # The name may hold spaces and brackets; the fields after it do not.
        return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _family(process_id: int) -> list[int]:
    family = [process_id]
    for one in family:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family += [int(child) for child in path.read_text().split()]
    return family


def _resident_bytes(process_id: int) -> int:
    try:
        pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
