"""The client's machine: hardware and software versions. Values that cannot be read are omitted."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import onebox
from onebox.bench.record import Hardware

__all__ = ["commit", "gpu_memory_bytes", "hardware", "resident_bytes", "versions"]

_QUICK_S = 10.0


def versions() -> dict[str, str]:
    """Versions of the client's software."""
    return {
        "onebox": onebox.__version__,
        "python": platform.python_version(),
        "httpx": importlib.metadata.version("httpx"),
        "platform": platform.platform(),
    }


def commit() -> str:
    """Commit of the checkout that contains this package, with "+" if it has changes; empty without a checkout."""
    root = str(Path(onebox.__file__).parent.parent)
    found = _output("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    if not found:
        return ""
    return found + ("+" if _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no") else "")


def hardware() -> Hardware:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Hardware(
        cpu=_cpu_name(),
        num_cores=os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        gpus=tuple(filter(None, _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines())),
        load_average=load,
    )


def gpu_memory_bytes() -> dict[str, int]:
    """Memory in use on each GPU, by any process; a GPU with unified memory reports none."""
    text = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    used = {f"GPU {place} in use": line.strip() for place, line in enumerate(text.splitlines())}
    return {name: int(mebibytes) << 20 for name, mebibytes in used.items() if mebibytes.isdigit()}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _output(*command: str) -> str:
    """Output of a program; empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUICK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def resident_bytes(process_id: int) -> int:
    """Resident memory of a process and its descendants; 0 if unknown. Shared pages count once per process."""
    total, waiting = 0, [process_id]
    while waiting:
        current = waiting.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{current}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for task in Path(f"/proc/{current}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total
