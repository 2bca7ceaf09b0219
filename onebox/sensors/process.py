"""CPU time of a process and its descendants, and the process that listens on a port. From /proc."""

import contextlib
import os
from pathlib import Path

__all__ = ["cpu_seconds", "listening_process"]

_LISTEN = "0A"


def cpu_seconds(process_id: int, proc: Path = Path("/proc")) -> float | None:
    """User and system time of a process tree since its start; None if the process cannot be read.

    Descendants that have ended are included through their parents.
    """
    ticks, waiting, is_known = 0, [process_id], False
    while waiting:
        current = waiting.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in brackets may hold spaces.
            fields = (proc / str(current) / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
            is_known = is_known or current == process_id
            for task in (proc / str(current) / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK") if is_known else None


def listening_process(port: int, proc: Path = Path("/proc")) -> int | None:
    """The process that listens on a TCP port of this machine; None if it is not ours to see."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    for directory in proc.glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):
            for descriptor in (directory / "fd").iterdir():
                if str(descriptor.readlink()) in wanted:
                    return int(directory.name)
    return None


def _listening_inodes(port: int, proc: Path) -> set[str]:
    found = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
