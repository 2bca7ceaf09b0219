"""What the kernel says about the server's processes: memory, descriptors, threads, time spent waiting for a core."""

import os
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "ProcessUse",
    "children",
    "engine_pid",
    "read_use",
    "run_delay_s",
    "task_delays_s",
    "tree_use",
    "virtual_bytes",
]

_ENGINE = "onebox.engine.remote.child"


class ProcessUse(NamedTuple):
    pid: int
    rss_bytes: int
    peak_bytes: int
    num_descriptors: int
    num_threads: int


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def engine_pid(server_pid: int) -> int | None:
    return next((pid for pid in children(server_pid) if _ENGINE in command_line(pid)), None)


def read_use(pid: int) -> ProcessUse | None:
    """None for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        num_descriptors = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names alone, and no Path for each
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in fields:
        return None
    rss_bytes, peak_bytes = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return ProcessUse(pid, rss_bytes, peak_bytes, num_descriptors, int(fields["Threads"]))


def tree_use(server_pid: int) -> dict[str, ProcessUse]:
    """The server, its engine, and all that they have started together as "helpers"."""
    engine = engine_pid(server_pid)
    uses = {"server": read_use(server_pid), "engine": read_use(engine) if engine else None}
    others = [use for pid in _descendants(server_pid) if pid != engine and (use := read_use(pid))]
    if others:
        uses["helpers"] = ProcessUse(others[0].pid, *(sum(use[place] for use in others) for place in range(1, 5)))
    return {name: use for name, use in uses.items() if use is not None}


def _descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [further for child in below for further in _descendants(child)]


def run_delay_s(pid: int | str) -> float:
    """Seconds that the process's main thread was ready to run and had no core; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def task_delays_s(pid: int) -> dict[str, float]:
    """Seconds without a core of each thread, by its id."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return {}
    return {task.name: run_delay_s(f"{pid}/task/{task.name}") for task in tasks}


def virtual_bytes(pid: int) -> int:
    """The size of the address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
